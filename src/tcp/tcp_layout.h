/* The inside of a socket comm, and where the data of each operation are for its schedule. */
#ifndef TD_TCP_TCP_LAYOUT_H
#define TD_TCP_TCP_LAYOUT_H

#include "tcp/executor.h"
#include "tcp/tcp_comm.h"

enum { TD__CACHED_SCHEDULES = 32 };

/* A compiled schedule, kept for the next call of its kind. */
struct td__cached_schedule {
    td_op_kind kind;
    const char *algorithm;
    int root;
    int number;    /* of the algorithm in td__algorithms */
    uint64_t used; /* the turn */
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
    const char *forced[TD__COLLECTIVES]; /* algorithms that were asked for, or NULL */
    struct td__cached_schedule schedules[TD__CACHED_SCHEDULES];
    uint64_t turn; /* counts the calls; the same on all members */
    char *scratch;
    size_t scratch_size;
    size_t *bounds; /* 3 * (size + 1): where the parts of the call at hand begin and end */
    td_status broken;
    char *reason;

    /** See td__tcp_comm_watch(); `arg` is that of the links' outside(). */
    td_status (*recall)(void *arg, int world_rank, const struct td__operation *operation);
};

/** A comm whose links come from somewhere else than an endpoint; `source` must stay. */
td_status td__tcp_comm_create_over(const struct td__link_source *source, void *arg, int size,
                                   int index, const char *algorithm, struct td__tcp_comm **comm);

/** Begins a turn: chooses the algorithm of `kind` for a vector of `bytes` bytes, and fills in the
 *  compiled schedule and the header of `run`. `count` is the one of the call. */
td_status td__tcp_comm_begin(struct td__tcp_comm *comm, const struct td__operation *operation,
                             td_op_kind kind, size_t count, size_t bytes, struct td__run *run);

/** Memory of the comm's own, at least `size` bytes, aligned to 64; the same until the next call. */
td_status td__tcp_comm_scratch(struct td__tcp_comm *comm, const struct td__operation *operation,
                               size_t size, char **memory);

/** Carries out an operation whose arguments have been checked. */
td_status td__tcp_layout_run(struct td__tcp_comm *comm, const struct td__operation *operation);

/** td__tcp_comm_combine() without its checks. */
td_status td__tcp_layout_combine(struct td__tcp_comm *comm, const struct td__operation *operation,
                                 void *data, size_t count);

#endif
