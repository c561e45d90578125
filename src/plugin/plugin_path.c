/* Where plug-ins are, and whether their files can be trusted.
 *
 * The library's own folders depend on where its code is:
 *
 *     <libdir>/libtandem.so       <libdir>/tandem/plugins; the same in a build tree
 *     <prefix>/bin/tdrun          which has the library inside: <prefix>/lib/tandem/plugins, and <libdir> of the
 *                                 installation if it is another one, such as lib64 */
#include "plugin/plugins.h"

#include "base/fail.h"
#include "base/text.h"

#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX "tandem_"
#define SUFFIX ".so"
#define FOLDER "tandem/plugins"

/* ---- Names ------------------------------------------------------------------------------------ */

bool td__plugin_name_valid(const char *name, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '_' && name[i] != '-')
            return false;
    return length > 0 && length < TD__PLUGIN_NAME;
}

bool td__plugin_name_of(const char *path, char name[TD__PLUGIN_NAME])
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    if (strncmp(base, PREFIX, strlen(PREFIX)) != 0)
        return false;
    base += strlen(PREFIX);
    const char *end = strstr(base, SUFFIX);
    if (!end || (end[strlen(SUFFIX)] && end[strlen(SUFFIX)] != '.') ||
        !td__plugin_name_valid(base, (size_t)(end - base)))
        return false;
    memcpy(name, base, (size_t)(end - base));
    name[end - base] = '\0';
    return true;
}

/* ---- The library's own file -------------------------------------------------------------------- */

/* The file that has this code. Returns whether that is the program; `path` is "" if it is unknown. */
static bool find_library(char path[PATH_MAX])
{
    Dl_info info;
    struct link_map *map = NULL;
    path[0] = '\0';
    bool known = dladdr1((void *)(uintptr_t)td_load_plugin, &info, (void **)&map, RTLD_DL_LINKMAP);
    if (known && map && map->l_name[0]) {
        snprintf(path, PATH_MAX, "%s", map->l_name);
        return false;
    }
    ssize_t size = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = '\0';
    return true;
}

bool td__plugin_show_library(void)
{
    char path[PATH_MAX];
    bool in_program = find_library(path);
    if (!in_program) /* one more reference, which stays: the library cannot be unloaded anyway */
        dlopen(path, RTLD_NOLOAD | RTLD_NOW | RTLD_GLOBAL);
    return in_program;
}

/* ---- Places: folders, and files in TANDEM_PLUGIN_PATH ----------------------------------------- */

/* Returns true to end the iteration. */
typedef bool (*place_fn)(const char *place, const char *origin, void *arg);

static bool each_listed(const char *list, place_fn visit, void *arg)
{
    char place[PATH_MAX];
    for (const char *at = list ? list : ""; *at;) {
        size_t length = strcspn(at, ":");
        /* An empty one is none: it must not be the current folder by accident. */
        if (length > 0 && length < sizeof place) {
            memcpy(place, at, length);
            place[length] = '\0';
            if (visit(place, "TANDEM_PLUGIN_PATH", arg))
                return true;
        }
        at += length + (at[length] == ':');
    }
    return false;
}

static bool each_own(place_fn visit, void *arg)
{
    static const char *const libdirs[] = {TD__LIBDIR, "lib"};
    char path[PATH_MAX], place[PATH_MAX + 512];
    bool in_program = find_library(path);
    char *slash = strrchr(path, '/');
    if (!slash)
        return false;
    *slash = '\0';
    if (!in_program) {
        snprintf(place, sizeof place, "%s/" FOLDER, path);
        return visit(place, "library", arg);
    }
    slash = strrchr(path, '/');
    if (slash)
        *slash = '\0';
    for (int i = 0; i < 2; i++) {
        if (i == 1 && !strcmp(libdirs[0], libdirs[1]))
            break;
        bool absolute = libdirs[i][0] == '/';
        snprintf(place, sizeof place, "%s%s%s/" FOLDER, absolute ? "" : path, absolute ? "" : "/",
                 libdirs[i]);
        if (visit(place, "library", arg))
            return true;
    }
    return false;
}

static bool each_place(const char *list, place_fn visit, void *arg)
{
    return each_listed(list, visit, arg) || each_own(visit, arg);
}

/* ---- Finding one, or all ----------------------------------------------------------------------- */

struct wanted {
    const char *name;
    char *path;
    const char **origin;
};

