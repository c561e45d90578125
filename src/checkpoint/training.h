/* Checkpoints of training, and the coordination of the ranks. Only rank 0 of the group accesses
 * files. */
#ifndef TD_CHECKPOINT_TRAINING_H
#define TD_CHECKPOINT_TRAINING_H

#include "checkpoint/safetensors.h"

/* ---- Coordination (checkpoint_coordinator.c) ------------------------------------------------------------ */

struct td__coordinator {
    td_group *group;
    bool alone; /* one rank: no communication */
    int rank, size;
    int root; /* rank 0 of the group, as a rank of the world */
};

td_status td__coordinator_of(const char *call, td_group *group,
                             struct td__coordinator *coordinator);

/** Broadcasts the status of rank 0 and its error. */
td_status td__coordinator_follow(const struct td__coordinator *coordinator, td_status mine);

/** TD_OK if all ranks passed that; otherwise, on all ranks, the first other status, with its error
 *  and its rank. */
td_status td__coordinator_agree(const struct td__coordinator *coordinator, td_status mine);

/** Gathers `mine` of rank r to all[r] on rank 0, for td__coordinator_free(); the others get
 *  NULL. */
td_status td__coordinator_gather(const struct td__coordinator *coordinator,
                                 const struct td__buffer *mine, td_bytes **all);
void td__coordinator_free(const struct td__coordinator *coordinator, td_bytes *all);

/** Broadcasts the state of rank 0, whose `state` becomes its result. The others pass NULL. */
td_status td__coordinator_share(const char *call, const struct td__coordinator *coordinator,
                                td_state *state, td_state **result);

/* ---- Contents (training_state.c) ------------------------------------------------------------------ */

/** A rank's own part: the state of its generator and the position of its sampler, or its error. */
td_status td__training_pack(const char *call, const td_training *training, struct td__buffer *own);

/** The whole checkpoint as one state, with the packed parts of all ranks. */
td_status td__training_collect(const char *call, const td_training *training, const td_bytes *all,
                               int size, td_state **state);

/** Loads the parts of `state`. On failure nothing was changed; on success *undo is for
 *  td__training_undo(), which restores the former values, and for td__undo_free(). */
struct td__undo;
td_status td__training_apply(const char *call, td_training *training, const td_state *state,
                             const struct td__coordinator *coordinator, struct td__undo **undo);
void td__training_undo(td_training *training, struct td__undo *undo);
void td__undo_free(struct td__undo *undo);

/* ---- One file (training.c) ------------------------------------------------------------------------ */

/** Saving, all ranks: gathers their own parts on rank 0. */
td_status td__training_gather(const char *call, const td_training *training,
                              struct td__coordinator *coordinator, td_bytes **all);
/** Saving, rank 0: writes the file. */
td_status td__training_write(const char *call, const char *path, const td_training *training,
                             const td_bytes *all, int size);
/** Loading, rank 0: reads the file. */
td_status td__training_read(const char *call, const char *path, td_state **state);
/** Loading, all ranks: `status` and `state` are those of rank 0. */
td_status td__training_receive(const char *call, const struct td__coordinator *coordinator,
                               td_status status, td_state *state, td_training *training);

#endif
