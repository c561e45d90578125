/* The native backend: selects the transport of a call.
 *
 *     one rank                  a copy
 *     all ranks on one host     shared memory (shm_comm.h)
 *     one rank on each host     sockets (tcp_comm.h)
 *     otherwise                 the hierarchy (hierarchy.c) for operations that it implements, else sockets
 *
 * Creating a group needs no store: the cards that the ranks exchanged when the world was created have the addresses
 * of all members. */
#include "base/fail.h"
#include "fault/call_history.h"
#include "fault/peer_query.h"
#include "native/native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    WAKE_MS = 200,  /* for all ranks of this host to be woken, after a failure */
    CAUSE_MS = 500, /* for the detector to notice why a member has left */
};

/* ---- Options --------------------------------------------------------------------------------- */

static td_status read_option(const char *option, struct td__native *native)
{
    if (!strncmp(option, "algorithm=", 10) && option[10]) {
        for (int i = 0; td__algorithms[i].name; i++)
            if (!strcmp(td__algorithms[i].name, option + 10)) {
                native->algorithm = td__algorithms[i].name;
                return TD_OK;
            }
        return td_fail(TD_ERR_INVALID, "backend option %s: there is no algorithm of that name",
                       option);
    }
    if (!strcmp(option, "transport=tcp"))
        native->sockets_only = true;
    else if (strcmp(option, "transport=shm") != 0 && strcmp(option, "transport=auto") != 0)
        return td_fail(TD_ERR_INVALID,
                       "backend option \"%s\" is not known: there are transport=tcp|shm|auto "
                       "and algorithm=NAME",
                       option);
    return TD_OK;
}

/* "name=value name=value", separated by spaces or commas. */
static td_status read_options(const char *text, struct td__native *native)
{
    char *copy = text ? strdup(text) : NULL, *rest;
    td_status status = text && !copy ? td__fail_nomem("group") : TD_OK;
    char *option = copy ? strtok_r(copy, " ,", &rest) : NULL;
    for (; option && !status; option = strtok_r(NULL, " ,", &rest))
        status = read_option(option, native);
    free(copy);
    return status;
}

/* ---- Life ------------------------------------------------------------------------------------ */

static td_status shared_memory(void *arg, td__deadline deadline, void **memory)
{
    struct td__native *native = arg;
    TD_TRY(td__shm_comm_attach(native->comm, deadline));
    *memory = native->comm->extra;
    return TD_OK;
}

struct td__shm_cell *td__native_cell(const struct td__shm_comm *comm, int world_rank)
{
    for (int i = 0; comm && i < comm->size; i++)
        if (comm->world_ranks[i] == world_rank)
            return &comm->cells[i];
    return NULL;
}

static bool has_memory(void *arg, int world_rank)
{
    const struct td__native *native = arg;
    const struct td__shm_cell *cell = td__native_cell(native->comm, world_rank);
    return cell && atomic_load(&cell->attached);
}

static void destroy(void *self)
{
    struct td__native *native = self;
    td__staged_messages_end(&native->messages);
    if (native->history) /* before the rest, since any rank may query it at any time */
        td__call_history_retire(native->history, native->group);
    if (native->p2p)
        td__p2p_destroy(native->p2p);
    if (native->hierarchy)
        td__hierarchy_destroy(native->hierarchy);
    td__tcp_comm_destroy(native->sockets);
    if (native->comm)
        td__leave_comm(native->group->root, native->comm);
    free(native);
}

/* A rank of this host writes into the memory of the group that it leaves. */
static int has_left(void *self, int rank)
{
    const struct td__native *native = self;
    const struct td__shm_cell *cell = td__native_cell(native->comm, native->group->ranks[rank]);
    return cell ? atomic_load(&cell->leaving) != 0 : -1;
}

static bool fills_host(void *self)
{
    const struct td__native *native = self;
    struct td__endpoint *endpoint = native->group->root->endpoint;
    return !native->sockets && td__shm_local_size(endpoint) >= td__processors();
}

