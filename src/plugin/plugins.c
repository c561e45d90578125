/* The plug-ins of this process: which were looked for, found, loaded or refused.
 *
 *     lookups   name -> plug-in, or none: what a search has found. Forgotten when TANDEM_PLUGIN_PATH changes, and by
 *               td_load_plugin()
 *     plugins   one for each file, by its canonical path; several names may lead to one (a symbolic link). Those that
 *               are loaded stay, the others are forgotten with the lookups
 *
 * One lock for everything, held also while a plug-in is loaded: a second thread that needs it has to wait anyway. A
 * thread that holds it may come again, since init() registers things and may load another plug-in. fork() takes it, so
 * that a child never has half a plug-in. */
#include "plugin/plugins.h"

#include "base/fail.h"
#include "base/text.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td__plugin {
    struct td__plugin *next;
    char name[TD__PLUGIN_NAME];
    const char *origin;
    td_plugin_state state;
    const td_plugin *description; /* NULL until it was opened */
    struct td__error *error;      /* of TD_PLUGIN_FAILED */
    char devices[256];
    char backends[256];
    char path[]; /* canonical */
};

struct lookup {
    struct lookup *next;
    struct td__plugin *plugin; /* NULL: there is none */
    char name[TD__PLUGIN_NAME];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct td__plugin *plugins;
static struct lookup *lookups;
static char *searched; /* the TANDEM_PLUGIN_PATH of the lookups; NULL: none */

/* The thread that holds the lock; 0: none does. A thread finds itself here only if it has the lock. No thread local:
 * the library has few bytes of these. A fork() keeps the number. */
static atomic_uintptr_t holder;
static int depth;                  /* how often it holds the lock */
static struct td__plugin *current; /* whose init() it runs */

/* ---- The lock, and fork() ------------------------------------------------------------------------ */

static bool holds(void)
{
    return atomic_load_explicit(&holder, memory_order_relaxed) == (uintptr_t)pthread_self();
}

static void hold(void)
{
    if (!holds()) {
        pthread_mutex_lock(&lock);
        atomic_store_explicit(&holder, (uintptr_t)pthread_self(), memory_order_relaxed);
    }
    depth++;
}

static void release(void)
{
    if (--depth > 0)
        return;
    atomic_store_explicit(&holder, 0, memory_order_relaxed);
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    pthread_atfork(hold, release, release);
}

/* Handlers run before fork() in the reverse order of their installation. Not a constructor: this one comes after those
 * of the library, so its lock is taken before theirs, as in a thread that loads a plug-in. */
static void enter(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    hold();
}

/* ---- Remembering (all hold the lock) -------------------------------------------------------------- */

static void free_plugin(struct td__plugin *plugin)
{
    free(plugin->error);
    free(plugin);
}

/* Not from init(), in the middle of a search that will use these. */
static void forget(void)
{
    if (depth > 1)
        return;
    for (struct lookup *next; lookups; lookups = next) {
        next = lookups->next;
        free(lookups);
    }
    for (struct td__plugin **at = &plugins; *at;) {
        struct td__plugin *plugin = *at;
        if (plugin->state == TD_PLUGIN_LOADED) {
            at = &plugin->next;
        } else {
            *at = plugin->next;
            free_plugin(plugin);
        }
    }
}

static td_status read_environment(void)
{
    const char *now = secure_getenv("TANDEM_PLUGIN_PATH");
    if (depth > 1 || (now ? searched && !strcmp(searched, now) : !searched))
        return TD_OK;
    char *copy = now ? strdup(now) : NULL;
    if (now && !copy)
        return td__fail_nomem("TANDEM_PLUGIN_PATH");
    forget();
    free(searched);
    searched = copy;
    return TD_OK;
}

/* The plug-in of a file, which `name` has led to. */
static td_status add_plugin(const char *path, const char *name, const char *origin,
                            struct td__plugin **added)
{
    size_t size = strlen(path) + 1;
    for (*added = plugins; *added; *added = (*added)->next)
        if (!strcmp((*added)->path, path))
            return TD_OK;
    struct td__plugin *plugin = calloc(1, sizeof *plugin + size);
    if (!plugin)
        return td__fail_nomem("plug-in");
    memcpy(plugin->path, path, size);
    if (!td__plugin_name_of(path, plugin->name)) /* the link has a name, the file has not */
        snprintf(plugin->name, sizeof plugin->name, "%s", name);
    plugin->origin = origin;
    struct td__plugin **end = &plugins;
    while (*end)
        end = &(*end)->next;
    *added = *end = plugin;
    return TD_OK;
}

static struct td__plugin *find_loaded(const char *name)
{
    struct td__plugin *plugin = plugins;
    while (plugin && (plugin->state != TD_PLUGIN_LOADED || strcmp(plugin->name, name) != 0))
        plugin = plugin->next;
    return plugin;
}

/* *found: the plug-in of a valid name, or NULL. */
static td_status look_up(const char *name, struct td__plugin **found)
{
    char path[PATH_MAX];
    const char *origin;
    if ((*found = find_loaded(name)))
        return TD_OK;
    for (struct lookup *at = lookups; at; at = at->next)
        if (!strcmp(at->name, name)) {
            *found = at->plugin;
            return TD_OK;
        }
    if (td__plugin_locate(name, searched, path, &origin))
        TD_TRY(add_plugin(path, name, origin, found));
    struct lookup *made = calloc(1, sizeof *made);
    if (!made)
        return td__fail_nomem("plug-in");
    snprintf(made->name, sizeof made->name, "%s", name);
    made->plugin = *found;
    made->next = lookups;
    lookups = made;
    return TD_OK;
}

/* ---- Loading (all hold the lock) ------------------------------------------------------------------- */

static td_status try_load(struct td__plugin *plugin)
{
    const struct td__plugin *same = find_loaded(plugin->name);
    if (same)
        return td_fail(
            TD_ERR_STATE,
            "plug-in %s is not loaded: another plug-in \"%s\" is loaded already, from %s",
            plugin->path, plugin->name, same->path);
    /* Already now: constructors and init() may look for what it is about to register, and load other plug-ins. */
    plugin->state = TD_PLUGIN_LOADED;
    TD_TRY(td__plugin_check_owner(plugin->path));
    TD_TRY(td__plugin_open(plugin->path, plugin->name, &plugin->description));
    struct td__plugin *before = current;
    current = plugin;
    td_status status = td__plugin_init(plugin->path, plugin->description);
    current = before;
    return status;
}

static td_status load(struct td__plugin *plugin)
{
    struct td__error before;
    if (plugin->state == TD_PLUGIN_LOADED)
        return TD_OK;
    if (plugin->state == TD_PLUGIN_FAILED)
        return td__error_restore(plugin->error);
    struct td__error *error = malloc(sizeof *error);
    if (!error)
        return td__fail_nomem("plug-in");
    td__error_save(&before);
    td_status status = try_load(plugin);
    if (!status) {
        free(error);
        td__error_undo(&before);
        td_log(TD_LOG_INFO, "plug-in \"%s\" was loaded from %s", plugin->name, plugin->path);
        return TD_OK;
    }
    td__error_save(error);
    plugin->error = error;
    plugin->state = TD_PLUGIN_FAILED;
    return status;
}

/* ---- For registries ------------------------------------------------------------------------------ */

td_status td__plugin_find(const char *name, bool *found)
{
    struct td__plugin *plugin = NULL;
    *found = false;
    if (!td__plugin_name_valid(name, strlen(name)))
        return TD_OK;
    enter();
    td_status status = read_environment();
    if (!status)
        status = look_up(name, &plugin);
    if (!status && plugin)
        status = load(plugin);
    *found = plugin && !status;
    release();
    return status;
}

void td__plugin_explain(const char *name, char *text, size_t room)
{
    char places[1024];
    bool valid = td__plugin_name_valid(name, strlen(name));
    enter();
    const struct td__plugin *loaded = valid ? find_loaded(name) : NULL;
    for (struct lookup *at = lookups; valid && at && !loaded; at = at->next)
        if (!strcmp(at->name, name))
            loaded = at->plugin;
    if (loaded) {
        td__text_add(text, room, "; its plug-in %s does not register it", loaded->path);
    } else if (valid) {
        td__plugin_places(searched, places, sizeof places);
        td__text_add(text, room, "; there is no plug-in tandem_%s.so in %s", name,
                     *places ? places : "TANDEM_PLUGIN_PATH");
    }
    release();
}

void td__plugin_note(enum td__plugin_item item, const char *name)
{
    struct td__plugin *plugin = holds() ? current : NULL;
    if (!plugin)
        return;
    char *list = item == TD__PLUGIN_DEVICE ? plugin->devices : plugin->backends;
    td__text_add(list, sizeof plugin->devices, "%s%s", *list ? ", " : "", name);
}

/* ---- For users ------------------------------------------------------------------------------------ */

/* Holds the lock. */
static td_status find_path(const char *path, struct td__plugin **found)
{
    char canonical[PATH_MAX], name[TD__PLUGIN_NAME];
    if (!realpath(path, canonical))
        return td_fail(TD_ERR_INVALID, "td_load_plugin: there is no plug-in %s: %s", path,
                       td__errno_text(errno));
    if (!td__plugin_name_of(path, name) && !td__plugin_name_of(canonical, name))
        return td_fail(TD_ERR_INVALID,
                       "td_load_plugin: %s is not the file of a plug-in: its name must be "
                       "tandem_NAME.so, of letters, digits, '_' and '-'",
                       path);
    return add_plugin(canonical, name, "td_load_plugin", found);
}

/* Holds the lock. */
static td_status find_name(const char *name, struct td__plugin **found)
{
    char text[1200] = "";
    if (!td__plugin_name_valid(name, strlen(name)))
        return td_fail(TD_ERR_INVALID,
                       "td_load_plugin: \"%.64s\" is neither a name (letters, digits, '_' and '-', "
                       "at most %d) nor a path, which has a '/'",
                       name, TD__PLUGIN_NAME - 1);
    TD_TRY(look_up(name, found));
    if (*found)
        return TD_OK;
    td__plugin_explain(name, text, sizeof text); /* begins with "; " */
    return td_fail(TD_ERR_INVALID, "td_load_plugin: %s", text + (*text ? 2 : 0));
}

td_status td_load_plugin(const char *name_or_path)
{
    struct td__plugin *plugin = NULL;
    if (!name_or_path)
        return td__fail_null("td_load_plugin");
    enter();
    td_status status = read_environment();
    if (!status) {
        forget();
        status = strchr(name_or_path, '/') ? find_path(name_or_path, &plugin)
                                           : find_name(name_or_path, &plugin);
    }
    if (!status)
        status = load(plugin);
    release();
    return status;
}

/* ---- The list --------------------------------------------------------------------------------------- */

struct names {
    int count, capacity;
    char (*at)[TD__PLUGIN_NAME];
    bool failed;
};

static void add_name(const char *name, void *arg)
{
    struct names *names = arg;
    if (names->count == names->capacity) {
        int capacity = names->capacity ? 2 * names->capacity : 16;
        void *grown = realloc(names->at, sizeof *names->at * (size_t)capacity);
        if (!grown) {
            names->failed = true;
            return;
        }
        names->at = grown;
        names->capacity = capacity;
    }
    snprintf(names->at[names->count++], TD__PLUGIN_NAME, "%s", name);
}

/* Makes `plugins` complete. Holds the lock. */
static td_status find_all(bool load_all)
{
    struct names names = {0};
    struct td__error before;
    td__plugin_scan(searched, add_name, &names);
    td_status status = names.failed ? td__fail_nomem("td_list_plugins") : TD_OK;
    for (int i = 0; i < names.count && !status; i++) {
        struct td__plugin *plugin;
        status = look_up(names.at[i], &plugin);
        td__error_save(&before);
        if (!status && plugin && load_all && load(plugin))
            td__error_undo(&before);
    }
    free(names.at);
    return status;
}

/* Copies a text to *at, which it moves on. */
static const char *put(char **at, const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = memcpy(*at, text, size);
    *at += size;
    return copy;
}

static const char *release_of(const struct td__plugin *plugin)
{
    const td_plugin *known = plugin->description;
    return known && known->release ? known->release : "";
}

static const char *error_of(const struct td__plugin *plugin)
{
    return plugin->state == TD_PLUGIN_FAILED ? plugin->error->text : "";
}

static int compare(const void *a, const void *b)
{
    const td_plugin_info *first = a, *second = b;
    int order = strcmp(first->name, second->name);
    return order ? order : strcmp(first->path, second->path);
}

/* One block: the array, and its texts behind it. Holds the lock. */
static td_status copy_list(td_plugin_info **list, int *count)
{
    size_t texts = 0;
    int number = 0;
    for (const struct td__plugin *at = plugins; at; at = at->next, number++)
        texts += strlen(at->name) + strlen(at->path) + strlen(at->origin) + strlen(release_of(at)) +
                 strlen(at->devices) + strlen(at->backends) + strlen(error_of(at)) + 7;
    td_plugin_info *made = number ? calloc(1, (size_t)number * sizeof *made + texts) : NULL;
    if (number && !made)
        return td__fail_nomem("td_list_plugins");
    char *text = (char *)(made + number);
    td_plugin_info *info = made;
    for (const struct td__plugin *at = plugins; at; at = at->next, info++)
        *info = (td_plugin_info){.state = at->state,
                                 .name = put(&text, at->name),
                                 .path = put(&text, at->path),
                                 .origin = put(&text, at->origin),
                                 .release = put(&text, release_of(at)),
                                 .devices = put(&text, at->devices),
                                 .backends = put(&text, at->backends),
                                 .error = put(&text, error_of(at)),
                                 .status = at->state == TD_PLUGIN_FAILED ? at->error->status
                                                                         : TD_OK};
    if (number)
        qsort(made, (size_t)number, sizeof *made, compare);
    *list = made;
    *count = number;
    return TD_OK;
}

td_status td_list_plugins(bool load_all, td_plugin_info **list, int *count)
{
    if (!list || !count)
        return td__fail_null("td_list_plugins");
    enter();
    td_status status = read_environment();
    if (!status)
        status = find_all(load_all);
    if (!status)
        status = copy_list(list, count);
    release();
    return status;
}

void td_free_plugin_list(td_plugin_info *list)
{
    free(list);
}
