/* Messages and collectives on tensors: the calls of torch.distributed.
 *
 *     td_init_process_group(NULL);
 *     td_tensor *x = td_full(TD_SHAPE(2, 3), td_get_rank(NULL), TD_F32, NULL);
 *     td_all_reduce(x, TD_SUM, NULL, NULL);
 *
 * The calls of group.h with tensors in place of buffers, and all that is said there holds here:
 * groups, order, ranks of the world, in place, errors. Names and the order of arguments are those
 * of torch.distributed; a list is followed by its length; group and work stand last.
 *
 * Tensors. Only the dtype and the number of elements count, not the shape: the elements go in the
 * order of their indices. Tensors need not be contiguous: those that are not are packed into memory
 * of the library's own first, and the results are unpacked. A list of tensors is packed too, unless
 * they follow each other in one storage, as the parts of a tensor by td_narrow() do. Objects are bytes of the host.
 *
 * Devices. Tensors may be on any device, all those of a call on one; other ranks may have theirs on another device of
 * the kind. The group's backend for that kind carries the call out (td_get_backend()). On an accelerator a call runs
 * after what is enqueued on the current stream of the device, and memory is packed and unpacked there.
 *
 * Blocking or not. With NULL for `work` a call returns when its part is done; on an accelerator when the current stream
 * is made to wait for the result. Otherwise it returns at once, the tensors are kept (their elements must be left alone)
 * until *work is complete, unpacking included, and the caller releases *work. On an accelerator, what is enqueued on the
 * current stream after td_work_wait() finds the result; td_work_synchronize() makes the host wait for it.
 *
 * Threads. As in group.h: different groups from different threads at once; collectives on one group (all but the
 * messages here, td_send_object_list() and td_recv_object_list() included) one call at a time, by any thread. A
 * tensor must not be used by two calls at once, unless both only read it. Works outlive their group and world.
 *
 * Errors. Dtypes, numbers of elements, lengths of lists and NULLs are checked before anything is
 * started: TD_ERR_INVALID names the argument. TD_ERR_STATE: there is no world, the group has ended, or this rank is
 * not in it. All others come from group.h. */
#ifndef TANDEM_DIST_H
#define TANDEM_DIST_H

#include <tandem/group.h>
#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Collectives ----------------------------------------------------------------------------- */

/** tensor of `src` -> tensor of all. */
TD_API td_status td_broadcast(td_tensor *tensor, int src, td_group *group, td_work **work);

/** Sums, multiplies, … `tensor` over all ranks, in place. */
TD_API td_status td_all_reduce(td_tensor *tensor, td_reduce_op op, td_group *group, td_work **work);

/** The same, but the result is in the tensor of `dst` only; the others' are left as they were. */
TD_API td_status td_reduce(td_tensor *tensor, int dst, td_reduce_op op, td_group *group,
                           td_work **work);

/** tensor of rank r -> tensors[r] of all, which has as many elements. Those of different ranks may differ. */
TD_API td_status td_all_gather(td_tensor *const *tensors, int count, td_tensor *tensor,
                               td_group *group, td_work **work);

/** input of rank r -> part r of the output of every rank, which has size times as many elements. */
TD_API td_status td_all_gather_into_tensor(td_tensor *output, td_tensor *input, td_group *group,
                                           td_work **work);

/** tensor of rank r -> gather_list[r] of `dst`. The others pass NULL and 0 for the list. */
TD_API td_status td_gather(td_tensor *tensor, td_tensor *const *gather_list, int count, int dst,
                           td_group *group, td_work **work);

/** scatter_list[r] of `src` -> tensor of rank r. The others pass NULL and 0 for the list. */
TD_API td_status td_scatter(td_tensor *tensor, td_tensor *const *scatter_list, int count, int src,
                            td_group *group, td_work **work);

/** The reduced input_list[r] of all -> output of rank r, which has as many elements. Those of different ranks
 *  may differ. */
TD_API td_status td_reduce_scatter(td_tensor *output, td_tensor *const *input_list, int count,
                                   td_reduce_op op, td_group *group, td_work **work);

/** The reduced parts r of all inputs -> output of rank r; an input has size times as many elements.
 */
TD_API td_status td_reduce_scatter_tensor(td_tensor *output, td_tensor *input, td_reduce_op op,
                                          td_group *group, td_work **work);

/** input_list[r] of rank s -> output_list[s] of rank r, which has as many elements. Those of
 * different pairs may differ. */
TD_API td_status td_all_to_all(td_tensor *const *output_list, int output_count,
                               td_tensor *const *input_list, int input_count, td_group *group,
                               td_work **work);

/**
 * Part r of rank s's input -> part s of rank r's output, where the parts are cut along dimension 0.
 * The split sizes are as many as the group has ranks and add up to the size of dimension 0; NULL:
 * parts of the same size. Either all ranks pass NULL for both, or none does.
 */
TD_API td_status td_all_to_all_single(td_tensor *output, td_tensor *input,
                                      const int64_t *output_split_sizes,
                                      const int64_t *input_split_sizes, td_group *group,
                                      td_work **work);

/** Returns when all ranks have called it. */
TD_API td_status td_barrier(td_group *group, td_work **work);

