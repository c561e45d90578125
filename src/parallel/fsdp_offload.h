/* Shards that do not live on the device of the passes: in host memory, or in a file.
 *
 *     the device              staging (pinned)                      the host
 *     whole parameters   <-   a unit in the dtype of passes    <-   shards
 *     reduced gradients  ->   a unit in that of the reduction  ->   gradients of shards, state of the optimizer
 *
 * Copies run on two streams of their own, one for each direction, and two threads of the model work for them. One
 * converts the parameters of the next unit. The other one adds up gradients and steps them where
 * td_optimizer_in_backward() has it. At the end of a backward pass all of that is done.
 *
 * Staging is used for one gather, and one reduction; nothing of a unit stays there. */
#ifndef TD_PARALLEL_FSDP_OFFLOAD_H
#define TD_PARALLEL_FSDP_OFFLOAD_H

#include "parallel/fsdp_internal.h"

/* What is left of the memory of each tier while flats are placed, one after another. */
struct td__tiers {
    const td_fsdp_offload *options;
    size_t device, host;
    uint64_t placement; /* a hash of the homes */
};

void td__tiers_init(struct td__tiers *tiers, const td_fsdp_offload *options);

/** Chooses the home of a flat that is laid out: sets flat->home, flat->in_file and flat->is_whole. */
td_status td__offload_place(struct td__fsdp_flat *flat, struct td__tiers *tiers);

/** After the ranks have placed their flats, and after they have allocated them: fails on all of them if `status` is an
 *  error on one, or if the placements differ. Collective. */
td_status td__offload_agree(const struct td__fsdp_ranks *ranks, const struct td__tiers *tiers,
                            td_status status);

/** For a flat whose home is not its device: streams, events. */
td_status td__offload_begin(struct td__fsdp_flat *flat);
void td__offload_end(struct td__fsdp_flat *flat);

/** Starts to copy the shard to this rank's part of the whole, of which no stream but the current one knows. */
td_status td__offload_fill(struct td__fsdp_flat *flat, td_tensor *part);
/** The current stream waits for that. */
td_status td__offload_filled(struct td__fsdp_flat *flat);

/** Starts to copy reduced gradients to the host. */
td_status td__offload_send(struct td__fsdp_flat *flat, td_tensor *reduced);
/** The current stream waits for that, and the thread takes them over: td__flat_take_grads() with flat->reduced on the
 *  host. */
td_status td__offload_sent(struct td__fsdp_flat *flat);
/** Instead of that: the gradients are not taken. */
void td__offload_drop(struct td__fsdp_flat *flat);
/** Waits until the thread has done that; its error becomes the last one. */
td_status td__offload_wait(struct td__fsdp_flat *flat);
td_status td__offload_wait_all(struct td__fsdp *fsdp);

void td__offload_add_stats(const struct td__fsdp *fsdp, td_fsdp_stats *stats);
void td__offloader_free(struct td__offloader *offloader);

#endif
