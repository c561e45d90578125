/* Remote references: the handles of the program, their forks in messages, and control messages. See rref.h. */
#include "rpc/rref.h"

#include "base/fail.h"
#include "rpc/control.h"
#include "rpc/rref_internal.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td_rref {
    atomic_int owners;
    uint64_t serial; /* of the agent */
    uint64_t id, fork;
    int owner;
    char owner_name[TD_RPC_MAX_NAME + 1];
    atomic_bool named;            /* owner_name is final */
    struct td__rref_entry *entry; /* on the owner */
    atomic_bool confirmed;
    atomic_bool ended; /* the owner needs no DELETE */
    td_future *made;   /* elsewhere: the call that makes the value, if this worker has made it */
};

struct child { /* of a fork that this worker has passed on, until its ACCEPTED */
    struct td__map_node node;
    uint64_t fork;
    int to;
    td_rref *parent;
};

uint64_t td__rref_new_id(struct td__rpc_agent *agent)
{
    return (uint64_t)agent->rank << TD__ID_RANK_SHIFT | (atomic_fetch_add(&agent->last_id, 1) + 1);
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
    atomic_init(&rref->named, atomic_load(&td__worker(agent, owner)->resolved));
    return rref;
}

/* A handle on the owner; `made`: there is a value, or it is being made. */
td_rref *td__rref_own(struct td__rpc_agent *agent, uint64_t id, bool made, const char *what)
{
    td_rref *rref = make_handle(agent, id, 0, agent->rank);
    if (!rref)
        return NULL;
    atomic_store(&rref->confirmed, true);
    rref->entry = td__rref_entry_hold(agent, id, made, what);
    if (rref->entry)
        return rref;
    free(rref);
    return NULL;
}

td_rref *td_rref_retain(td_rref *rref)
{
    if (rref)
        atomic_fetch_add_explicit(&rref->owners, 1, memory_order_relaxed);
    return rref;
}

