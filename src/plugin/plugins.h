/* Plug-ins, for the components that have registries: <tandem/plugin.h> has the rules.
 *
 * The order of locks: that of the plug-ins first, then those of registries, which init() of a plug-in takes. So a
 * registry calls td__plugin_find() without a lock of its own. fork() waits while a plug-in is loaded; handlers of
 * pthread_atfork() that lock a registry must be installed when the library is loaded, and not later. */
#ifndef TD_PLUGIN_PLUGINS_H
#define TD_PLUGIN_PLUGINS_H

#include <tandem/plugin.h>

#include <limits.h>

enum { TD__PLUGIN_NAME = 32 }; /* with the NUL */

/** For a registry that does not have `name`: loads the plug-in of that name if there is one. Where *found, it is loaded,
 *  now or before, and the registry looks again. Tries once for each name; a failure is remembered, and returned again,
 *  until TANDEM_PLUGIN_PATH changes or td_load_plugin() is called. That there is no plug-in is no failure, nor is a
 *  `name` that cannot be one. The errors are those of td_load_plugin(). Leaves the last error as it was on success. */
td_status td__plugin_find(const char *name, bool *found);

/** Appends to an error text why there is no `name`: "; no plug-in tandem_NAME.so is in …", or that the one that was
 *  loaded has registered none. */
void td__plugin_explain(const char *name, char *text, size_t room);

enum td__plugin_item { TD__PLUGIN_DEVICE, TD__PLUGIN_BACKEND };

/** Called by a registry that has accepted `name`: where a plug-in's init() does it, td_list_plugins() shows it. */
void td__plugin_note(enum td__plugin_item item, const char *name);

/* ---- Inside the component: files (plugin_path.c) ------------------------------------------------- */

/** The file of the plug-in `name`: the first one in `list` (of TANDEM_PLUGIN_PATH; may be NULL) and the library's own
 *  folders. `path` is canonical. */
bool td__plugin_locate(const char *name, const char *list, char path[PATH_MAX],
                       const char **origin);

/** Calls `visit` with the name of each plug-in in these folders; some come more than once. */
void td__plugin_scan(const char *list, void (*visit)(const char *name, void *arg), void *arg);

/** These folders as a text. */
void td__plugin_places(const char *list, char *text, size_t room);

/** The name in ".../tandem_NAME.so", and ".../tandem_NAME.so.1"; false if there is none. */
bool td__plugin_name_of(const char *path, char name[TD__PLUGIN_NAME]);

/** Whether `name`, of `length` characters, can be the name of a plug-in; only then is it part of a file name. */
bool td__plugin_name_valid(const char *name, size_t length);

/** TD_ERR_AUTH if other users could have changed the file at the canonical `path`. */
td_status td__plugin_check_owner(const char *path);

/** Makes the td_ functions of this library visible for plug-ins: one that was loaded by dlopen() may have hidden them.
 *  Returns whether the library is a part of the program itself. */
bool td__plugin_show_library(void);

/* ---- Inside the component: loading one file (plugin_load.c) -------------------------------------- */

/** Loads the file and checks what it says about itself; does not call init(). `name` is the one that it must have. */
td_status td__plugin_open(const char *path, const char *name, const td_plugin **description);

/** Calls init(); its failure becomes a sentence with `path`. */
td_status td__plugin_init(const char *path, const td_plugin *description);

#endif
