/* Checkpoints of training: what one is made of, and how the ranks of a group agree on what came of
 * it. Rank 0 of the group is the only one that touches files. */
#ifndef TD_CHECKPOINT_TRAINING_H
#define TD_CHECKPOINT_TRAINING_H

#include "checkpoint/safetensors.h"

/* ---- Who takes part (checkpoint_coordinator.c) ------------------------------------------------------------ */

struct td__coordinator {
    td_group *group;
    bool alone; /* there is nobody to talk to */
    int rank, size;
    int root; /* rank 0 of the group, as a rank of the world */
};

td_status td__coordinator_of(const char *call, td_group *group,
                             struct td__coordinator *coordinator);

/** The status of rank 0, and its message, for all. */
td_status td__coordinator_follow(const struct td__coordinator *coordinator, td_status mine);

/** TD_OK where all have passed that; otherwise the status of the first that has not, and its message
 *  with its rank, for all. */
td_status td__coordinator_agree(const struct td__coordinator *coordinator, td_status mine);

/** What rank r has put into `mine` goes to all[r] of rank 0, for td__coordinator_free(); the others get
 *  NULL. */
td_status td__coordinator_gather(const struct td__coordinator *coordinator,
                                 const struct td__buffer *mine, td_bytes **all);
void td__coordinator_free(const struct td__coordinator *coordinator, td_bytes *all);

/** The state of rank 0, `state` (which becomes the result), for all. The others pass NULL. */
td_status td__coordinator_share(const char *call, const struct td__coordinator *coordinator,
                                td_state *state, td_state **result);

/* ---- What a checkpoint holds (training_state.c) --------------------------------------------------- */

/** What a rank knows alone: the state of its generator, and the position of its sampler; or why it
 *  cannot take part. */
td_status td__training_pack(const char *call, const td_training *training, struct td__buffer *own);

/** Everything as one state, from what all ranks have packed. */
td_status td__training_collect(const char *call, const td_training *training, const td_bytes *all,
                               int size, td_state **state);

/** Takes the parts of `state` over. Where it fails, nothing was changed; *undo, where it succeeds, is
 *  what td__training_undo() needs to change everything back, for td__undo_free(). */
struct td__undo;
td_status td__training_apply(const char *call, td_training *training, const td_state *state,
                             const struct td__coordinator *coordinator, struct td__undo **undo);
void td__training_undo(td_training *training, struct td__undo *undo);
void td__undo_free(struct td__undo *undo);

/* ---- One file (training.c) ------------------------------------------------------------------------ */

/** All ranks' part of saving: what each knows alone goes to rank 0, as td__coordinator_gather() has it. */
td_status td__training_gather(const char *call, const td_training *training,
                              struct td__coordinator *coordinator, td_bytes **all);
/** Rank 0's part of saving: everything but what the others need to hear. */
td_status td__training_write(const char *call, const char *path, const td_training *training,
                             const td_bytes *all, int size);
/** Rank 0's part of loading. */
td_status td__training_read(const char *call, const char *path, td_state **state);
/** The rest of it, for all: `status` and `state` are those of rank 0. */
td_status td__training_receive(const char *call, const struct td__coordinator *coordinator,
                               td_status status, td_state *state, td_training *training);

#endif
