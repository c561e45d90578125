/* Copies of the shards of a model and of its optimizer's state, from which the other ranks go on when one dies.
 *
 * A step of the optimizer changes shards, which perhaps no other rank has. The protocol around it:
 *
 *     forward, backward     td__mirror_commit() of the step before copies in the background meanwhile: nothing else writes
 *     agreement             all ranks have reduced their gradients, and td__mirror_wait() has returned TD_OK on all
 *     update                each rank steps its shards
 *     td__mirror_commit()   the state after the update is copied next
 *
 * So in an update the state before it is complete in the mirrors of all ranks. When a rank dies, whenever that is, all go back
 * to the newest state that every survivor's mirror has and of which the rest can be found, see td__fsdp_reshard(): that of the
 * last update, or, if a rank died while it was copied, the one before. What is computed again has the same bits.
 *
 * The alternative is to go forward: to keep the reduced gradients, and to step the dead rank's shards for it. That needs a
 * mirror of the gradients too (4 bytes a parameter more in f32), before the agreement and so in the way of the step, and still
 * the state before the update, since it is not known how far the dead rank had come. Going back needs neither.
 *
 * Two buffers: the copy overwrites the older one. They cost each rank twice its shards and state, with Adam in f32 24 bytes for
 * each element of its shards, beside the 16 that these and their gradients have. They are memory that the ranks of the host map,
 * and that outlives its process. Frozen parameters are copied when they have changed.
 *
 * Which rank mirrors what, for strategies by which several ranks have the same shard:
 *
 *                      TD_HYBRID_SHARD    TD_NO_SHARD    TD_FULL_SHARD
 *     host a  rank 0   | # # . . |        | # # . . |    | # . . . |  kept by rank 2
 *             rank 1   | . . # # |        | . . # # |    | . # . . |  kept by rank 2
 *     host b  rank 2   | # # . . |        | # # . . |    | . . # . |  kept by rank 0
 *             rank 3   | . . # # |        | . . # # |    | . . . # |  kept by rank 0
 *
 * The ranks of a host that have the same shard mirror a part of it each. A shard that only one of several hosts has is kept
 * on another one, too, by the next rank there, as messages bring it: 24 bytes more. So each element is once on each host that
 * has it, and on two hosts at least.
 *
 * Shards on an accelerator are copied by a stream of its own to the same memory of the host, beside what is computed
 * (fsdp_copies.h). Where shards are offloaded to files, mirrors are in files of that directory, too. */
#ifndef TD_PARALLEL_FSDP_MIRROR_H
#define TD_PARALLEL_FSDP_MIRROR_H

#include "parallel/fsdp_internal.h"

#include <tandem/optim.h>

enum {
    TD__MIRROR_SLOTS = 2,
    TD__MIRROR_PLANES = 4 /* a shard, and up to 3 buffers of the optimizer */
};

struct td__mirror;

/** For a module of td_fsdp(), all of whose sharded parameters the optimizer has that are not frozen. It has no copy yet.
 *  Collective. TD_ERR_UNSUPPORTED: its units are of several calls of td_fsdp(). */
td_status td__mirror_create(td_module *module, td_optimizer *optimizer, struct td__mirror **mirror);

/** Starts to copy what the model and the optimizer are after `step` steps, at least 0: on accelerators, when the current streams
 *  have run what is enqueued by now. Waits for the copy before. Until td__mirror_wait() neither may be changed, but for the
 *  buffers of the module. Collective where it has buffers, which rank 0 broadcasts. */
td_status td__mirror_commit(struct td__mirror *mirror, int64_t step);

/** Waits until the last copy is complete, here and on the rank that keeps it. On accelerators it is an error, too, if the group
 *  has broken meanwhile: what they have run may have been garbage. */
td_status td__mirror_wait(struct td__mirror *mirror);

/** Ends copies that wait for another rank, here and there, as td_group_abort() does. What this rank copies itself goes on. NULL is
 *  ignored. */
void td__mirror_abort(struct td__mirror *mirror);

/** How long copies have taken in the background so far, and of that how long td__mirror_wait() and td__mirror_commit() have
 *  waited. */
void td__mirror_times(const struct td__mirror *mirror, int64_t *copy_ns, int64_t *wait_ns);

/** NULL is ignored. Not collective. The module, its groups and the optimizer are alive, or td__mirror_wait() has returned. */
void td__mirror_free(struct td__mirror *mirror);

