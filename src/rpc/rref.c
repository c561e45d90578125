/* Remote references: the handles of the program, and the entries of their owner. See rref.h. */
#include "rpc/rref.h"

#include "base/fail.h"
#include "rpc/control.h"
#include "rpc/rref_internal.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fork_at {
    uint64_t id;
    int rank;
};

struct td__rref_entry {
    struct td__map_node node;
    uint64_t id;
    td_future *future; /* of the value */
    char what[48];     /* the function that makes it, for reports */
    int handles;       /* references on this worker */
    bool made;         /* the call that makes the value has come, or there is a value */
    struct fork_at *forks;
    int fork_count, fork_capacity;
    uint64_t *deleted; /* forks whose DELETE came before them */
    int deleted_count;
};

struct td_rref {
    atomic_int owners;
    uint64_t serial; /* of the agent */
    uint64_t id, fork;
    int owner;
    char owner_name[TD_RPC_MAX_NAME + 1];
    struct td__rref_entry *entry; /* on the owner */
    atomic_bool confirmed;
    td_future *made; /* elsewhere: the call that makes the value, if this worker has made it */
};

struct child { /* of a fork that this worker has passed on, until its ACCEPTED */
    struct td__map_node node;
    uint64_t fork;
    int to;
    td_rref *parent;
};

/* ---- Entries (with rref_lock held) ------------------------------------------------------------- */

static struct td__rref_entry *find_entry(struct td__rpc_agent *agent, uint64_t id, bool add)
{
    struct td__map_node *node = td__map_find(&agent->rref_entries, (const char *)&id, sizeof id);
    if (node || !add)
        return node ? TD__CONTAINER(node, struct td__rref_entry, node) : NULL;
    struct td__rref_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    entry->id = id;
    entry->node.key = (const char *)&entry->id;
    entry->node.key_size = sizeof entry->id;
    entry->future = td__future_create(NULL, 0, TD__NEVER);
    if (entry->future && td__map_insert(&agent->rref_entries, &entry->node))
        return entry;
    td_future_release(entry->future);
    free(entry);
    return NULL;
}

/* Removes the entry if nothing refers to it: returns it for free_entry(), without the lock. */
static struct td__rref_entry *drop_unused(struct td__rpc_agent *agent, struct td__rref_entry *entry)
{
    if (!entry->made || entry->handles || entry->fork_count)
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
    free(entry->deleted);
    free(entry);
}

static bool was_deleted(struct td__rref_entry *entry, uint64_t fork)
{
    for (int i = 0; i < entry->deleted_count; i++)
        if (entry->deleted[i] == fork) {
            entry->deleted[i] = entry->deleted[--entry->deleted_count];
            return true;
        }
    return false;
}