/* ---- Members that are lost ------------------------------------------------------------------- */

/* Failures that other ranks have sent. */
static td_status check_links(struct td__native *native, const struct td__operation *operation)
{
    TD_TRY(td__tcp_comm_check(native->sockets, operation));
    return td__tcp_comm_check(native->rail, operation);
}

/* A call after a member has died fails, even where it would not need that member. */
static td_status find_losses(struct td__native *native, const struct td__operation *operation,
                             unsigned losses)
{
    const td_group *group = native->group;
    struct td__endpoint *endpoint = group->root->endpoint;
    if (native->comm) /* a rank may have broken it */
        TD_TRY(td__shm_state(native->comm));
    TD_TRY(check_links(native, operation));
    for (int i = 0; i < group->size; i++) {
        enum td__presence presence = td__endpoint_presence(endpoint, group->ranks[i]);
        if (presence == TD__ENDED || presence == TD__CUT_OFF)
            return td_fail(TD_ERR_PEER, "%s: %s %s", td__operation_describe(operation),
                           td__endpoint_describe(endpoint, group->ranks[i]),
                           td__endpoint_exit_reason(endpoint, group->ranks[i]));
    }
    native->losses = losses;
    return TD_OK;
}

static inline td_status check_losses(struct td__native *native,
                                     const struct td__operation *operation)
{
    unsigned losses = td__endpoint_losses(native->group->root->endpoint);
    return losses == native->losses ? TD_OK : find_losses(native, operation, losses);
}

/* A member has left in the middle of a call: fails where that is the consequence of something else. Perhaps a member has
 * failed, and the reason is in the comm. Perhaps a member has ended, and this rank does not know it yet. */
static td_status find_cause(void *arg, const struct td__operation *operation)
{
    struct td__native *native = arg;
    struct td__endpoint *endpoint = native->group->root->endpoint;
    td__deadline end = td__deadline_earlier(td__operation_deadline(operation),
                                            td__deadline_in_ms(CAUSE_MS));
    unsigned losses;
    if (native->comm)
        TD_TRY(td__shm_state(native->comm));
    if (td__tcp_comm_is_broken(native->sockets) || td__tcp_comm_is_broken(native->rail))
        return TD_OK; /* the other members have got that error */
    do {
        losses = td__endpoint_losses(endpoint);
        TD_TRY(check_losses(native, operation));
    } while (td__endpoint_await_loss(endpoint, losses, end));
    return TD_OK;
}

/* The same where a member could not be reached; otherwise with that as the error. */
static td_status cause_of(struct td__native *native, const struct td__operation *operation)
{
    struct td__error error;
    td__error_save(&error);
    td_status cause = find_cause(native, operation);
    return cause ? cause : td__error_restore(&error);
}

/* Called before a waiting thread sleeps. A failure on one host must reach ranks of another host that wait for each
 * other: a rank that waits in the comm checks its rail, and a rank that waits on links checks the comm. */
static td_status check_from_comm(void *arg, const struct td__operation *operation, unsigned sleeps,
                                 td__deadline *next)
{
    struct td__native *native = arg;
    TD_TRY(td__group_state(native->group));
    TD_TRY(check_losses(native, operation));
    if (sleeps == 1)
        td__tcp_comm_watch_links(native->rail);
    if (sleeps)
        TD_TRY(td__tcp_comm_check(native->rail, operation));
    return td__call_history_check(native->history, native->group, operation, next);
}

static td_status check_from_links(void *arg, const struct td__operation *operation,
                                  td__deadline *next)
{
    struct td__native *native = arg;
    TD_TRY(td__group_state(native->group));
    if (native->comm)
        TD_TRY(td__shm_state(native->comm));
    TD_TRY(check_losses(native, operation));
    return td__call_history_check(native->history, native->group, operation, next);
}

