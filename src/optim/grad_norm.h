/* The norm of gradients, of which some may be shards: the same bits however they are divided (tensor/norm_tree.h). */
#ifndef TD_OPTIM_GRAD_NORM_H
#define TD_OPTIM_GRAD_NORM_H

#include "optim/optimizer.h"

/** *total: one f64 element with the norm of all gradients of `parameters`, which are in `grads`; on the host, or on the
 *  one accelerator where all of them are, or on one of several, for which the host does not wait then. Collective for the
 *  ranks of shards. */
td_status td__grad_norm(td_tensor *const *parameters, int count, struct td__grads *grads,
                        double power, td_tensor **total);

/* ---- Pieces: tensors whose sums the host wants to know (grad_norm.c) ----------------------------------------- */

struct td__norm_pieces {
    struct td__norm_piece {
        td_tensor *tensor; /* retained */
        double *sum;
    } * list;
    int count, capacity;
};

/** Takes `tensor` over, in any case; NULL is a failure whose sentence was written. */
td_status td__add_piece(struct td__norm_pieces *pieces, td_tensor *tensor, double *sum);

/* ---- Shards (shard_norm.c) ------------------------------------------------------------------------------------ */

struct td__shard_norms;

/** Adds the complete nodes of the shards of this rank to `pieces`. *norms is NULL where there is no shard. On failure it
 *  is NULL before anything was told to other ranks, and td__shard_norms_end() may still tell them otherwise. */
td_status td__shard_norms_begin(td_tensor *const *parameters, int count,
                                struct td__norm_pieces *pieces, struct td__shard_norms **norms);

/** Exchanges the sums of the nodes with the other ranks: sums[i] gets that of parameter i, if it is a shard, and 0 if it
 *  has no gradient. A failure so far is `status`, of which all ranks learn. Frees *norms. */
td_status td__shard_norms_end(struct td__shard_norms *norms, td_status status, bool greatest,
                              double *sums);

#endif
