/* Remote references on the owner: an entry for each value, with the forks and uses that keep it. See rref.h. */
#include "base/fail.h"
#include "rpc/rref.h"
#include "rpc/rref_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GONE "worker \"%s\", which was to make the value, has gone"

struct fork_at {
    uint64_t id;
    int rank;
};

struct td__rref_entry {
    struct td__map_node node;
    struct td__rref_entry *next; /* in a list of entries to be freed or failed */
    uint64_t id;
    td_future *future; /* of the value */
    char what[48];     /* the function that makes it, for reports */
    int handles;       /* references on this worker */
    int uses;          /* calls that wait for the value */
    bool
        made; /* the call that makes the value has come, or there is a value, or there never will be */
    bool
        abandoned; /* the fork of the call that is to make the value was deleted; the call is still to come */
    struct fork_at *forks;
    int fork_count, fork_capacity;
};

/* ---- Entries (with rref_lock held) ------------------------------------------------------------- */

static struct td__rref_entry *find_entry(struct td__rpc_agent *agent, uint64_t id)
{
    struct td__map_node *node = td__map_find(&agent->rref_entries, (const char *)&id, sizeof id);
    return node ? TD__CONTAINER(node, struct td__rref_entry, node) : NULL;
}

/* The call of a worker that has gone does not come any more, or is not served. */
static void fail_if_gone(struct td__rpc_agent *agent, struct td__rref_entry *entry)
{
    char text[TD_RPC_MAX_NAME + 80];
    int maker = td__id_rank(entry->id);
    const struct td__rpc_worker *worker = maker < agent->limit ? td__worker(agent, maker) : NULL;
    if (!worker || maker == agent->rank || !worker->forks_ended)
        return;
    entry->made = true;
    snprintf(text, sizeof text, GONE, td__worker_name_of(agent, maker));
    td__future_complete(entry->future, NULL, TD_ERR_PEER, text);
}

static struct td__rref_entry *add_entry(struct td__rpc_agent *agent, uint64_t id)
{
    struct td__rref_entry *entry = find_entry(agent, id);
    if (entry || !(entry = calloc(1, sizeof *entry)))
        return entry;
    entry->id = id;
    entry->node.key = (const char *)&entry->id;
    entry->node.key_size = sizeof entry->id;
    entry->future = td__future_create(NULL, 0, TD__NEVER, 1);
    if (entry->future && td__map_insert(&agent->rref_entries, &entry->node)) {
        fail_if_gone(agent, entry);
        return entry;
    }
    td_future_release(entry->future);
    free(entry);
    return NULL;
}

/* Removes the entry if nothing refers to it: returns it for free_entry(), without the lock. One whose value is not made
 * yet comes back with the call that makes it. */
static struct td__rref_entry *drop_unused(struct td__rpc_agent *agent, struct td__rref_entry *entry)
{
    if (entry->handles || entry->fork_count || entry->uses || (entry->abandoned && !entry->made))
        return NULL;
    td__map_remove(&agent->rref_entries, &entry->node);
    return entry;
}

static void free_entry(struct td__rref_entry *entry)
{
    if (!entry)
        return;
    td_future_release(entry->future); /* and the value with it */
    free(entry->forks);
    free(entry);
}

static bool add_fork(struct td__rpc_agent *agent, struct td__rref_entry *entry, uint64_t fork,
                     int rank)
{
    if (td__worker(agent, rank)->forks_ended)
        return true;
    if (entry->fork_count == entry->fork_capacity) {
        int capacity = entry->fork_capacity ? 2 * entry->fork_capacity : 4;
        struct fork_at *forks = realloc(entry->forks, sizeof *forks * (size_t)capacity);
        if (!forks)
            return false;
        entry->forks = forks;
        entry->fork_capacity = capacity;
    }
    entry->forks[entry->fork_count++] = (struct fork_at){.id = fork, .rank = rank};
    return true;
}

static bool remove_fork(struct td__rref_entry *entry, uint64_t fork)
{
    for (int i = entry->fork_count - 1; i >= 0; i--)
        if (entry->forks[i].id == fork) {
            entry->forks[i] = entry->forks[--entry->fork_count];
            return true;
        }
    return false;
}

static bool remove_forks_of(struct td__rref_entry *entry, int rank)
{
    int count = entry->fork_count;
    for (int i = 0; i < entry->fork_count;)
        if (entry->forks[i].rank == rank)
            entry->forks[i] = entry->forks[--entry->fork_count];
        else
            i++;
    return entry->fork_count < count;
}

/* ---- Handles on the owner ---------------------------------------------------------------------- */