static void explain(void *arg, const struct td__operation *operation)
{
    struct td__native *native = arg;
    td__explain_delay(native->group, operation->call.sequence, -1, TD_ERR_TIMEOUT);
}

static td_status compare_calls(void *arg, int world_rank, const struct td__operation *operation)
{
    struct td__native *native = arg;
    return td__call_history_query(native->history, native->group, world_rank, operation);
}

/* With the last error as the reason. */
static void abort_group(void *self)
{
    struct td__native *native = self;
    td_status status = td__error_status();
    if (native->comm)
        td__shm_break(native->comm, status);
    if (native->p2p)
        td__p2p_abort(native->p2p, status);
    if (native->comm) /* after td__p2p_abort(): the messages have failed with their reason */
        atomic_store(&native->comm->given_up, true);
    if (native->sockets)
        td__endpoint_wake_waiters(native->group->root->endpoint);
}

/* ---- Creating -------------------------------------------------------------------------------- */

/* The members by host. With transport=tcp every rank counts as a host of its own. */
struct topology {
    int *local;                  /* world ranks of the members on this host */
    int local_size, local_index; /* their number, and the index of this rank */
    bool several_hosts;
    bool several_on_one; /* some host has several members */
};

static td_status find_topology(const struct td__native *native, struct td__endpoint *endpoint,
                               struct topology *topology)
{
    const td_group *group = native->group;
    int host = td__endpoint_host(endpoint, group->root->rank);
    bool *seen = calloc((size_t)td__endpoint_size(endpoint), sizeof *seen);
    *topology = (struct topology){.local = malloc(sizeof(int) * (size_t)group->size)};
    if (!topology->local || !seen) {
        free(topology->local);
        free(seen);
        return td__fail_nomem("group");
    }
    for (int i = 0; i < group->size; i++) {
        int h = td__endpoint_host(endpoint, group->ranks[i]);
        bool own = i == group->rank || (h == host && !native->sockets_only);
        if (i == group->rank)
            topology->local_index = topology->local_size;
        if (own)
            topology->local[topology->local_size++] = group->ranks[i];
        else
            topology->several_hosts = true;
        topology->several_on_one = topology->several_on_one || (seen[h] && !native->sockets_only);
        seen[h] = true;
    }
    free(seen);
    return TD_OK;
}

static td_status build(struct td__native *native, struct td__endpoint *endpoint)
{
    td_group *group = native->group;
    struct topology topology;
    TD_TRY(find_topology(native, endpoint, &topology));
    td_status status = td__leave_prepare(group->root);
    if (!status && topology.local_size > 1)
        status = td__shm_comm_create(endpoint, group->key, topology.local, topology.local_size,
                                     topology.local_index, td__p2p_shared_size(topology.local_size),
                                     &native->comm);
    free(topology.local);
    if (!status && topology.several_hosts)
        status = td__tcp_comm_create(endpoint, group->key, group->ranks, group->size, group->rank,
                                     native->algorithm, &native->sockets);
    if (!status && topology.several_hosts && topology.several_on_one)
        status = td__hierarchy_create(endpoint, group->key, group->ranks, group->size, group->rank,
                                      native->comm, native->algorithm, &native->hierarchy);
    if (!status && topology.several_hosts && !(native->history = td__call_history_create()))
        status = td__fail_nomem("group");
    if (status)
        return status;
    group->history = native->history;
    group->trace.quick = !topology.several_hosts && native->part == &group->host;
    if (native->comm) {
        native->comm->check = topology.several_hosts
                                  ? check_from_comm
                                  : NULL; /* one host: the comm has all failures */
        native->comm->callback_arg = native;
        native->comm->explain = explain;
        native->comm->find_cause = find_cause;
    }
    struct td__comm_callbacks callbacks = {.check = check_from_links,
                                           .compare_calls = compare_calls,
                                           .explain = explain,
                                           .arg = native};
    if (native->hierarchy)
        native->rail = td__hierarchy_rail(native->hierarchy);
    td__tcp_comm_set_callbacks(native->sockets, &callbacks);
    td__tcp_comm_set_callbacks(native->rail, &callbacks);
    struct td__p2p_options options = {
        .endpoint = endpoint,
        .key = group->key,
        .world_ranks = group->ranks,
        .size = group->size,
        .rank = group->rank,
        .sockets_only = native->sockets_only,
        .name = group->name,
        .shared = shared_memory,
        .shared_arg = native,
        .has_memory = has_memory,
    };
    return td__p2p_create(&options, &native->p2p);
}

