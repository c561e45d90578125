/* Socket communicators; see tcp_comm.h.
 *
 * A comm keeps links, scratch memory and the last compiled schedules from call to call, so that a short call
 * builds and allocates nothing. After a failure every further call fails with the same status and text. */
#include "tcp/tcp_comm.h"

#include "base/fail.h"
#include "tcp/tcp_layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEPT_BYTES = 64 << 20, /* scratch memory that is kept between calls, at most */
    NOTIFY_MS = 500,       /* the longest time in which td__tcp_comm_fail() notifies all members */
};

/* ---- Links from an endpoint ------------------------------------------------------------------ */

static td_status connect_to_rank(void *arg, int peer, bool briefly, td__deadline deadline, int *fd)
{
    struct td__tcp_comm *comm = arg;
    return (briefly ? td__endpoint_connect_briefly : td__endpoint_connect)(
        comm->endpoint, comm->world_ranks[peer], comm->key, TD__CHANNEL_COLLECTIVE, deadline, fd);
}

static td_status accept_from_rank(void *arg, int peer, int *fd)
{
    struct td__tcp_comm *comm = arg;
    return td__endpoint_accept(comm->endpoint, comm->world_ranks[peer], comm->key,
                               TD__CHANNEL_COLLECTIVE, 0, fd);
}

static const char *describe_rank(void *arg, int peer)
{
    struct td__tcp_comm *comm = arg;
    return td__endpoint_describe(comm->endpoint, comm->world_ranks[peer]);
}

static void listen_for_late_links(void *arg, td__link_fn fn, void *fn_arg)
{
    struct td__tcp_comm *comm = arg;
    td__endpoint_listen(comm->endpoint, comm->key, TD__CHANNEL_COLLECTIVE, fn, fn_arg);
}

static const char *exit_reason_of_rank(void *arg, int peer, bool watch)
{
    struct td__tcp_comm *comm = arg;
    if (watch)
        td__endpoint_watch(comm->endpoint, comm->world_ranks[peer]);
    return td__endpoint_exit_reason(comm->endpoint, comm->world_ranks[peer]);
}

static bool rank_is_unresponsive(void *arg, int peer, bool note)
{
    struct td__tcp_comm *comm = arg;
    return td__endpoint_is_unresponsive(comm->endpoint, comm->world_ranks[peer], note);
}

static const struct td__link_source endpoint_source = {
    .connect = connect_to_rank,
    .accept = accept_from_rank,
    .describe = describe_rank,
    .listen = listen_for_late_links,
    .exit_reason = exit_reason_of_rank,
    .is_unresponsive = rank_is_unresponsive,
};

/* ---- Creating and destroying ----------------------------------------------------------------- */

td_status td__tcp_comm_create_over(const struct td__link_source *source, void *arg, int size,
                                   int index, const char *algorithm, struct td__tcp_comm **comm_out)
{
    struct td__tcp_comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return td__fail_nomem("socket comm");
    comm->size = size;
    comm->index = index;
    comm->world_ranks = calloc((size_t)size, sizeof *comm->world_ranks);
    comm->bounds = calloc(3 * ((size_t)size + 1), sizeof *comm->bounds);
    bool linked = td__links_init(&comm->links, source, arg ? arg : comm, size, index);
    if (!comm->world_ranks || !comm->bounds || !linked) {
        td__tcp_comm_destroy(comm);
        return td__fail_nomem("socket comm");
    }
    comm->links.world_ranks = comm->world_ranks;
    for (int kind = 0; algorithm && kind < TD__COLLECTIVES; kind++) {
        const struct td__algorithm *found = td__algorithm_find(kind, algorithm);
        comm->forced[kind] = found ? found->name : NULL;
    }
    *comm_out = comm;
    return TD_OK;
}

static void wake(void *arg)
{
    td__tcp_comm_wake(arg);
}

td_status td__tcp_comm_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                              int size, int index, const char *algorithm,
                              struct td__tcp_comm **comm_out)
{
    struct td__tcp_comm *comm;
    TD_TRY(td__tcp_comm_create_over(&endpoint_source, NULL, size, index, algorithm, &comm));
    comm->endpoint = endpoint;
    comm->key = key;
    memcpy(comm->world_ranks, world_ranks, (size_t)size * sizeof *world_ranks);
    comm->waiter = (struct td__endpoint_waiter){.wake = wake, .arg = comm};
    td__endpoint_add_waiter(endpoint, &comm->waiter);
    *comm_out = comm;
    return TD_OK;
}

void td__tcp_comm_destroy(struct td__tcp_comm *comm)
{
    if (!comm)
        return;
    if (comm->endpoint)
        td__endpoint_remove_waiter(comm->endpoint, &comm->waiter);
    td__links_free(&comm->links);
    td__executor_free(&comm->executor);
    for (int i = 0; i < TD__CACHED_SCHEDULES; i++)
        td__compiled_schedule_destroy(comm->schedules[i].compiled);
    free(comm->world_ranks);
    free(comm->scratch);
    free(comm->bounds);
    free(comm->reason);
    free(comm);
}

/* ---- Schedules and memory -------------------------------------------------------------------- */

/* The compiled schedule of a call: a cached one, or a new one that replaces the least recently used. NULL if out
 * of memory. */