/**
 * Divides the model anew among the ranks of `group`, in place: the tensors, the module and the optimizer stay, with the bits
 * that they had after *step steps, the newest state that the mirrors of these ranks have whole. Where TD_HYBRID_SHARD cannot
 * divide it among these ranks (td__fsdp_is_even()), it is as with TD_FULL_SHARD, until it can again. Slices are dealt out anew.
 * Collective on `group`: survivors, with the mirror of the former group, and newcomers, which have the same model, made by
 * td_fsdp() with the same options for a group of this rank alone, an optimizer that has made no step, and NULL.
 *
 * When it fails it can be called again, with the same mirror and another group. Afterwards the mirror is of no use but to be
 * freed: a new one is made for the new group.
 *
 * Errors: TD_ERR_PEER: no rank has what one that has died had. TD_ERR_MISMATCH: a newcomer has another model.
 */
td_status td__fsdp_reshard(td_module *module, td_optimizer *optimizer, td_group *group,
                           struct td__mirror *mirror, int64_t *step);

/** The same without anything to begin with, where no mirror has all of it: of the parameters no shard has a value, and the
 *  optimizer has no state. A checkpoint is loaded next. Collective. */
td_status td__fsdp_reshard_blank(td_module *module, td_optimizer *optimizer, td_group *group);

/* ---- Layouts (fsdp_mirror_layout.c) ----------------------------------------------------------------- */

/* What a rank has a copy of: a part of the shard with this number. */
struct td__mirror_place {
    int32_t shard, part, parts;
};

/* Where the bytes of a flat begin in each plane of the slot of a rank. */
struct td__mirror_layout {
    int size;                              /* ranks */
    const struct td__mirror_place *places; /* of each rank */
    int flat_count;
    struct td__fsdp_flat **flats; /* in the order of the units */
    int64_t **cuts;               /* of each flat, the number of shards + 1 */
};

/** For flats that are cut into `shards`; `places`, of `size` ranks, outlive it. td__mirror_layout_free() also after a failure. */
td_status td__mirror_lay_out(struct td__fsdp *fsdp, const struct td__mirror_place *places, int size,
                             int shards, struct td__mirror_layout *layout);
void td__mirror_layout_free(struct td__mirror_layout *layout);
/** The elements of a flat that a rank has, from *first on; returns how many. */
int64_t td__mirror_range(const struct td__mirror_layout *layout, int rank, int flat,
                         int64_t *first);
/** The offset of a flat in the slot of a rank, with flat = flat_count the bytes of a plane. */
size_t td__mirror_offset(const struct td__mirror_layout *layout, int rank, int plane, int flat);
/** How many planes a flat has, of `planes`. */
static inline int td__mirror_planes(const struct td__fsdp_flat *flat, int planes)
{
    return flat->requires_grad ? planes : 1;
}

/* ---- What is not divided (fsdp_mirror_rest.c) --------------------------------------------------------- */

struct td__copies;

/** The state of the optimizer but for its buffers, and the buffers of the module, as bytes. Those of an accelerator are copied
 *  to `snapshots`, one for each buffer (NULL: not made yet), and `copies` gets what brings them to the bytes. */
td_status td__mirror_pack_rest(const struct td__fsdp *fsdp, const td_optimizer *optimizer,
                               int planes, td_tensor **snapshots, struct td__copies *copies,
                               td_bytes *rest);
/** Sets it. *planes: how many there are. */
td_status td__mirror_set_rest(struct td__fsdp *fsdp, td_optimizer *optimizer, td_bytes rest);
td_status td__mirror_read_planes(td_bytes rest, int *planes);
/** How many planes an optimizer has by now: one more than the buffers of its parameters. */
int td__mirror_count_planes(const td_optimizer *optimizer);
/** What an optimizer has of a parameter; NULL: nothing. */
struct td__parameter *td__mirror_parameter(const td_optimizer *optimizer, const td_tensor *tensor);

/* ---- Between fsdp_mirror.c and fsdp_reshard.c ------------------------------------------------------- */

/** The layout of the former ranks, the rank of this one among them, and into how many shards the flats were cut. */
const struct td__mirror_layout *td__mirror_layout(const struct td__mirror *mirror);
int td__mirror_rank(const struct td__mirror *mirror);
int td__mirror_shards(const struct td__mirror *mirror);
/** The step + 1 that a slot of a rank of the former group has whole, as far as this rank can read it; 0: none. */
int64_t td__mirror_step(const struct td__mirror *mirror, int rank, int slot);
/** Its memory. */
const char *td__mirror_slot(const struct td__mirror *mirror, int rank, int slot);
/** What is not divided. */
td_bytes td__mirror_rest(const struct td__mirror *mirror, int slot);

#endif