static td_status fail_alone(const struct td__native *native, const td_call *call)
{
    return td_fail(TD_ERR_INVALID, "%s: there is no other rank in group \"%s\"",
                   td_op_kind_name(call->kind), native->group->name);
}

static td_status create(const td_backend_context *context, void *arg, void **self)
{
    struct td__part *part = TD__CONTAINER(context, struct td__part, context);
    td_group *group = part->group;
    struct td__native *native = calloc(1, sizeof *native);
    (void)arg;
    if (!native)
        return td__fail_nomem("group");
    native->part = part;
    native->group = group;
    native->messages.group = group;
    td__staged_messages_init(&native->messages);
    group->trace.quick = group->size == 1 && part == &group->host;
    native->sockets_only = !strcmp(part->name, "tcp");
    td_status status = read_options(context->options, native);
    if (!status && group->size > 1)
        status = build(native, group->root->endpoint);
    native->messages.p2p = native->p2p;
    /* All ranks create the first group at the same time, so no rank waits for long. */
    if (!status && native->comm && !group->root->first)
        status = td__shm_comm_attach(native->comm, td__deadline_in_ms(context->timeout_ms));
    if (status) {
        destroy(native);
        return status;
    }
    *self = native;
    return TD_OK;
}

/* ---- Collectives ----------------------------------------------------------------------------- */

static td_status run_alone(const struct td__operation *operation)
{
    const void *input = operation->call.input;
    void *output = operation->call.output;
    size_t count = operation->call.output_counts ? operation->call.output_counts[0]
                                                 : operation->call.count;
    if (!count)
        return TD_OK;
    if (td__reduces(operation->call.kind))
        td__reduce_many(&operation->reduction, &output, 1, &input, 1, count);
    else if (output != input)
        memcpy(output, input, count * td__operation_element(operation));
    return TD_OK;
}

/* Maps the memory of the comm; in the first call. */
static td_status attach(struct td__native *native, const struct td__operation *operation)
{
    td_status status = td__shm_comm_attach(native->comm, td__operation_deadline(operation));
    return td__explain_delay(native->group, operation->call.sequence, -1, status);
}

static td_status run_on_transport(struct td__native *native, struct td__operation *operation)
{
    if (native->group->size == 1)
        return run_alone(operation);
    TD_TRY(check_losses(native, operation));
    if (native->comm && !atomic_load_explicit(&native->comm->attached, memory_order_acquire))
        TD_TRY(attach(native, operation));
    if (!native->sockets)
        return td__shm_run(native->comm, operation);
    if (native->hierarchy && td__hierarchy_has(operation->call.kind))
        return td__hierarchy_run(native->hierarchy, operation);
    if (native->comm)
        TD_TRY(td__shm_publish(native->comm, operation));
    return td__tcp_comm_run(native->sockets, operation);
}

/* Members on this host that sleep on links do not see that the comm has failed. */
static void wake_members(const struct td__native *native)
{
    const struct td__shm_comm *comm = native->comm;
    td__deadline deadline = td__deadline_in_ms(WAKE_MS);
    for (int i = 0; i < comm->size && !td__deadline_passed(deadline); i++)
        if (i != comm->index &&
            td__endpoint_presence(comm->endpoint, comm->world_ranks[i]) == TD__PRESENT)
            td__endpoint_wake_rank(comm->endpoint, comm->world_ranks[i], deadline);
}