static struct td__cached_schedule *find_schedule(struct td__tcp_comm *comm, td_op_kind kind,
                                                 const char *algorithm, int root)
{
    struct td__cached_schedule *oldest = comm->schedules;
    for (struct td__cached_schedule *at = comm->schedules;
         at < comm->schedules + TD__CACHED_SCHEDULES; at++) {
        if (at->compiled && at->kind == kind && at->algorithm == algorithm && at->root == root)
            return at;
        if (at->used < oldest->used)
            oldest = at;
    }
    const struct td__algorithm *found = td__algorithm_find(kind, algorithm);
    struct td__plan plan = {.rank = comm->index, .size = comm->size, .root = root};
    struct td__compiled_schedule *compiled = td__compiled_schedule_create(found, &plan);
    if (!compiled)
        return NULL;
    td__compiled_schedule_destroy(oldest->compiled);
    *oldest = (struct td__cached_schedule){.kind = kind,
                                           .algorithm = algorithm,
                                           .root = root,
                                           .number = (int)(found - td__algorithms),
                                           .compiled = compiled};
    return oldest;
}

/* Returns a name of td__algorithms itself, so that find_schedule() can compare addresses. */
static const char *choose_algorithm(const struct td__tcp_comm *comm,
                                    const struct td__operation *operation, size_t bytes)
{
    td_op_kind kind = operation->call.kind;
    const char *forced = comm->forced[kind];
    const size_t *counts = operation->call.input_counts;
    if (forced && !(counts && kind == TD_OP_ALL_TO_ALL && !strcmp(forced, "bruck")))
        return forced;
    if (!counts)
        return td__select(kind, comm->size, bytes);
    size_t element = operation->call.count ? bytes / operation->call.count : 0;
    return td__select_uneven(kind, comm->size, bytes,
                             td__largest_count(counts, comm->size) * element);
}

td_status td__tcp_comm_begin(struct td__tcp_comm *comm, const struct td__operation *operation,
                             size_t bytes, struct td__run *run)
{
    td_op_kind kind = operation->call.kind;
    bool rooted = kind == TD_OP_BROADCAST || kind == TD_OP_REDUCE || kind == TD_OP_SCATTER ||
                  kind == TD_OP_GATHER;
    const char *algorithm = choose_algorithm(comm, operation, bytes);
    struct td__cached_schedule *cached = find_schedule(comm, kind, algorithm,
                                                       rooted ? operation->call.root : 0);
    if (!cached)
        return td__fail_nomem(td__operation_describe(operation));
    cached->used = ++comm->turn;
    *run = (struct td__run){
        .compiled = cached->compiled,
        .call = {.links = &comm->links,
                 .operation = operation,
                 .header = td__header_of(operation, operation->call.count, cached->number,
                                         comm->turn)},
    };
    return TD_OK;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

bool td__tcp_comm_is_broken(const struct td__tcp_comm *comm)
{
    return comm && comm->broken;
}

static td_status end_call(struct td__tcp_comm *comm, const struct td__operation *operation,
                          td_status status)
{
    if (status) {
        comm->broken = status;
        comm->reason = strdup(td__error_text());
        if (comm->reason)
            td__links_send_failure(&comm->links, operation, status, comm->reason);
    }
    if (comm->scratch_size > KEPT_BYTES) {
        free(comm->scratch);
        comm->scratch = NULL;
        comm->scratch_size = 0;
    }
    return status;
}

static td_status run_call(struct td__tcp_comm *comm, const struct td__operation *operation,
                          td_status (*run)(struct td__tcp_comm *, const struct td__operation *))
{
    struct td__operation timed = *operation;
    if (comm->broken)
        return td_fail(comm->broken, "%s", comm->reason ? comm->reason : "the group has failed");
    timed.deadline = td__operation_deadline(operation);
    return end_call(comm, &timed, run(comm, &timed));
}

td_status td__tcp_comm_run(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    return run_call(comm, operation, td__tcp_layout_run);
}

td_status td__tcp_comm_combine(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    return run_call(comm, operation, td__tcp_layout_combine);
}

void td__tcp_comm_fail(struct td__tcp_comm *comm, const struct td__operation *operation,
                       td_status status)
{
    struct td__error error;
    if (!comm || comm->broken)
        return;
    td__error_save(&error);
    end_call(comm, operation, status);
    td__links_send_failure_to_all(&comm->links, td__deadline_in_ms(NOTIFY_MS));
    td__error_restore(&error);
}

void td__tcp_comm_set_callbacks(struct td__tcp_comm *comm,
                                const struct td__comm_callbacks *callbacks)
{
    if (comm)
        comm->links.callbacks = *callbacks;
}

void td__tcp_comm_wake(struct td__tcp_comm *comm)
{
    td__links_wake(&comm->links);
}

void td__tcp_comm_watch_links(struct td__tcp_comm *comm)
{
    int fd = comm ? td__links_watch(&comm->links) : -1;
    if (fd >= 0)
        td__endpoint_wake_on(comm->endpoint, fd);
}

td_status td__tcp_comm_check(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    return !comm || comm->broken ? TD_OK : td__links_check_failures(&comm->links, operation);
}
