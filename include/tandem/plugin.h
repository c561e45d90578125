/* Plug-ins: shared objects that register kinds of devices and backends. docs/plugins.md has the user's side, and walks
 * through writing one.
 *
 * The file of the plug-in NAME is tandem_NAME.so. It is loaded when an unknown device ("cuda:1" loads tandem_cuda.so)
 * or an unknown backend ("nccl" loads tandem_nccl.so) is used first, or by td_load_plugin(). It is looked for
 *
 *     1. in TANDEM_PLUGIN_PATH: folders, and files, with ':' between them. Set-user-ID programs ignore it
 *     2. in the folder tandem/plugins beside the library
 *
 * and the first file of the name is taken. A loaded plug-in stays until the end of the process.
 *
 * A file is refused if other users could have changed it: it and its folder must belong to root, to the user, or to
 * the owner of the library; the file must not be writable by everybody, and neither must a folder above it, unless
 * that folder is sticky, as /tmp is.
 *
 * Threads. All functions may be called from any thread at any time. One thread loads a plug-in, and others that need
 * one, or fork, wait for it; so init() must not wait for another thread that does, nor create a process group. */
#ifndef TANDEM_PLUGIN_H
#define TANDEM_PLUGIN_H

#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- For users ---------------------------------------------------------------------------------- */

/** Loads a plug-in: a name, such as "cuda", or the path of a file, which has a '/'. One that is loaded already is fine.
 *  Also forgets which plug-ins were not found, or could not be loaded, so that they are tried again; not from init().
 *
 *  Errors, with a sentence that names the file and the reason: TD_ERR_INVALID, there is none, or the file is no
 *  plug-in; TD_ERR_AUTH, other users can change the file; TD_ERR_SYSTEM, the loader's reason, such as a missing
 *  library; TD_ERR_MISMATCH, it was compiled for an older or newer version: both are named; what its init() returns. */
TD_API td_status td_load_plugin(const char *name_or_path);

typedef enum td_plugin_state {
    TD_PLUGIN_FOUND,  /* not loaded so far */
    TD_PLUGIN_LOADED, /* … or being loaded */
    TD_PLUGIN_FAILED, /* `error` says why */
} td_plugin_state;

/** A plug-in. Texts are never NULL. */
typedef struct td_plugin_info {
    td_plugin_state state;
    const char *name;     /* "cuda" */
    const char *path;     /* of its file */
    const char *origin;   /* how it was found: "TANDEM_PLUGIN_PATH", "library", "td_load_plugin" */
    const char *release;  /* its own version; "" before it is loaded */
    const char *devices;  /* kinds that its init() has registered, with ", " between them */
    const char *backends; /* likewise */
    const char *error;    /* of the last attempt to load it; "" unless it failed */
    td_status status;     /* likewise; TD_ERR_UNSUPPORTED: the machine does not have what it is for */
    void *reserved[4];
} td_plugin_info;

/** Lists all plug-ins, by their names: those that would be found, and those that were loaded by a path. `load` loads
 *  those that are not; that one cannot be loaded is no error of this call. *plugins is for td_free_plugin_list(); NULL
 *  if there are none. */
TD_API td_status td_list_plugins(bool load, td_plugin_info **plugins, int *count);
TD_API void td_free_plugin_list(td_plugin_info *plugins);

/* ---- For authors --------------------------------------------------------------------------------
 *
 *     static td_status init(void)
 *     {
 *         return td_register_backend("toy", &toy_ops, NULL);
 *     }
 *
 *     TD_PLUGIN("toy", "1.0", init)
 *
 * A plug-in is not linked with libtandem: the functions td_x are those of the process that loads it. */

#define TD_PLUGIN_VERSION 1

/** What a plug-in says about itself. The struct grows at its end. */
typedef struct td_plugin {
    uint32_t version;        /* TD_PLUGIN_VERSION */
    uint32_t size;           /* sizeof(td_plugin) */
    uint32_t headers;        /* TD_VERSION */
    const char *name;        /* "toy" in tandem_toy.so: letters, digits, '_' and '-'; up to 31 */
    const char *release;     /* the plug-in's own version */
    td_status (*init)(void); /* registers what it has; called once, and again if it failed */
    void *reserved[4];       /* must be zero */
} td_plugin;

/** Defines the one symbol that a plug-in exports, the function tandem_plugin(), which returns its description. Stands
 *  once in the plug-in, outside of functions. */
#define TD_PLUGIN(plugin_name, plugin_release, plugin_init)                                        \
    TD_PLUGIN_LINKAGE TD_API const td_plugin *tandem_plugin(void);                                 \
    const td_plugin *tandem_plugin(void)                                                           \
    {                                                                                              \
        static const td_plugin description = {                                                     \
            TD_PLUGIN_VERSION, sizeof(td_plugin),       TD_VERSION, plugin_name, plugin_release,   \
            plugin_init,       {NULL, NULL, NULL, NULL}};                                          \
        return &description;                                                                       \
    }

#ifdef __cplusplus
#define TD_PLUGIN_LINKAGE extern "C"
#else
#define TD_PLUGIN_LINKAGE extern
#endif

#ifdef __cplusplus
}
#endif

#endif