/** td_group_monitored_barrier(): a barrier that names the ranks that are missing. */
TD_API td_status td_monitored_barrier(td_group *group, int64_t timeout_ms, bool wait_all_ranks,
                                      int *missing, int *missing_count);

/* ---- Messages --------------------------------------------------------------------------------
 *
 * A message that has fewer elements than the receiver's tensor fills the first ones. */

/** Sends the elements of `tensor` to `dst`, a rank of the world that is in the group, with a `tag` of 0 or above.
 *  Returns when `tensor` may be written again. */
TD_API td_status td_send(td_tensor *tensor, int dst, int tag, td_group *group);

/** `src` may be TD_ANY_SOURCE, `tag` TD_ANY_TAG. *source, where not NULL, is the rank that sent it.
 */
TD_API td_status td_recv(td_tensor *tensor, int src, int tag, td_group *group, int *source);

/** The same without waiting: `tensor` is borrowed until td_work_wait() returns, and the caller releases *work. */
TD_API td_status td_isend(td_tensor *tensor, int dst, int tag, td_group *group, td_work **work);
TD_API td_status td_irecv(td_tensor *tensor, int src, int tag, td_group *group, td_work **work);

typedef enum td_p2p_kind { TD_P2P_ISEND, TD_P2P_IRECV } td_p2p_kind;

typedef struct td_p2p_op {
    td_p2p_kind kind;
    td_tensor *tensor;
    int peer; /* destination or source, a rank of the world */
    int tag;
    td_group *group;
    void *reserved[4]; /* must be zero */
} td_p2p_op;

/** Starts all of them: works[i] is that of ops[i]. All are checked before the first is started, and their groups are
 *  not destroyed in between; where one cannot be started after all, works is not set, and those before it go on by
 *  themselves. */
TD_API td_status td_batch_isend_irecv(const td_p2p_op *ops, int count, td_work **works);

/* ---- Many small tensors at once --------------------------------------------------------------
 *
 * The tensors may have different shapes and dtypes, the same on all ranks. They are packed into one
 * buffer for each dtype, and each buffer is one operation. An empty list is TD_ERR_INVALID. */

/** Every rank gets the tensors of rank `src`. */
TD_API td_status td_broadcast_coalesced(td_tensor *const *tensors, int count, int src,
                                        td_group *group, td_work **work);

/** Every rank gets the reductions over all ranks, in place. */
TD_API td_status td_all_reduce_coalesced(td_tensor *const *tensors, int count, td_reduce_op op,
                                         td_group *group, td_work **work);

/** inputs[i] of rank r -> outputs[r * input_count + i] of all. */
TD_API td_status td_all_gather_coalesced(td_tensor *const *outputs, int output_count,
                                         td_tensor *const *inputs, int input_count, td_group *group,
                                         td_work **work);

/** The reduced inputs[r * output_count + i] of all -> outputs[i] of rank r. */
TD_API td_status td_reduce_scatter_coalesced(td_tensor *const *outputs, int output_count,
                                             td_tensor *const *inputs, int input_count,
                                             td_reduce_op op, td_group *group, td_work **work);

/* ---- Objects ---------------------------------------------------------------------------------
 *
 * Byte strings, whose lengths the others need not know before. Those that a call sets belong to the
 * caller: td_bytes_free(); what stood there before is overwritten, not freed. These calls block. */

/** objects[i] of `src` -> objects[i] of the others, for each of `count`, the same on all ranks. */
TD_API td_status td_broadcast_object_list(td_bytes *objects, int count, int src, td_group *group);

/** object of rank r -> objects[r] of all. */
TD_API td_status td_all_gather_object(td_bytes *objects, int count, td_bytes object,
                                      td_group *group);

/** object of rank r -> objects[r] of `dst`. The others pass NULL and 0 for the list. */
TD_API td_status td_gather_object(td_bytes object, td_bytes *objects, int count, int dst,
                                  td_group *group);

/** objects[r] of `src` -> *object of rank r. The others pass NULL and 0 for the list. */
TD_API td_status td_scatter_object_list(td_bytes *object, const td_bytes *objects, int count,
                                        int src, td_group *group);

/** Sends `count` objects, which only td_recv_object_list() receives, with the same count: another one is
 *  TD_ERR_MISMATCH there, and the objects are lost. */
TD_API td_status td_send_object_list(const td_bytes *objects, int count, int dst, td_group *group);
TD_API td_status td_recv_object_list(td_bytes *objects, int count, int src, td_group *group,
                                     int *source);

/* ---- Scatter and gather in halves ------------------------------------------------------------
 *
 * As torch.distributed had them at first: the root calls one half, all others call the other. */

/** td_scatter() where this rank is the source: its own part goes to `tensor`. */
TD_API td_status td_scatter_send(td_tensor *const *scatter_list, int count, td_tensor *tensor,
                                 td_group *group);
TD_API td_status td_scatter_recv(td_tensor *tensor, int src, td_group *group);

/** td_gather() where this rank is the destination: its own part is `tensor`. */
TD_API td_status td_gather_recv(td_tensor *const *gather_list, int count, td_tensor *tensor,
                                td_group *group);
TD_API td_status td_gather_send(td_tensor *tensor, int dst, td_group *group);

#ifdef __cplusplus
}
#endif

#endif
