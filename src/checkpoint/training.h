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

/** Another group of the same ranks; NULL for one rank. Making it sends nothing. */
td_status td__same_ranks(const char *call, const struct td__coordinator *coordinator,
                         td_group **group);

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

/** What rank 0 has read. */
struct td__checkpoint {
    td_state *state;
    td_bytes text; /* td__file_header.text */
    int parts;     /* that the state has: TD__PART_MODEL … */
};

/** Broadcasts what rank 0 has read, tensor by tensor by way of the host: *result is a state of the same tensors, on rank
 *  0 that of `read`, on others where their `training` wants them. Takes over what `read` holds. */
td_status td__coordinator_share(const char *call, const struct td__coordinator *coordinator,
                                struct td__checkpoint *read, const td_training *training,
                                td_state **result);

/* ---- Devices (training_devices.c) ------------------------------------------------------------------ */

enum {
    TD__PART_MODEL = 1,
    TD__PART_OPTIMIZER = 2,
    TD__PART_SCHEDULE = 4,
    TD__PART_SAMPLER = 8,
    TD__PART_SCALER = 16,
    TD__PART_RANDOM = 32,
};

/** The parts that are not NULL; 0 for NULL. */
int td__training_parts(const td_training *training);

/** All ranks: the parts that any of them has, on rank 0. */
td_status td__gather_parts(const struct td__coordinator *coordinator, const td_training *training,
                           int *parts);

/** Where the entries of `parts` go: model and optimizer to the devices of the training's, or where its map_location says;
 *  all that the host reads, to the host. For td__training_target_free(), also on failure. */
struct td__training_target {
    struct td__load_target load;
    const td_training *training;
    td_state *model; /* NULL: there is none */
    int parts;
};
td_status td__training_target(const td_training *training, int parts,
                              struct td__training_target *target);
void td__training_target_free(struct td__training_target *target);

/* ---- Contents (training_state.c) ------------------------------------------------------------------ */

/** A rank's own part: the state of its generator and the position of its sampler, or its error. */
td_status td__training_pack(const char *call, const td_training *training, struct td__buffer *own);

/** The whole checkpoint as one state, with the packed parts of all ranks. */
td_status td__training_collect(const char *call, const td_training *training, const td_bytes *all,
                               int size, td_state **state);

/** A rank's own entries and the parts that it has, as one state; rank 0 adds the numbers. */
td_status td__training_own(const char *call, const td_training *training, int rank, int size,
                           td_state **state);

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
/** Loading, rank 0: reads the file. `read->parts` says what of it. */
td_status td__training_read(const char *call, const char *path, struct td__training_target *target,
                            struct td__checkpoint *read);
/** Loading, all ranks: `status` and what was read are those of rank 0. */
td_status td__training_receive(const char *call, const struct td__coordinator *coordinator,
                               td_status status, struct td__checkpoint *read,
                               td_training *training);
void td__checkpoint_free(struct td__checkpoint *read);
/** Loading, all ranks: loads the parts of a state, on all ranks or on none. `status` is that of this rank so far. Takes
 *  over `state`. */
td_status td__training_finish(const char *call, const struct td__coordinator *coordinator,
                              td_status status, td_state *state, td_training *training);

#endif