struct td__rref_entry *td__rref_entry_hold(struct td__rpc_agent *agent, uint64_t id, bool made,
                                           const char *what)
{
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = add_entry(agent, id);
    if (entry) {
        entry->handles++;
        entry->made |= made;
        if (what)
            snprintf(entry->what, sizeof entry->what, "%s", what);
    }
    pthread_mutex_unlock(&agent->rref_lock);
    if (!entry)
        td__fail_nomem("rref");
    return entry;
}

void td__rref_entry_let_go(struct td__rpc_agent *agent, struct td__rref_entry *entry)
{
    pthread_mutex_lock(&agent->rref_lock);
    entry->handles--;
    struct td__rref_entry *unused = drop_unused(agent, entry);
    pthread_mutex_unlock(&agent->rref_lock);
    free_entry(unused);
}

td_future *td__rref_entry_future(const struct td__rref_entry *entry)
{
    return entry->future;
}

/* ---- Forks ----------------------------------------------------------------------------------- */

td_status td__rref_fork_add(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int rank)
{
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = add_entry(agent, id);
    bool added = entry && add_fork(agent, entry, fork, rank);
    struct td__rref_entry *unused = entry ? drop_unused(agent, entry) : NULL;
    pthread_mutex_unlock(&agent->rref_lock);
    free_entry(unused);
    return added ? TD_OK : td__fail_nomem("rref");
}

/* A fork that is not known belongs to a worker that has gone; or to a call that makes the value, has run into its
 * timeout, and may still come. */
td_status td__rref_fork_delete(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int from)
{
    bool maker = td__id_rank(id) == from;
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = maker ? add_entry(agent, id) : find_entry(agent, id);
    if (entry && !remove_fork(entry, fork) && maker && !entry->made)
        entry->abandoned = true;
    struct td__rref_entry *unused = entry ? drop_unused(agent, entry) : NULL;
    pthread_mutex_unlock(&agent->rref_lock);
    free_entry(unused);
    return entry || !maker ? TD_OK : td__fail_nomem("rref");
}

/* ---- Values ---------------------------------------------------------------------------------- */

td_future *td__rref_begin(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int from,
                          const char *what)
{
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = add_entry(agent, id);
    bool added = entry &&
                 (from == agent->rank || entry->abandoned || add_fork(agent, entry, fork, from));
    td_future *future = added ? td_future_retain(entry->future) : NULL;
    if (added) {
        entry->made = true;
        snprintf(entry->what, sizeof entry->what, "%s", what);
    }
    struct td__rref_entry *unused = entry ? drop_unused(agent, entry) : NULL;
    pthread_mutex_unlock(&agent->rref_lock);
    free_entry(unused);
    if (!future)
        td__fail_nomem("rref");
    return future;
}

void td__rref_never(struct td__rpc_agent *agent, uint64_t id, td_status status, const char *text)
{
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = find_entry(agent, id);
    td_future *future = entry && !entry->made ? td_future_retain(entry->future) : NULL;
    if (future)
        entry->made = true;
    struct td__rref_entry *unused = future ? drop_unused(agent, entry) : NULL;
    pthread_mutex_unlock(&agent->rref_lock);
    if (future)
        td__future_complete(future, NULL, status, text);
    td_future_release(future);
    free_entry(unused);
}

/* A call that waits for a value keeps its entry. It has a future of its own: to cancel it must not cancel the value. */
struct use {
    uint64_t serial;
    struct td__rref_entry *entry;
};

static void end_use(td_future *done, void *arg)
{
    struct use *use = arg;
    struct td__rpc_agent *agent = td__agent_hold();
    struct td__rref_entry *unused = NULL;
    (void)done;
    if (agent && agent->serial == use->serial) {
        pthread_mutex_lock(&agent->rref_lock);
        use->entry->uses--;
        unused = drop_unused(agent, use->entry);
        pthread_mutex_unlock(&agent->rref_lock);
    }
    td__agent_leave(agent);
    free_entry(unused);
    free(use);
}

static td_future *start_use(struct td__rpc_agent *agent, struct td__rref_entry *entry,
                            td_future *value)
{
    td_future *future = td__future_create(NULL, 0, TD__NEVER, 1);
    struct use *use = malloc(sizeof *use);
    if (use)
        *use = (struct use){.serial = agent->serial, .entry = entry};
    if (!future || !use || td__future_on_complete(future, end_use, use)) {
        td_future_release(future);
        free(use);
        return NULL;
    }
    td_value *source = td_value_from_future(value);
    td__future_resolve(future, source);
    return future;
}

td_future *td__rref_use(struct td__rpc_agent *agent, uint64_t id)
{
    TD_SCOPE;
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = add_entry(agent, id);
    td_future *value = entry ? td_future_retain(entry->future) : NULL;
    bool wait = entry && !td__future_is_complete(value);
    if (wait)
        entry->uses++;
    pthread_mutex_unlock(&agent->rref_lock);
    td_future *future = wait ? start_use(agent, entry, value) : td_future_retain(value);
    if (wait && !future) {
        pthread_mutex_lock(&agent->rref_lock);
        entry->uses--;
        struct td__rref_entry *unused = drop_unused(agent, entry);
        pthread_mutex_unlock(&agent->rref_lock);
        free_entry(unused);
    }
    td_future_release(value);
    if (!future)
        td__fail_nomem("rref");
    return future;
}

