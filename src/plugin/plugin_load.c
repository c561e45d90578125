/* Loading one file: dlopen(), what the plug-in says about itself, and its init(). A file that is refused before init()
 * was called is unloaded again; afterwards it stays, since it may have registered something. */
#include "plugin/plugins.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "base/version.h"

#include <dlfcn.h>
#include <string.h>

enum { OLDEST_VERSION = 1 }; /* of td_plugin that this library can read */

typedef const td_plugin *(*describe_fn)(void);

static td_status fail_dlopen(const char *path, bool in_program)
{
    const char *reason = dlerror(), *help = "";
    size_t length = strlen(path);
    if (!reason)
        reason = "the loader gives no reason";
    if (!strncmp(reason, path, length) && !strncmp(reason + length, ": ", 2))
        reason += length + 2;
    if (strstr(reason, "undefined symbol: td_"))
        help = in_program
                   ? "; Tandem is a part of this program, which hides it from plug-ins: link the "
                     "program with -rdynamic (in CMake: ENABLE_EXPORTS) and all of the static "
                     "library (--whole-archive), or with libtandem.so"
                   : "; the plug-in was compiled for another version of Tandem than this one, "
                     "or uses a function that is not public";
    return td_fail(TD_ERR_SYSTEM, "plug-in %s cannot be loaded into Tandem %s: %s%s", path,
                   td_version(), reason, help);
}

static td_status check_versions(const char *path, const td_plugin *plugin)
{
    if (plugin->version < OLDEST_VERSION || plugin->version > TD_PLUGIN_VERSION)
        return td_fail(
            TD_ERR_MISMATCH,
            "plug-in %s is too %s for this library: its td_plugin has version %u, and Tandem %s "
            "takes %d to %d; %s",
            path, plugin->version < OLDEST_VERSION ? "old" : "new", plugin->version, td_version(),
            OLDEST_VERSION, TD_PLUGIN_VERSION,
            plugin->version < OLDEST_VERSION ? "compile the plug-in again"
                                             : "install a newer Tandem, or an older plug-in");
    if (plugin->size < offsetof(td_plugin, reserved))
        return td_fail(
            TD_ERR_MISMATCH,
            "plug-in %s is malformed: its td_plugin has %u bytes, and version %u has %zu", path,
            plugin->size, plugin->version, sizeof *plugin);
    struct td__version headers = {(int)(plugin->headers / 10000),
                                  (int)(plugin->headers / 100 % 100), (int)(plugin->headers % 100)};
    switch (td__version_fit(headers)) {
    case TD__VERSION_FITS:
        return TD_OK;
    case TD__VERSION_OTHER_ABI:
        return td_fail(TD_ERR_MISMATCH,
                       "plug-in %s was compiled with the headers of Tandem %d.%d.%d, but this is "
                       "Tandem %s, which has another ABI; compile the plug-in again",
                       path, headers.major, headers.minor, headers.patch, td_version());
    case TD__VERSION_NEWER:
        break;
    }
    return td_fail(TD_ERR_MISMATCH,
                   "plug-in %s was compiled with the headers of Tandem %d.%d.%d, but this is "
                   "Tandem %s, which is older; install a newer Tandem, or an older plug-in",
                   path, headers.major, headers.minor, headers.patch, td_version());
}

static td_status check_description(const char *path, const char *name, const td_plugin *plugin)
{
    if (!plugin)
        return td_fail(TD_ERR_INVALID, "plug-in %s: tandem_plugin() returns NULL", path);
    TD_TRY(check_versions(path, plugin));
    if (!plugin->name || !plugin->init)
        return td_fail(TD_ERR_INVALID, "plug-in %s: its td_plugin has no %s", path,
                       plugin->name ? "init" : "name");
    if (strcmp(plugin->name, name) != 0)
        return td_fail(TD_ERR_INVALID,
                       "plug-in %s says that its name is \"%s\", not \"%s\"; the file must have "
                       "the name that its TD_PLUGIN() has",
                       path, plugin->name, name);
    if (plugin->size >= sizeof *plugin)
        TD_TRY(td__check_reserved(path, plugin->reserved));
    return TD_OK;
}

td_status td__plugin_open(const char *path, const char *name, const td_plugin **description)
{
    bool in_program = td__plugin_show_library();
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return fail_dlopen(path, in_program);
    describe_fn describe;
    *(void **)&describe = dlsym(handle, "tandem_plugin");
    td_status status =
        describe ? TD_OK
                 : td_fail(TD_ERR_INVALID,
                           "%s is not a plug-in of Tandem: it has no function tandem_plugin(), "
                           "which the macro TD_PLUGIN() of <tandem/plugin.h> defines",
                           path);
    const td_plugin *plugin = status ? NULL : describe();
    if (!status)
        status = check_description(path, name, plugin);
    if (status) {
        dlclose(handle);
        return status;
    }
    *description = plugin;
    return TD_OK;
}

td_status td__plugin_init(const char *path, const td_plugin *description)
{
    uint64_t failures = td__error_count();
    td_status status = description->init();
    if (!status)
        return TD_OK;
    if (td__error_count() == failures)
        return td_fail(status, "plug-in %s: its init() returned %s without a reason", path,
                       td_status_name(status));
    return td_fail(status, "plug-in %s cannot be initialised: %s", path, td__error_text());
}
