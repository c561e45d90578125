/* The struct of a socket comm, and running an operation on it: its buffers as blocks of a schedule. */
#ifndef TD_TCP_TCP_LAYOUT_H
#define TD_TCP_TCP_LAYOUT_H

#include "tcp/link_io.h"
#include "tcp/tcp_comm.h"

enum { TD__CACHED_SCHEDULES = 32 };

/* An entry of the cache of compiled schedules. */
struct td__cached_schedule {
    td_op_kind kind;
    const char *algorithm;
    int root;
    int number;    /* index in td__algorithms */
    uint64_t used; /* the last turn that used it */
    struct td__compiled_schedule *compiled;
};

struct td__tcp_comm {
    struct td__links links;
    struct td__executor executor;
    struct td__endpoint *endpoint; /* NULL in tests */
    struct td__endpoint_waiter waiter;
    uint64_t key;
    int *world_ranks;
    int size, index;
    const char *forced[TD__COLLECTIVES]; /* the algorithm to use; NULL: td__select() */
    struct td__cached_schedule schedules[TD__CACHED_SCHEDULES];
    uint64_t turn; /* number of calls; the same on all members */
    char *scratch; /* of a call; kept if it is not very large */
    size_t scratch_size;
    size_t *bounds;   /* 3 * (size + 1): the bounds of the parts of the current call */
    td_status broken; /* of the first failure … */
    char *reason;     /* … and its text */
};

/** A comm without an endpoint, for tests: `source` opens its links, and must outlive it. Its `arg` is the comm if
 *  NULL is passed. */
td_status td__tcp_comm_create_over(const struct td__link_source *source, void *arg, int size,
                                   int index, const char *algorithm, struct td__tcp_comm **comm);

/** Begins a turn: selects the algorithm for a vector of `bytes` bytes, and sets the compiled schedule and the call
 *  of `run`. */
td_status td__tcp_comm_begin(struct td__tcp_comm *comm, const struct td__operation *operation,
                             size_t bytes, struct td__run *run);

/** Runs an operation whose arguments have been checked. */
td_status td__tcp_layout_run(struct td__tcp_comm *comm, const struct td__operation *operation);

/** td__tcp_comm_combine() without its checks. */
td_status td__tcp_layout_combine(struct td__tcp_comm *comm, const struct td__operation *operation);

#endif