/* After a failed call: publishes the failure in the shared memory of this host, and sends it to the other hosts. */
static void publish_failure(struct td__native *native, const struct td__operation *operation,
                            td_status status)
{
    struct td__error error;
    td__error_save(&error);
    if (native->comm)
        td__shm_break(native->comm, status);
    td__tcp_comm_fail(native->rail, operation, status);
    td__tcp_comm_fail(native->sockets, operation, status);
    if (native->comm && native->sockets && td__shm_failed_first(native->comm))
        wake_members(native);
    if (native->comm)
        td__shm_await_writers(native->comm);
    td__error_restore(&error);
}

/* An all_to_all in place runs on a copy of its input. */
static td_status in_place_all_to_all(struct td__native *native, struct td__operation *operation)
{
    size_t bytes = operation->call.count * td__operation_element(operation) *
                   (size_t)native->group->size;
    operation->copy = td_alloc(bytes);
    if (!operation->copy)
        return TD_ERR_NOMEM;
    memcpy(operation->copy, operation->call.input, bytes);
    operation->call.input = operation->copy;
    td_status status = run_on_transport(native, operation);
    operation->call.input = operation->call.output;
    return status;
}

/* Whether a rank that has completed the call has received data of all others, directly or through others. Then all
 * calls were the same, since each receiver compares headers. */
static bool receives_from_all(const td_group *group, const struct td__operation *operation)
{
    switch (operation->call.kind) {
    case TD_OP_BARRIER:
        return true;
    case TD_OP_REDUCE:
    case TD_OP_GATHER:
        return operation->call.count && operation->called_root == group->rank;
    case TD_OP_BROADCAST:
    case TD_OP_SCATTER:
        return false;
    default:
        return operation->call.count; /* 0 for an uneven all_to_all: each rank has other counts */
    }
}

static td_status run_in_host_memory(void *arg, struct td__operation *operation)
{
    struct td__native *native = arg;
    const td_call *call = &operation->call;
    if (call->kind == TD_OP_ALL_TO_ALL && call->input == call->output && call->count &&
        native->group->size > 1)
        return in_place_all_to_all(native, operation);
    return run_on_transport(native, operation);
}

static inline td_status run_operation(struct td__native *native, struct td__operation *operation)
{
    const td_call *call = &operation->call;
    struct td__staged_call *stage = NULL;
    operation->called_root = call->root;
    operation->past = 0;
    operation->copy = NULL;
    operation->deadline = native->sockets ? td__deadline_in_ms(call->timeout_ms) : 0;
    operation->group = native->group->name;
    operation->parts = native->group->size;
    td_status status;
    if (native->history)
        td__call_history_note(native->history, operation);
    if (call->device)
        status = td__staged_call_run(native->part, operation, run_in_host_memory, native, &stage);
    else
        status = run_in_host_memory(native, operation);
    if (status == TD_ERR_PEER)
        status = cause_of(native, operation);
    if (status)
        publish_failure(native, operation, status);
    else if (native->history)
        td__call_history_end(native->history, operation,
                             receives_from_all(native->group, operation));
    if (operation->copy)
        td_free(operation->copy);
    td__staged_call_free(stage);
    return status;
}

/* In a copy: other threads read the call of a work. */
static td_status run_on_device(struct td__native *native, const struct td__operation *operation)
{
    struct td__operation staged = *operation;
    staged.call.detail = td__staged_detail(&operation->call);
    return run_operation(native, &staged);
}

static td_status run(void *self, const td_call *call)
{
    struct td__operation *operation = TD__CONTAINER(call, struct td__operation, call);
    return call->device ? run_on_device(self, operation) : run_operation(self, operation);
}