/* ---- Ends ------------------------------------------------------------------------------------ */

/* What the loss of a worker does to an entry: whether it is to be dropped or failed, without the lock. */
static bool lose_worker(struct td__rref_entry *entry, int rank, bool forks, bool *fail)
{
    bool changed = forks && remove_forks_of(entry, rank);
    *fail = !entry->made && td__id_rank(entry->id) == rank;
    entry->made |= *fail;
    return changed || *fail;
}

struct failed_entry {
    struct failed_entry *next;
    td_future *future;
};

static void fail_entries(struct failed_entry *failed, td_status status, const char *text)
{
    for (struct failed_entry *next; failed; failed = next) {
        next = failed->next;
        td__future_complete(failed->future, NULL, status, text);
        td_future_release(failed->future);
        free(failed);
    }
}

static void note_failed(struct failed_entry **list, struct td__rref_entry *entry)
{
    struct failed_entry *failed = malloc(sizeof *failed);
    if (!failed)
        return; /* those that wait run into their timeouts */
    *failed = (struct failed_entry){.next = *list, .future = td_future_retain(entry->future)};
    *list = failed;
}

void td__rref_entries_lost(struct td__rpc_agent *agent, int rank, bool forks)
{
    struct td__rref_entry *unused = NULL, *next_unused;
    struct failed_entry *failed = NULL;
    struct td__map_node *node, *next;
    char text[TD_RPC_MAX_NAME + 80];
    pthread_mutex_lock(&agent->rref_lock);
    td__worker(agent, rank)->forks_ended |= forks;
    for (node = td__map_next(&agent->rref_entries, NULL); node; node = next) {
        struct td__rref_entry *entry = TD__CONTAINER(node, struct td__rref_entry, node);
        bool fail;
        next = td__map_next(&agent->rref_entries, node);
        if (!lose_worker(entry, rank, forks, &fail))
            continue;
        if (fail)
            note_failed(&failed, entry);
        if (drop_unused(agent, entry)) {
            entry->next = unused;
            unused = entry;
        }
    }
    pthread_mutex_unlock(&agent->rref_lock);
    snprintf(text, sizeof text, GONE, td__worker_name_of(agent, rank));
    fail_entries(failed, TD_ERR_PEER, text);
    for (; unused; unused = next_unused) {
        next_unused = unused->next;
        free_entry(unused);
    }
}

void td__rrefs_abort(struct td__rpc_agent *agent)
{
    struct failed_entry *failed = NULL;
    pthread_mutex_lock(&agent->rref_lock);
    for (struct td__map_node *node = td__map_next(&agent->rref_entries, NULL); node;
         node = td__map_next(&agent->rref_entries, node)) {
        struct td__rref_entry *entry = TD__CONTAINER(node, struct td__rref_entry, node);
        if (!td__future_is_complete(entry->future))
            note_failed(&failed, entry);
    }
    pthread_mutex_unlock(&agent->rref_lock);
    fail_entries(failed, TD_ERR_ABORTED, "this worker was shut down");
}

int td__rref_entry_count(struct td__rpc_agent *agent)
{
    pthread_mutex_lock(&agent->rref_lock);
    int count = (int)agent->rref_entries.size;
    pthread_mutex_unlock(&agent->rref_lock);
    return count;
}

static void report_leak(struct td__rpc_agent *agent, const struct td__rref_entry *entry)
{
    char holders[200] = "";
    for (int i = 0; i < entry->fork_count && strlen(holders) < 150; i++)
        snprintf(holders + strlen(holders), sizeof holders - strlen(holders), "%s\"%.40s\"",
                 i ? ", " : "", td__worker_name_of(agent, entry->forks[i].rank));
    td_log(TD_LOG_WARN,
           "rpc: a reference to %s on worker \"%s\" is still in use at the shutdown: by %s%s%s",
           *entry->what ? entry->what : "a value", agent->name, entry->handles ? "this worker" : "",
           entry->handles && entry->fork_count ? " and " : "", holders);
}

void td__rref_entries_close(struct td__rpc_agent *agent)
{
    struct td__map_node *node;
    while ((node = td__map_next(&agent->rref_entries, NULL))) {
        struct td__rref_entry *entry = TD__CONTAINER(node, struct td__rref_entry, node);
        if (entry->fork_count || entry->handles)
            report_leak(agent, entry);
        td__map_remove(&agent->rref_entries, node);
        free_entry(entry);
    }
    td__map_free(&agent->rref_entries);
}
