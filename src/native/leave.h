/* Leaving a host's shared memory in order: what the native backend keeps with a root when its groups are gone. */
#ifndef TD_NATIVE_LEAVE_H
#define TD_NATIVE_LEAVE_H

#include "group/process_group.h"
#include "shm/shm_comm.h"

/** Makes what is kept with `root`, where it is not there yet. Before the root's first communicator. */
td_status td__leave_prepare(struct td__root *root);

/** The group of `comm` is destroyed: the root keeps the memory for members that have not mapped it yet, where
 *  this rank is the one that they ask for it. */
void td__leave_comm(struct td__root *root, struct td__shm_comm *comm);

/** The communicator of a group; NULL where it has another backend, or no other rank on this host. native.c */
struct td__shm_comm *td__native_comm(const td_group *group);

#endif
