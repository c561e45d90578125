/* The native backend of a group, and what it keeps with the root when the group is gone (leave.c). */
#ifndef TD_NATIVE_NATIVE_H
#define TD_NATIVE_NATIVE_H

#include "group/process_group.h"
#include "p2p/p2p.h"
#include "shm/shm_comm.h"
#include "staging/staging.h"
#include "tcp/tcp_comm.h"

struct td__native {
    struct td__part *part;
    td_group *group;
    struct td__shm_comm *comm;           /* NULL: no other member on this host */
    struct td__tcp_comm *sockets;        /* NULL: all on one host */
    struct td__hierarchy *hierarchy;     /* NULL: no host has several members, or all are on one */
    struct td__tcp_comm *rail;           /* of the hierarchy; NULL: this rank is in none */
    struct td__call_history *history;    /* the group's; NULL: all on one host */
    struct td__p2p *p2p;                 /* NULL: the group has one rank */
    unsigned losses;                     /* of the endpoint, as last looked at */
    const char *algorithm;               /* NULL: selected for each call */
    struct td__staged_messages messages; /* on devices */
    bool sockets_only;                   /* the backend "tcp", or transport=tcp */
};

/** Attaches the list of left communicators to `root`, unless it has one. Before the root's first communicator. */
td_status td__leave_prepare(struct td__root *root);

/** The group of `comm` is destroyed. If this rank shares the memory and some members have not mapped it yet, the
 *  root keeps it for them. */
void td__leave_comm(struct td__root *root, struct td__shm_comm *comm);

/** The group's communicator on this host; NULL if it has another backend, or no other rank on this host. */
struct td__shm_comm *td__native_comm(const td_group *group);

/** The cell of a member of `comm`, which may be NULL; or NULL. */
struct td__shm_cell *td__native_cell(const struct td__shm_comm *comm, int world_rank);

#endif
