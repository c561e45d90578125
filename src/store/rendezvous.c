/* td_rendezvous(): from a URL to a store, a rank and a world that is complete.
 *
 *     URL -> scheme (built in, or registered) -> store, rank, world size -> barrier -> td_world
 *
 * A launcher's store outlives a world: a restarted job, or a program that calls td_rendezvous() a second
 * time, would find the keys of the first. So each rendezvous of this process at one address has an epoch,
 * and the keys of a later one are below a prefix of its epoch. */
#include "base/fail.h"
#include "base/host.h"
#include "base/option_rules.h"
#include "base/text.h"
#include "store/peer_watch.h"
#include "store/rendezvous_schemes.h"
#include "store/spare.h"
#include "store/store_ops.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    td__scheme_fn *open;
} built_in[] = {
    {"env", td__rendezvous_env},     {"tcp", td__rendezvous_tcp}, {"file", td__rendezvous_file},
    {"slurm", td__rendezvous_slurm}, {"mpi", td__rendezvous_mpi},
};

enum { BUILT_IN = sizeof built_in / sizeof *built_in, LINGER_AFTER_FAILURE_MS = 2000 };

struct registered {
    struct registered *next;
    td_rendezvous_fn fn;
    void *arg;
    char name[32];
};

struct counted {
    struct counted *next;
    unsigned epoch;
    char address[];
};

/* Protects the lists; no other lock is taken under it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct registered *schemes;
static struct counted *epochs;

/* ---- Epochs ---------------------------------------------------------------------------------- */

static struct counted *find_counted(const char *address) /* holds the lock */
{
    struct counted *entry = epochs;
    while (entry && strcmp(entry->address, address) != 0)
        entry = entry->next;
    return entry;
}

unsigned td__rendezvous_epoch(const char *address)
{
    pthread_mutex_lock(&lock);
    struct counted *entry = find_counted(address);
    unsigned epoch = entry ? entry->epoch : 0;
    pthread_mutex_unlock(&lock);
    return epoch;
}

/* Without memory the next rendezvous at this address fails. */
static void count_epoch(const char *address)
{
    pthread_mutex_lock(&lock);
    struct counted *entry = find_counted(address);
    if (!entry && (entry = calloc(1, sizeof *entry + strlen(address) + 1))) {
        strcpy(entry->address, address);
        entry->next = epochs;
        epochs = entry;
    }
    if (entry)
        entry->epoch++;
    pthread_mutex_unlock(&lock);
}

/* ---- Schemes --------------------------------------------------------------------------------- */

static td__scheme_fn *find_built_in(const char *name)
{
    for (int i = 0; i < BUILT_IN; i++)
        if (!strcmp(built_in[i].name, name))
            return built_in[i].open;
    return NULL;
}

static struct registered **find_registered(const char *name) /* holds the lock */
{
    struct registered **link = &schemes;
    while (*link && strcmp((*link)->name, name) != 0)
        link = &(*link)->next;
    return link;
}