static bool look_in(const char *place, const char *origin, void *arg)
{
    struct wanted *wanted = arg;
    struct stat info;
    char file[PATH_MAX + 64], name[TD__PLUGIN_NAME];
    if (stat(place, &info))
        return false;
    if (S_ISDIR(info.st_mode))
        snprintf(file, sizeof file, "%s/" PREFIX "%s" SUFFIX, place, wanted->name);
    else if (td__plugin_name_of(place, name) && !strcmp(name, wanted->name))
        snprintf(file, sizeof file, "%s", place);
    else
        return false;
    *wanted->origin = origin;
    return realpath(file, wanted->path) != NULL;
}

bool td__plugin_locate(const char *name, const char *list, char path[PATH_MAX], const char **origin)
{
    struct wanted wanted = {name, path, origin};
    return each_place(list, look_in, &wanted);
}

struct visitor {
    void (*visit)(const char *name, void *arg);
    void *arg;
};

static bool scan_place(const char *place, const char *origin, void *arg)
{
    struct visitor *visitor = arg;
    char name[TD__PLUGIN_NAME];
    (void)origin;
    DIR *folder = opendir(place);
    if (!folder) {
        if (errno == ENOTDIR && td__plugin_name_of(place, name))
            visitor->visit(name, visitor->arg);
        return false;
    }
    for (struct dirent *entry; (entry = readdir(folder));)
        if (td__plugin_name_of(entry->d_name, name))
            visitor->visit(name, visitor->arg);
    closedir(folder);
    return false;
}

void td__plugin_scan(const char *list, void (*visit)(const char *name, void *arg), void *arg)
{
    struct visitor visitor = {visit, arg};
    each_place(list, scan_place, &visitor);
}

struct text {
    char *text;
    size_t room;
};

static bool add_place(const char *place, const char *origin, void *arg)
{
    struct text *text = arg;
    (void)origin;
    td__text_add(text->text, text->room, "%s%s", *text->text ? ", " : "", place);
    return false;
}

void td__plugin_places(const char *list, char *text, size_t room)
{
    text[0] = '\0';
    each_place(list, add_place, &(struct text){text, room});
}

/* ---- Trust -------------------------------------------------------------------------------------- */

static bool trusted(uid_t owner)
{
    char path[PATH_MAX];
    struct stat library;
    if (owner == 0 || owner == geteuid())
        return true;
    find_library(path); /* its owner's code runs in this process already */
    return !stat(path, &library) && owner == library.st_uid;
}

static td_status refuse(const char *path, const char *what, const char *reason, const char *help)
{
    return td_fail(TD_ERR_AUTH,
                   "plug-in %s is not loaded, since other users could have changed it: %s %s; %s",
                   path, what, reason, help);
}

static td_status check_owner(const char *path, const char *what, const struct stat *info)
{
    char reason[96];
    if (trusted(info->st_uid))
        return TD_OK;
    snprintf(reason, sizeof reason, "belongs to user %ld", (long)info->st_uid);
    return refuse(path, what, reason,
                  "it must belong to root, to the user that runs the program, or to the owner of "
                  "the library");
}

td_status td__plugin_check_owner(const char *path)
{
    char folder[PATH_MAX];
    struct stat info;
    if (stat(path, &info))
        return td_fail(TD_ERR_SYSTEM, "plug-in %s cannot be read: %s", path, td__errno_text(errno));
    if (!S_ISREG(info.st_mode))
        return td_fail(TD_ERR_INVALID, "plug-in %s is not a regular file", path);
    TD_TRY(check_owner(path, "the file", &info));
    if (info.st_mode & S_IWOTH)
        return refuse(path, "the file", "can be written by everybody", "chmod o-w it");

    snprintf(folder, sizeof folder, "%s", path);
    for (bool nearest = true; *folder; nearest = false) {
        char *slash = strrchr(folder, '/');
        if (!slash)
            break;
        *slash = '\0';
        const char *name = *folder ? folder : "/";
        if (stat(name, &info))
            return td_fail(TD_ERR_SYSTEM, "the folder %s of plug-in %s cannot be checked: %s", name,
                           path, td__errno_text(errno));
        if (nearest)
            TD_TRY(check_owner(path, "its folder", &info));
        if ((info.st_mode & S_IWOTH) && !(info.st_mode & S_ISVTX)) {
            char what[PATH_MAX + 16];
            snprintf(what, sizeof what, "the folder %s", name);
            return refuse(path, what, "can be written by everybody", "chmod o-w it");
        }
    }
    return TD_OK;
}
