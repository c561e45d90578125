/* The struct of a hierarchy (tcp_comm.h), for the files that implement it. */
#ifndef TD_TCP_HIERARCHY_H
#define TD_TCP_HIERARCHY_H

#include "shm/shm_comm.h"
#include "tcp/tcp_comm.h"

#define TD__BETWEEN_GRACE_NS                                                                       \
    ((int64_t)300000000) /* added to the deadline of a call between hosts */

struct td__hierarchy {
    struct td__shm_comm *comm; /* NULL: no other member on this host */
    struct td__tcp_comm *rail; /* NULL: this rank is in no rail */
    int rails;
    int rank;        /* in the group */
    int index;       /* of this rank among the members on its host: also its rail */
    int hosts, host; /* number of hosts, and the index of this one */
    int size;        /* members */
    int *host_of;    /* of each member: the index of its host */
    int *index_of;   /* of each member: its index on its host */
    int *by_host;    /* all members, those of a host together, in the order of their indices */
    int *host_start; /* of each host: where its members begin in by_host; one more at the end */
};

/* The buffers of the ranks of this host, mapped into this process. */
struct td__host_buffers {
    const void **sources;
    void **targets;
    int size;
};

/* Enclose accesses to them, as td__shm_write_begin() and td__shm_write_end() do. */
static inline td_status td__hierarchy_access(const struct td__hierarchy *hierarchy)
{
    return hierarchy->comm ? td__shm_write_begin(hierarchy->comm) : TD_OK;
}

static inline void td__hierarchy_end_access(const struct td__hierarchy *hierarchy)
{
    if (hierarchy->comm)
        td__shm_write_end(hierarchy->comm);
}

/* The call between hosts gets a later deadline: the ranks on the host of a late rank must time out first, since
 * they know which rank is late. */
static inline struct td__operation td__between_hosts(const struct td__operation *operation)
{
    struct td__operation between = *operation;
    if (between.deadline != TD__NEVER)
        between.deadline += TD__BETWEEN_GRACE_NS;
    return between;
}

/* ---- all_gather and reduce_scatter (hierarchy_parts.c) ---------------------------------------- */

/** The elements of the input and of the output of each member on this host: two numbers each. */
void td__hierarchy_extents(const struct td__hierarchy *hierarchy,
                           const struct td__operation *operation, size_t *extents);

/** The share of this rank, which is in a rail. */
td_status td__hierarchy_run_parts(struct td__hierarchy *hierarchy,
                                  const struct td__host_buffers *local,
                                  const struct td__operation *operation);

#endif
