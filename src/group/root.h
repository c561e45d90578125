/* The root: what a world and all groups of its ranks share; see process_group.h. */
#ifndef TD_GROUP_ROOT_H
#define TD_GROUP_ROOT_H

#include "group/process_group.h"

enum { TD__ROOT_KEY = 160 };

/** Where the root's store has the card of a rank for an exchange of addresses, and the number of exchanges that the
 *  rank has taken part in. */
void td__card_key(const char *name, int64_t meeting, int rank, char key[TD__ROOT_KEY]);
void td__epoch_key(const char *name, int rank, char key[TD__ROOT_KEY]);

/** The world's root has grown: `grown` is the world from now on, and the former one stays until the world
 *  ends. Does nothing where `root` is not the world's. */
void td__world_outgrow(struct td__root *root, td_group *grown);

/** The root is destroyed by itself: it is no former world any more. */
void td__world_forget(const struct td__root *root);

/** td_group_open(); `world`: for td_init_process_group(). */
td_status td__root_open(td_store *store, int rank, int size, const td_group_options *options,
                        bool world, td_group **first);

/** The key by which the first member of a group that grows lets a rank that rejoins know. */
void td__grown_key(const char *name, int64_t meeting, int rank, char key[TD__ROOT_KEY]);

/** The world that `group` belongs to, NULL: the process's; NULL (and the last error set) as td__group_enter(), but
 *  this rank need not be in the group. */
struct td__root *td__root_enter(td_group *group, const char *what);

/** Checks the options of a call on a group of `root`; NULL: of a call that opens a world. */
td_status td__check_group_options(const char *what, const td_group_options *options,
                                  const struct td__root *root);

/** Opens a root: its part of the store and its endpoint. Checked arguments. */
td_status td__root_make(td_store *store, int rank, int size, const td_group_options *options,
                        struct td__root **root);

/** Puts this rank's card into the root's store, waits for those of all others, and gives them to the
 *  endpoint. TD_ERR_PEER where a rank that had joined has ended, TD_ERR_TIMEOUT where one does not join. */
td_status td__attend(struct td__root *root);

/** Its endpoint knows all cards: makes the first group, and starts the failure detector. The root is
 *  freed where that fails. */
td_status td__root_begin(struct td__root *root, td_group **first);

/** Frees a root without groups; `status` says why it ended. */
void td__root_free(struct td__root *root, td_status status);

/* What shells have as their root: `name` says why they have ended. */
extern struct td__root td__ended_world, td__ended_opened;

/** Ends all groups of a root, and the root. The groups stay as shells with the root `ended`; the first one only where
 *  the caller has it and the process's world ends. TD_ERR_MISMATCH where the ranks of one are found to have made
 *  different calls; it has ended then, too. */
td_status td__root_close(td_group *first, struct td__root *ended);

/** How long a rank that leaves waits for others to make the calls that it has made. */
enum { TD__VERIFY_MS = 1000 };

/** Waits for what was started, and then until `deadline` at most for others to make the same calls, where
 *  they are not known to have made them. TD_ERR_MISMATCH where one has made another call, and no call has
 *  returned that yet. */
td_status td__group_verify(td_group *group, td__deadline deadline);

/** Makes a group of ranks of the root; not in its list yet. `key` is a text that no other group of these
 *  ranks has, NULL: the number of groups of these ranks before. */
td_status td__group_make(struct td__root *root, const int *ranks, int count, const char *key,
                         const td_group_options *options, td_group **group);

/** The same, and in the list. */
td_status td__group_add(struct td__root *root, const int *ranks, int count, const char *key,
                        const td_group_options *options, td_group **group);

/** Waits for what was started, and ends the group, which is in no list. It is freed, or stays as a shell with the
 *  root `ended`. */
void td__group_close(td_group *group, struct td__root *ended);

/** The same for one that is in the list. */
void td__group_end(td_group *group, struct td__root *ended);

void td__root_forget_names(struct td__root *root);

#endif
