/* Tensors that are lent to other workers of this host, and borrowed from them. */
#ifndef TD_RPC_LEASE_H
#define TD_RPC_LEASE_H

#include "tensor/tensor_internal.h"

struct td__agent;

/** Lends a contiguous tensor to the worker `to`: its place in the default arena. One that is not in the arena is
 *  replaced by a copy. */
td_status td__lease_make(struct td__agent *agent, int to, td_tensor **tensor, uint64_t *lease,
                         uint64_t *offset);

/** A lease of the worker `from` has ended; ignored if there is none. */
void td__lease_end(struct td__agent *agent, int from, uint64_t lease);

/** Ends all leases of a worker that has gone; -1: of all. */
void td__lease_end_all(struct td__agent *agent, int from);

/** A tensor over the memory that `from` lends; its last release ends the lease. One reference. */
td_status td__lease_borrow(struct td__agent *agent, int from, uint64_t lease, uint64_t offset,
                           const struct td__layout *layout, td_tensor **tensor);

#endif