static td_status verify(void *self, int64_t timeout_ms)
{
    struct td__native *native = self;
    td_group *group = native->group;
    td__deadline deadline = td__deadline_in_ms(timeout_ms == TD_NOW ? 0 : timeout_ms);
    struct td__operation last = {.call.kind = TD_OP_BARRIER,
                                 .call.root = -1,
                                 .called_root = -1,
                                 .call.sequence = group->sequence,
                                 .deadline = deadline,
                                 .group = group->name};
    if (group->size == 1 || !group->sequence)
        return TD_OK;
    td_status status = native->history ? td__call_history_verify(native->history, group, &last)
                                       : td__shm_verify(native->comm, group->name, deadline);
    if (status == TD_ERR_MISMATCH) {
        td__group_break(group, status);
        publish_failure(native, &last, status);
        return status;
    }
    status = check_links(native, &last);
    if (!status && native->comm)
        status = td__shm_state(native->comm);
    if (status == TD_ERR_MISMATCH && native->comm)
        td__shm_break(native->comm, status); /* other ranks of this host may not have received it */
    return status == TD_ERR_MISMATCH ? status : TD_OK;
}

/* A send on host memory must not overtake one on a device. */
static void keep_order(struct td__native *native, const td_call *call)
{
    if (call->kind == TD_OP_SEND && !call->device &&
        atomic_load_explicit(&native->messages.unposted, memory_order_acquire))
        td__staged_flush(&native->messages);
}

static td_status post(void *self, const td_call *call, td_work *work)
{
    struct td__native *native = self;
    if (!native->p2p)
        return fail_alone(native, call);
    keep_order(native, call);
    return call->device ? td__staged_post(&native->messages, call, work)
                        : td__p2p_post(native->p2p, call, work, &work->complete, NULL);
}

static td_status run_message(void *self, const td_call *call)
{
    struct td__native *native = self;
    if (!native->p2p)
        return fail_alone(native, call);
    keep_order(native, call);
    return call->device ? td__staged_run(&native->messages, call)
                        : td__p2p_run(native->p2p, call, NULL, NULL);
}

static void progress(void *self, td_work *work, int64_t timeout_ms)
{
    struct td__native *native = self;
    td__deadline deadline = td__deadline_in_ms(timeout_ms == TD_NOW ? 0 : timeout_ms);
    bool staged = work->operation.call.device;
    const td_work *waits_for = staged ? td__work_await_staged(work, deadline) : work;
    if (!waits_for)
        return;
    td__p2p_progress(native->p2p, &waits_for->complete, work->operation.call.peer,
                     timeout_ms == TD_NOW ? 0 : timeout_ms);
    if (staged && atomic_load(&waits_for->complete))
        td__work_await(work, deadline); /* the thread of the sends completes it */
}

/* It stages what is not in host memory. */
static const char *const any_device[] = {"*", NULL};

static const td_backend_ops native_ops = {
    .create = create,
    .destroy = destroy,
    .broadcast = run,
    .reduce = run,
    .all_reduce = run,
    .scatter = run,
    .gather = run,
    .all_gather = run,
    .reduce_scatter = run,
    .all_to_all = run,
    .barrier = run,
    .post = post,
    .progress = progress,
    .abort = abort_group,
    .run_message = run_message,
    .verify = verify,
    .has_left = has_left,
    .fills_host = fills_host,
    .explains_timeouts = true,
    .has_uneven = true,
    .devices = any_device,
};

struct td__shm_comm *td__native_comm(const td_group *group)
{
    struct td__part *part = td__next_part(group, NULL);
    while (part && part->ops != &native_ops)
        part = td__next_part(group, part);
    return part ? ((const struct td__native *)part->self)->comm : NULL;
}

struct td__backend td__builtin_backends[] = {
    {&td__builtin_backends[1], &native_ops, NULL, "native", "native"},
    {&td__builtin_backends[2], &native_ops, NULL, "native", "gloo"},
    {NULL, &native_ops, NULL, "tcp", "tcp"},
};