td_status td_register_rendezvous(const char *scheme, td_rendezvous_fn fn, void *arg)
{
    char url[48], name[32];
    if (!scheme)
        return td_fail(TD_ERR_INVALID, "td_register_rendezvous: the scheme is NULL");
    snprintf(url, sizeof url, "%.40s://", scheme);
    if (td__url_scheme(url, name) || strlen(name) != strlen(scheme))
        return td_fail(TD_ERR_INVALID,
                       "td_register_rendezvous: \"%.40s\" is no scheme: a letter, then letters, "
                       "digits, '+', '-' or '.', at most 31 in all",
                       scheme);
    if (find_built_in(name))
        return td_fail(TD_ERR_INVALID, "td_register_rendezvous: %s:// is built in", name);

    struct registered *added = fn ? calloc(1, sizeof *added) : NULL;
    if (fn && !added)
        return td__fail_nomem("td_register_rendezvous");
    td_status status = TD_OK;
    pthread_mutex_lock(&lock);
    struct registered **link = find_registered(name), *present = *link;
    if (fn && present) {
        status = td_fail(TD_ERR_STATE, "td_register_rendezvous: %s:// is registered already", name);
        free(added);
    } else if (fn) {
        *added = (struct registered){.fn = fn, .arg = arg};
        snprintf(added->name, sizeof added->name, "%s", name);
        *link = added;
    } else if (present) {
        *link = present->next;
        free(present);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static td_status fail_unknown(const char *url, const char *name)
{
    char known[256] = "";
    for (int i = 0; i < BUILT_IN; i++)
        td__text_add(known, sizeof known, "%s%s://", i ? ", " : "", built_in[i].name);
    pthread_mutex_lock(&lock);
    for (struct registered *at = schemes; at && strlen(known) < sizeof known - 40; at = at->next)
        td__text_add(known, sizeof known, ", %s://", at->name);
    pthread_mutex_unlock(&lock);
    return td_fail(TD_ERR_INVALID,
                   "rendezvous URL \"%.200s\": there is no scheme %s://; known are %s", url, name,
                   known);
}

static td_status open_registered(const char *url, const char *name,
                                 const td_rendezvous_options *options,
                                 struct td__rendezvous_state *state)
{
    pthread_mutex_lock(&lock);
    struct registered *found = *find_registered(name);
    td_rendezvous_fn fn = found ? found->fn : NULL;
    void *arg = found ? found->arg : NULL;
    pthread_mutex_unlock(&lock);
    if (!fn)
        return fail_unknown(url, name);
    snprintf(state->address, sizeof state->address, "%.500s", url);
    uint64_t failures = td__error_count();
    td_status status = fn(url, options, arg, &state->world);
    if (status && td__error_count() == failures)
        td_fail(status,
                "rendezvous %s://: its function failed with %s, and gave no reason by td_fail()",
                name, td_status_name(status));
    TD_TRY(status);
    if (!state->world.store)
        return td_fail(TD_ERR_INVALID, "rendezvous %s://: its function gave no store", name);
    char what[64];
    snprintf(what, sizeof what, "rendezvous %s://", name);
    status = td__rendezvous_check(what, state->world.rank, state->world.world_size);
    if (status)
        td_store_close(state->world.store);
    return status;
}

/* A process that belongs to no job. */
static td_status world_of_one(const td_rendezvous_options *options,
                              struct td__rendezvous_state *state)
{
    if (options->world_size > 1 || options->rank > 0)
        return td_fail(
            TD_ERR_INVALID,
            "rendezvous: the options give rank %d of %d, but neither a URL nor the "
            "environment says where the store is; set MASTER_ADDR and MASTER_PORT, or start "
            "with tdrun",
            options->rank, options->world_size);
    TD_TRY(td_hash_store_open(&state->world.store));
    td_store_set_timeout(state->world.store, options->timeout_ms);
    state->world.rank = state->world.local_rank = 0;
    state->world.world_size = state->world.local_world_size = 1;
    return TD_OK;
}

static td_status open_store(const char *text, const td_rendezvous_options *options,
                            struct td__rendezvous_state *state)
{
    struct td__url url;
    char scheme[32];
    int rank, world_size;
    url = (struct td__url){.rank = -1, .world_size = -1};
    TD_TRY(td__rendezvous_given(&url, options, &rank, &world_size)); /* checks the options */
    if (!text && !(text = td__rendezvous_detect()))
        return world_of_one(options, state);
    TD_TRY(td__url_scheme(text, scheme));
    td__scheme_fn *open = find_built_in(scheme);
    if (!open)
        return open_registered(text, scheme, options, state);
    TD_TRY(td__url_parse(text, &url));
    return open(&url, options, state);
}

/* Waits for the other ranks, and gives a later epoch its own part of the store. */
static td_status join(struct td__rendezvous_state *state, td__deadline deadline)
{
    unsigned epoch = td__rendezvous_epoch(state->address);
    bool later = state->restart_count || epoch, rejoined = false;
    char prefix[64], key[TD__ROSTER_KEY];
    snprintf(prefix, sizeof prefix, "%d.%u", state->restart_count, epoch);
    td__roster_key(later ? prefix : "", key);
    /* Before another rank can rely on this one. */
    TD_TRY(td__roster_add(state->world.store, key, state->world.rank, false));
    TD_TRY(td__rendezvous_barrier(&state->world, state->address, prefix, deadline, &rejoined));
    if (rejoined)
        TD_TRY(td__roster_add(state->world.store, key, state->world.rank, true));
    count_epoch(state->address);
    if (!later)
        return TD_OK;
    td_store *whole = state->world.store, *part;
    TD_TRY(td_prefix_store_open(prefix, whole, &part));
    state->world.store = part;
    return td_store_close(whole); /* the part keeps it open */
}

td_status td_rendezvous(const char *url, const td_rendezvous_options *options, td_world *world)
{
    static const td_rendezvous_options defaults = {0};
    struct td__rendezvous_state state = {
        .world = {.rank = -1, .world_size = -1, .local_rank = -1, .local_world_size = -1}};
    if (!options)
        options = &defaults;
    if (!world)
        return td_fail(TD_ERR_INVALID, "td_rendezvous: the output is NULL");
    TD_TRY(td__check_kept_timeout("td_rendezvous", "timeout_ms", options->timeout_ms));
    TD_TRY(td__check_reserved("td_rendezvous", options->reserved));
    TD_TRY(td__spare_wait());
    td__deadline deadline = td__deadline_in_ms(options->timeout_ms ? options->timeout_ms
                                                                   : TD_STORE_DEFAULT_TIMEOUT_MS);

    TD_TRY(open_store(url, options, &state));
    td_status status = TD_OK;
    if (state.address[0])
        status = join(&state, deadline);
    if (status) {
        struct td__error error; /* the first failure is reported, not that of closing */
        td__error_save(&error);
        td__tcp_store_set_linger(state.world.store, LINGER_AFTER_FAILURE_MS);
        td_store_close(state.world.store);
        return td__error_restore(&error);
    }
    td__log_set_rank(state.world.rank);
    *world = state.world;
    return TD_OK;
}

static td_status open_store_alone(const char *text, int64_t timeout_ms, td_store **store)
{
    struct td__rendezvous_state state = {
        .world = {.rank = -1, .world_size = -1, .local_rank = -1, .local_world_size = -1}};
    struct td__url url;
    char scheme[32];
    const char *host;
    int port;
    if (!text && !(text = td__rendezvous_detect()))
        return td_fail(TD_ERR_INVALID,
                       "td_rendezvous_store: neither a URL nor the environment says where the "
                       "store is; set MASTER_ADDR and MASTER_PORT, or start with tdrun");
    TD_TRY(td__url_scheme(text, scheme));
    bool env = !strcmp(scheme, "env"), tcp = !strcmp(scheme, "tcp"), file = !strcmp(scheme, "file");
    if (env || tcp || file)
        TD_TRY(td__url_parse(text, &url));
    if (file && url.path[0] && !url.host[0])
        return td_file_store_open(url.path, store);
    if (tcp)
        TD_TRY(td__rendezvous_check_tcp(&url));
    if (env)
        TD_TRY(td__rendezvous_env_address(&host, &port));
    if (env || tcp)
        return td__rendezvous_open_store(env ? host : url.host, env ? port : url.port, timeout_ms,
                                         store);
    td_rendezvous_options options = {.timeout_ms = timeout_ms, .rank = -1};
    TD_TRY(open_store(text, &options, &state));
    *store = state.world.store;
    return TD_OK;
}

td_status td_rendezvous_store(const char *url, int64_t timeout_ms, td_store **store)
{
    if (!store)
        return td_fail(TD_ERR_INVALID, "td_rendezvous_store: the output is NULL");
    TD_TRY(td__check_kept_timeout("td_rendezvous_store", "timeout_ms", timeout_ms));
    TD_TRY(td__spare_wait());
    int64_t timeout = timeout_ms ? timeout_ms : TD_STORE_DEFAULT_TIMEOUT_MS;
    TD_TRY(open_store_alone(url, timeout, store));
    return td_store_set_timeout(*store, timeout);
}

td_status td_world_close(td_world *world)
{
    if (!world)
        return td_fail(TD_ERR_INVALID, "td_world_close: the world is NULL");
    td_status status = td_store_close(world->store);
    *world = (td_world){.rank = -1, .world_size = -1, .local_rank = -1, .local_world_size = -1};
    return status;
}