static bool add_fork(struct td__rref_entry *entry, uint64_t fork, int rank)
{
    if (was_deleted(entry, fork))
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

static void delete_fork(struct td__rref_entry *entry, uint64_t fork)
{
    for (int i = 0; i < entry->fork_count; i++)
        if (entry->forks[i].id == fork) {
            entry->forks[i] = entry->forks[--entry->fork_count];
            return;
        }
    uint64_t *deleted = realloc(entry->deleted,
                                sizeof *deleted * (size_t)(entry->deleted_count + 1));
    if (deleted) {
        entry->deleted = deleted;
        entry->deleted[entry->deleted_count++] = fork;
    }
}

uint64_t td__rref_new_id(struct td__rpc_agent *agent)
{
    return (uint64_t)agent->rank << 48 | (atomic_fetch_add(&agent->last_id, 1) + 1);
}

/* ---- Handles --------------------------------------------------------------------------------- */

static td_rref *make_handle(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int owner)
{
    td_rref *rref = calloc(1, sizeof *rref);
    if (!rref) {
        td__fail_nomem("rref");
        return NULL;
    }
    atomic_init(&rref->owners, 1);
    rref->serial = agent->serial;
    rref->id = id;
    rref->fork = fork;
    rref->owner = owner;
    snprintf(rref->owner_name, sizeof rref->owner_name, "%s", td__worker_name_of(agent, owner));
    return rref;
}

/* A handle on the owner; `made`: there is a value, or it is being made. */
td_rref *td__rref_own(struct td__rpc_agent *agent, uint64_t id, bool made, const char *what)
{
    td_rref *rref = make_handle(agent, id, 0, agent->rank);
    if (!rref)
        return NULL;
    atomic_store(&rref->confirmed, true);
    pthread_mutex_lock(&agent->rref_lock);
    rref->entry = find_entry(agent, id, true);
    if (rref->entry) {
        rref->entry->handles++;
        rref->entry->made |= made;
        if (what)
            snprintf(rref->entry->what, sizeof rref->entry->what, "%s", what);
    }
    pthread_mutex_unlock(&agent->rref_lock);
    if (rref->entry)
        return rref;
    free(rref);
    td__fail_nomem("rref");
    return NULL;
}

td_rref *td_rref_retain(td_rref *rref)
{
    if (rref)
        atomic_fetch_add_explicit(&rref->owners, 1, memory_order_relaxed);
    return rref;
}

static void send_delete(struct td__rpc_agent *agent, const td_rref *rref)
{
    td__control_send(agent, rref->owner, TD__CONTROL_DELETE, rref->id, rref->fork, NULL, NULL);
}

/* The owner knows the fork, or never will: now it can be deleted. */
static void delete_made(td_future *made, void *arg)
{
    td_rref *rref = arg;
    struct td__rpc_agent *agent = td__agent_hold();
    (void)made;
    if (agent && agent->serial == rref->serial)
        send_delete(agent, rref);
    td__agent_leave(agent);
    td_future_release(rref->made);
    free(rref);
}

static void destroy_handle(td_rref *rref)
{
    struct td__rpc_agent *agent = td__agent_hold();
    bool current = agent && agent->serial == rref->serial;
    struct td__rref_entry *unused = NULL;
    if (current && rref->entry) {
        pthread_mutex_lock(&agent->rref_lock);
        rref->entry->handles--;
        unused = drop_unused(agent, rref->entry);
        pthread_mutex_unlock(&agent->rref_lock);
    } else if (current && rref->made && !td__future_is_complete(rref->made)) {
        td__agent_leave(agent);
        if (!td__future_on_complete(rref->made, delete_made, rref))
            return;
        agent = NULL;
    } else if (current) {
        send_delete(agent, rref);
    }
    td__agent_leave(agent);
    free_entry(unused);
    td_future_release(rref->made);
    free(rref);
}

void td_rref_release(td_rref *rref)
{
    if (rref && atomic_fetch_sub_explicit(&rref->owners, 1, memory_order_acq_rel) == 1)
        destroy_handle(rref);
}

static void release_rref(void *rref)
{
    td_rref_release(rref);
}

td_rref *td__rref_adopt(td_rref *rref)
{
    return td__scope_adopt(rref, release_rref);
}

/* ---- In messages ----------------------------------------------------------------------------- */

static td_status keep_parent(struct td__rpc_agent *agent, td_rref *rref, uint64_t fork, int to)
{
    struct child *child = calloc(1, sizeof *child);
    if (!child)
        return td__fail_nomem("rref");
    *child = (struct child){.fork = fork, .to = to, .parent = td_rref_retain(rref)};
    child->node.key = (const char *)&child->fork;
    child->node.key_size = sizeof child->fork;
    pthread_mutex_lock(&agent->rref_lock);
    bool added = td__map_insert(&agent->rref_children, &child->node);
    pthread_mutex_unlock(&agent->rref_lock);
    if (added)
        return TD_OK;
    td_rref_release(rref);
    free(child);
    return td__fail_nomem("rref");
}

static void let_parent_go(struct td__rpc_agent *agent, uint64_t fork)
{
    pthread_mutex_lock(&agent->rref_lock);
    struct td__map_node *node = td__map_find(&agent->rref_children, (const char *)&fork,
                                             sizeof fork);
    if (node)
        td__map_remove(&agent->rref_children, node);
    pthread_mutex_unlock(&agent->rref_lock);
    if (!node)
        return;
    struct child *child = TD__CONTAINER(node, struct child, node);
    td_rref_release(child->parent);
    free(child);
}

/* The owner adds the fork to its entry; another worker keeps its own reference. To the owner itself a reference needs no
 * fork that is recorded: it is accepted at once. */
td_status td__rref_put(struct td__rpc_agent *agent, int to, td_rref *rref, struct td__buffer *bytes)
{
    uint64_t fork = td__rref_new_id(agent);
    if (rref->serial != agent->serial)
        return td_fail(TD_ERR_STATE, "the reference is of a worker that was shut down");
    if (rref->entry && to != agent->rank) {
        pthread_mutex_lock(&agent->rref_lock);
        bool added = add_fork(rref->entry, fork, to);
        pthread_mutex_unlock(&agent->rref_lock);
        if (!added)
            return td__fail_nomem("rref");
    } else {
        TD_TRY(keep_parent(agent, rref, fork, to));
    }
    td__buffer_put_u64(bytes, rref->id);
    td__buffer_put_u64(bytes, fork);
    td__buffer_put_u32(bytes, (uint32_t)rref->owner);
    td__buffer_put_u64(bytes, (uint64_t)agent->rank);
    return TD_OK;
}

static void accept_child(struct td__rpc_agent *agent, int parent, uint64_t fork)
{
    if (parent == agent->rank)
        let_parent_go(agent, fork);
    else
        td__control_send(agent, parent, TD__CONTROL_ACCEPTED, 0, fork, NULL, NULL);
}

struct confirmation {
    td_rref *rref;
    int parent;
};

/* The owner has recorded the fork; or one of the two has ended. */
static void confirm(struct td__rpc_agent *agent, void *arg)
{
    struct confirmation *confirmation = arg;
    atomic_store(&confirmation->rref->confirmed, agent != NULL);
    if (agent)
        accept_child(agent, confirmation->parent, confirmation->rref->fork);
    td_rref_release(confirmation->rref);
    free(confirmation);
}

static td_rref *receive_fork(struct td__rpc_agent *agent, int from, int parent, uint64_t id,
                             uint64_t fork, int owner)
{
    td_rref *rref = make_handle(agent, id, fork, owner);
    if (!rref)
        return NULL;
    if (from == owner && parent == owner) {
        atomic_store(&rref->confirmed, true);
        return rref;
    }
    struct confirmation *confirmation = malloc(sizeof *confirmation);
    if (!confirmation) {
        free(rref);
        td__fail_nomem("rref");
        return NULL;
    }
    *confirmation = (struct confirmation){.rref = td_rref_retain(rref), .parent = parent};
    td__control_send(agent, owner, TD__CONTROL_FORK, id, fork, confirm, confirmation);
    return rref;
}

td_rref *td__rref_get(struct td__rpc_agent *agent, int from, const void *bytes, size_t size)
{
    struct td__reader reader = td__reader_of(bytes, size);
    uint64_t id = td__reader_u64(&reader), fork = td__reader_u64(&reader);
    uint32_t owner = td__reader_u32(&reader);
    uint64_t parent = td__reader_u64(&reader);
    if (!td__reader_done(&reader) || owner >= (uint32_t)agent->size ||
        parent >= (uint64_t)agent->size) {
        td_fail(TD_ERR_INVALID, "a reference in a message is not valid");
        return NULL;
    }
    if ((int)owner != agent->rank)
        return receive_fork(agent, from, (int)parent, id, fork, (int)owner);
    td_rref *rref = td__rref_own(agent, id, false, NULL);
    if (rref)
        accept_child(agent, (int)parent, fork);
    return rref;
}

/* ---- Control messages on their receiver -------------------------------------------------------- */

td_status td__rref_control(struct td__rpc_agent *agent, int from, int64_t kind, uint64_t id,
                           uint64_t fork)
{
    struct td__rref_entry *entry, *unused = NULL;
    if (kind == TD__CONTROL_ACCEPTED) {
        let_parent_go(agent, fork);
        return TD_OK;
    }
    pthread_mutex_lock(&agent->rref_lock);
    entry = find_entry(agent, id, true);
    bool done = entry;
    if (entry && kind == TD__CONTROL_FORK)
        done = add_fork(entry, fork, from);
    else if (entry)
        delete_fork(entry, fork);
    if (entry)
        unused = drop_unused(agent, entry);
    pthread_mutex_unlock(&agent->rref_lock);
    free_entry(unused);
    return done ? TD_OK : td__fail_nomem("rref");
}

void td__rrefs_lost(struct td__rpc_agent *agent, int rank)
{
    struct td__rref_entry *unused = NULL;
    struct td__map_node *next;
    do {
        struct td__rref_entry *found = NULL;
        pthread_mutex_lock(&agent->rref_lock);
        for (struct td__map_node *node = td__map_next(&agent->rref_entries, NULL); node && !found;
             node = next) {
            struct td__rref_entry *entry = TD__CONTAINER(node, struct td__rref_entry, node);
            next = td__map_next(&agent->rref_entries, node);
            bool had = false;
            for (int i = 0; i < entry->fork_count;)
                if (entry->forks[i].rank == rank) {
                    entry->forks[i] = entry->forks[--entry->fork_count];
                    had = true;
                } else {
                    i++;
                }
            if (!entry->made && (int)(entry->id >> 48) == rank) {
                entry->made = true; /* it never will be */
                td__future_complete(entry->future, NULL, TD_ERR_PEER,
                                    "the worker that was to make the value has gone");
                had = true;
            }
            found = had ? drop_unused(agent, entry) : NULL;
        }
        pthread_mutex_unlock(&agent->rref_lock);
        unused = found;
        free_entry(unused);
    } while (unused);
    for (;;) {
        struct child *lost = NULL;
        pthread_mutex_lock(&agent->rref_lock);
        for (struct td__map_node *node = td__map_next(&agent->rref_children, NULL); node && !lost;
             node = td__map_next(&agent->rref_children, node)) {
            struct child *child = TD__CONTAINER(node, struct child, node);
            lost = child->to == rank ? child : NULL;
        }
        if (lost)
            td__map_remove(&agent->rref_children, &lost->node);
        pthread_mutex_unlock(&agent->rref_lock);
        if (!lost)
            return;
        td_rref_release(lost->parent);
        free(lost);
    }
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

void td__rrefs_close(struct td__rpc_agent *agent)
{
    struct td__map_node *node;
    while ((node = td__map_next(&agent->rref_entries, NULL))) {
        struct td__rref_entry *entry = TD__CONTAINER(node, struct td__rref_entry, node);
        if (entry->made && (entry->fork_count || entry->handles))
            report_leak(agent, entry);
        td__map_remove(&agent->rref_entries, node);
        free_entry(entry);
    }
    while ((node = td__map_next(&agent->rref_children, NULL))) {
        struct child *child = TD__CONTAINER(node, struct child, node);
        td__map_remove(&agent->rref_children, node);
        td_rref_release(child->parent);
        free(child);
    }
    td__map_free(&agent->rref_entries);
    td__map_free(&agent->rref_children);
}

/* ---- For rref_calls.c ------------------------------------------------------------------------ */

td_rref *td__rref_user(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int owner)
{
    return make_handle(agent, id, fork, owner);
}

static void set_confirmed(td_future *made, void *arg)
{
    td_rref *rref = arg;
    td_value *value = td__future_value(made);
    atomic_store(&rref->confirmed, value != NULL);
    td_value_release(value);
}

void td__rref_set_made(td_rref *rref, td_future *made)
{
    rref->made = made;
    if (!rref->entry)
        td__future_on_complete(made, set_confirmed, rref);
}

td_future *td__rref_made(const td_rref *rref)
{
    return rref->entry ? NULL : rref->made;
}

void td__rref_forget(struct td__rpc_agent *agent, td_rref *rref)
{
    struct td__rref_entry *unused = NULL;
    if (rref->entry) {
        pthread_mutex_lock(&agent->rref_lock);
        rref->entry->made = true;
        rref->entry->handles--;
        unused = drop_unused(agent, rref->entry);
        pthread_mutex_unlock(&agent->rref_lock);
    }
    free_entry(unused);
    free(rref);
}

uint64_t td__rref_id(const td_rref *rref)
{
    return rref->id;
}

int td__rref_owner_rank(const td_rref *rref)
{
    return rref->owner;
}

td_future *td__rref_future(const td_rref *rref)
{
    return rref->entry->future;
}

struct td__rpc_agent *td__rref_enter(const td_rref *rref, const char *call)
{
    struct td__rpc_agent *agent = td__agent_enter(call);
    if (!agent || agent->serial == rref->serial)
        return agent;
    td__agent_leave(agent);
    td_fail(TD_ERR_STATE, "%s: the reference is of a worker that was shut down", call);
    return NULL;
}

td_future *td__rref_begin(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int from,
                          const char *what)
{
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = find_entry(agent, id, true);
    bool added = entry && (from == agent->rank || add_fork(entry, fork, from));
    if (added) {
        entry->made = true;
        snprintf(entry->what, sizeof entry->what, "%s", what);
    }
    td_future *future = added ? td_future_retain(entry->future) : NULL;
    struct td__rref_entry *unused = added ? drop_unused(agent, entry) : NULL;
    pthread_mutex_unlock(&agent->rref_lock);
    free_entry(unused);
    if (!future)
        td__fail_nomem("rref");
    return future;
}

td_future *td__rref_wait_for(struct td__rpc_agent *agent, uint64_t id)
{
    pthread_mutex_lock(&agent->rref_lock);
    struct td__rref_entry *entry = find_entry(agent, id, true);
    td_future *future = entry ? td_future_retain(entry->future) : NULL;
    pthread_mutex_unlock(&agent->rref_lock);
    if (!future)
        td__fail_nomem("rref");
    return future;
}

const char *td_rref_owner(const td_rref *rref)
{
    return rref ? rref->owner_name : NULL;
}

bool td_rref_is_owner(const td_rref *rref)
{
    return rref && rref->entry;
}

bool td_rref_confirmed_by_owner(const td_rref *rref)
{
    return rref && atomic_load(&rref->confirmed);
}
