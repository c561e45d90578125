/* Tensors that are lent to other workers of this host, and borrowed from them. */
#ifndef TD_RPC_LEASE_H
#define TD_RPC_LEASE_H

#include "tensor/tensor_internal.h"

struct td__rpc_agent;

/** Lends a contiguous tensor to the worker `to`: a number, and its place in the default arena. One that is not in the
 *  arena is replaced by a copy. */
td_status td__rpc_lend(struct td__rpc_agent *agent, int to, td_tensor **tensor, uint64_t *lease,
                       uint64_t *offset);

/** Whether a contiguous tensor is one that the worker `to` has lent to this one: the number, and its place in what was
 *  lent. Such a tensor is not copied when it is sent back. */
bool td__rpc_is_lent_by(struct td__rpc_agent *agent, int to, const td_tensor *tensor,
                        uint64_t *lease, uint64_t *offset);

/** The tensor that the worker `from` sends back, over the memory that was lent, with one reference. */
td_status td__rpc_take_back(struct td__rpc_agent *agent, int from, uint64_t lease, uint64_t offset,
                            const struct td__layout *layout, td_tensor **tensor);

/** The worker `from` has returned a lease; ignored if there is none. */
void td__rpc_lease_end(struct td__rpc_agent *agent, int from, uint64_t lease);

/** How many leases have not ended. */
int td__rpc_lease_count(struct td__rpc_agent *agent);

/** Ends all leases of a worker that has gone. */
void td__rpc_leases_end(struct td__rpc_agent *agent, int from);

/** Ends all leases. Unless all workers have left in order, what is lent to one that is still there stays allocated until
 *  the process ends, since its end is not noticed any more; the log says how much. */
void td__rpc_leases_close(struct td__rpc_agent *agent);

/** A tensor over the memory that `from` lends, with one reference. On failure, the lease is given back. */
td_status td__rpc_borrow(struct td__rpc_agent *agent, int from, uint64_t lease, uint64_t offset,
                         const struct td__layout *layout, td_tensor **tensor);

/** Ends a lease of the worker `from` that was not used. */
void td__rpc_give_back(struct td__rpc_agent *agent, int from, uint64_t lease);

/** Maps the memory of a worker of this host, so that borrowing does not wait for it later. */
void td__rpc_map(struct td__rpc_agent *agent, int rank);

/** The worker has gone: ends the mapping, now or with the last tensor over it. */
void td__rpc_unmap(struct td__rpc_agent *agent, int rank);

/** Gives all borrowed tensors memory of their own: before the lender may free it, and before the mapping ends. */
void td__rpc_keep_borrowed(void);

#endif