/* The owner knows the fork: what waits for that keeps the handle. */
static void destroy_handle(td_rref *rref)
{
    struct td__rpc_agent *agent = td__agent_hold();
    bool current = agent && agent->serial == rref->serial;
    if (current && rref->entry)
        td__rref_entry_let_go(agent, rref->entry);
    else if (current && !atomic_load(&rref->ended))
        td__control_send(agent, rref->owner, TD__CONTROL_DELETE, rref->id, rref->fork, NULL, NULL);
    td__agent_leave(agent);
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
td_status td__rref_put(struct td__rpc_agent *agent, int to, td_rref *rref,
                       struct td__rref_record *record)
{
    if (rref->serial != agent->serial)
        return td_fail(TD_ERR_STATE, "the reference is of a worker that was shut down");
    *record = (struct td__rref_record){
        .id = rref->id, .fork = td__rref_new_id(agent), .owner = rref->owner};
    return rref->entry && to != agent->rank ? td__rref_fork_add(agent, rref->id, record->fork, to)
                                            : keep_parent(agent, rref, record->fork, to);
}

void td__rref_take_back(struct td__rpc_agent *agent, int to, const struct td__rref_record *record)
{
    if (record->owner == agent->rank && to != agent->rank)
        td__rref_fork_delete(agent, record->id, record->fork, to);
    else
        let_parent_go(agent, record->fork);
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

/* The owner has recorded the fork, or has ended. Then the parent needs no child that is recorded either. */
static void confirm(struct td__rpc_agent *agent, bool done, void *arg)
{
    struct confirmation *confirmation = arg;
    atomic_store(&confirmation->rref->confirmed, done);
    if (agent)
        accept_child(agent, confirmation->parent, confirmation->rref->fork);
    td_rref_release(confirmation->rref);
    free(confirmation);
}

static td_rref *receive_fork(struct td__rpc_agent *agent, int parent,
                             const struct td__rref_record *record)
{
    td_rref *rref = make_handle(agent, record->id, record->fork, record->owner);
    if (!rref)
        return NULL;
    if (parent == record->owner) {
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
    td__control_send(agent, record->owner, TD__CONTROL_FORK, record->id, record->fork, confirm,
                     confirmation);
    return rref;
}

td_rref *td__rref_get(struct td__rpc_agent *agent, int from, const struct td__rref_record *record)
{
    if (record->owner < 0 || record->owner >= agent->limit) {
        td_fail(TD_ERR_INVALID, "a reference in a message is not valid");
        return NULL;
    }
    if (!td__worker_get(agent, record->owner))
        return NULL;
    if (record->owner != agent->rank)
        return receive_fork(agent, from, record);
    td_rref *rref = td__rref_own(agent, record->id, false, NULL);
    if (rref)
        accept_child(agent, from, record->fork);
    return rref;
}

void td__rref_refuse(struct td__rpc_agent *agent, int from, const struct td__rref_record *record)
{
    if (record->owner == from && from != agent->rank)
        td__control_send(agent, from, TD__CONTROL_DELETE, record->id, record->fork, NULL, NULL);
    else
        accept_child(agent, from, record->fork);
}

/* ---- Control messages on their receiver -------------------------------------------------------- */

td_status td__rref_control(struct td__rpc_agent *agent, int from, int64_t kind, uint64_t id,
                           uint64_t fork)
{
    char text[TD_RPC_MAX_NAME + 80];
    switch (kind) {
    case TD__CONTROL_FORK:
        return td__rref_fork_add(agent, id, fork, from);
    case TD__CONTROL_DELETE:
        return td__rref_fork_delete(agent, id, fork, from);
    case TD__CONTROL_NEVER:
        snprintf(text, sizeof text,
                 "the call of worker \"%s\" that was to make the value has failed",
                 td__worker_name_of(agent, from));
        td__rref_never(agent, id, TD_ERR_INVALID, text);
        return TD_OK;
    case TD__CONTROL_ACCEPTED:
        let_parent_go(agent, fork);
        return TD_OK;
    }
    return td_fail(TD_ERR_INVALID, "there is no control message %lld", (long long)kind);
}

/* ---- Ends ------------------------------------------------------------------------------------ */

/* Takes a child out of the map: one of the worker, or of a reference to a value of it; -1: any. */
static struct child *take_child(struct td__rpc_agent *agent, int rank)
{
    struct child *found = NULL;
    pthread_mutex_lock(&agent->rref_lock);
    for (struct td__map_node *node = td__map_next(&agent->rref_children, NULL); node && !found;
         node = td__map_next(&agent->rref_children, node)) {
        struct child *child = TD__CONTAINER(node, struct child, node);
        if (rank < 0 || child->to == rank || child->parent->owner == rank)
            found = child;
    }
    if (found)
        td__map_remove(&agent->rref_children, &found->node);
    pthread_mutex_unlock(&agent->rref_lock);
    return found;
}

static void free_children(struct td__rpc_agent *agent, int rank)
{
    for (struct child *child; (child = take_child(agent, rank));) {
        td_rref_release(child->parent);
        free(child);
    }
}

/* While this worker waits in td_rpc_shutdown(), others may have finished waiting, and left: references that these had
 * are still to be reported. */
void td__rrefs_lost(struct td__rpc_agent *agent, int rank)
{
    enum td__presence presence = td__endpoint_presence(agent->endpoint, rank);
    bool ended = presence == TD__ENDED || presence == TD__CUT_OFF;
    td__rref_entries_lost(agent, rank, ended || !atomic_load(&agent->finishing));
    free_children(agent, rank);
}

void td__rrefs_close(struct td__rpc_agent *agent)
{
    td__rref_entries_close(agent);
    free_children(agent, -1);
    td__map_free(&agent->rref_children);
}

/* ---- For rref_calls.c ------------------------------------------------------------------------ */

td_rref *td__rref_user(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int owner)
{
    return make_handle(agent, id, fork, owner);
}

/* The call that makes the value was answered, or has failed. After an answer that is a failure, it has not begun: the
 * owner knows no fork, and others that have the reference wait for nothing. After a timeout or the end of a link it may
 * have, or still come. */
static void on_made(td_future *made, void *arg)
{
    td_rref *rref = arg;
    struct td__rpc_agent *agent = td__agent_hold();
    td_value *value = td__future_value(made);
    td_status status = value ? TD_OK : td__error_status();
    if (status && status != TD_ERR_TIMEOUT && status != TD_ERR_PEER && status != TD_ERR_ABORTED &&
        agent && agent->serial == rref->serial) {
        atomic_store(&rref->ended, true);
        if (rref->entry)
            td__rref_never(agent, rref->id, status, td__error_text());
        else
            td__control_send(agent, rref->owner, TD__CONTROL_NEVER, rref->id, rref->fork, NULL,
                             NULL);
    }
    if (value)
        atomic_store(&rref->confirmed, true);
    td_value_release(value);
    td__agent_leave(agent);
    td_rref_release(rref);
}

void td__rref_set_made(td_rref *rref, td_future *made)
{
    rref->made = made;
    if (td__future_on_complete(made, on_made, td_rref_retain(rref)))
        td_rref_release(rref);
}

static void end_keeping(td_future *answer, void *rref)
{
    (void)answer;
    td_rref_release(rref);
}

td_status td__rref_keep_until(td_rref *rref, td_future *answer)
{
    td_status status = td__future_on_complete(answer, end_keeping, td_rref_retain(rref));
    if (status)
        td_rref_release(rref);
    return status;
}

td_future *td__rref_made(const td_rref *rref)
{
    return rref->entry ? NULL : rref->made;
}

void td__rref_forget(struct td__rpc_agent *agent, td_rref *rref)
{
    if (rref->entry)
        td__rref_entry_let_go(agent, rref->entry);
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
    return td__rref_entry_future(rref->entry);
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

/* A worker that has got a reference to a value of a third one may not know the name of that yet. */
static void find_owner_name(td_rref *rref)
{
    struct td__rpc_agent *agent = atomic_load(&rref->named) ? NULL : td__agent_hold();
    if (agent && agent->serial == rref->serial && !td__worker_resolve(agent, rref->owner)) {
        pthread_mutex_lock(&agent->rref_lock);
        if (!atomic_load(&rref->named))
            snprintf(rref->owner_name, sizeof rref->owner_name, "%s",
                     td__worker_name_of(agent, rref->owner));
        atomic_store(&rref->named, true);
        pthread_mutex_unlock(&agent->rref_lock);
    }
    td__agent_leave(agent);
}

const char *td_rref_owner(const td_rref *rref)
{
    if (!rref)
        return NULL;
    find_owner_name((td_rref *)rref);
    return rref->owner_name;
}

bool td_rref_is_owner(const td_rref *rref)
{
    return rref && rref->entry;
}

bool td_rref_confirmed_by_owner(const td_rref *rref)
{
    return rref && atomic_load(&rref->confirmed);
}
