/* What a world and all groups of its ranks have in common; see process_group.h. */
#ifndef TD_GROUP_ROOT_H
#define TD_GROUP_ROOT_H

#include "group/process_group.h"

enum { TD__ROOT_KEY = 160 };

/** Where the root's store has the card of a rank for a meeting, and how many meetings it has been to. */
void td__card_key(const char *name, int64_t meeting, int rank, char key[TD__ROOT_KEY]);
void td__epoch_key(const char *name, int rank, char key[TD__ROOT_KEY]);

/** The world's root has grown: `grown` is the world from now on, and the former one stays until the world
 *  ends. Nothing where `root` is not the world's. */
void td__world_outgrow(struct td__root *root, td_group *grown);

/** Opens a root: its part of the store and its endpoint. Checked arguments. */
td_status td__root_make(td_store *store, int rank, int size, const td_group_options *options,
                        struct td__root **root);

/** Puts this rank's card into the root's store, waits for those of all others, and gives them to the
 *  endpoint. TD_ERR_PEER where one that had come has ended, TD_ERR_TIMEOUT where one does not come. */
td_status td__attend(struct td__root *root);

/** Its endpoint knows all cards: makes the first group, and begins to look after the others. The root is
 *  freed where that fails. */
td_status td__root_begin(struct td__root *root, td_group **first);

/** Frees a root without groups; `status` says why it ended. */
void td__root_free(struct td__root *root, td_status status);

/** Ends the first group of a root, all that are left, and the root: in any case, and TD_ERR_MISMATCH where
 *  the ranks of one are found to have made different calls. */
td_status td__root_close(td_group *first);

/** How long a rank that leaves waits for others to make the calls that it has made. */
enum { TD__VERIFY_MS = 1000 };

/** Waits for what was started, and then until `deadline` at most for others to make the same calls, where
 *  they are not known to have made them. TD_ERR_MISMATCH where one has made another, and nobody was told
 *  that yet. */
td_status td__group_verify(td_group *group, td__deadline deadline);

/** Makes a group of ranks of the root; not in its list yet. `key` is a text that no other group of these
 *  ranks has, NULL: how often they were made one. */
td_status td__group_make(struct td__root *root, const int *ranks, int count, const char *key,
                         const td_group_options *options, td_group **group);

/** The same, and in the list. */
td_status td__group_add(struct td__root *root, const int *ranks, int count, const char *key,
                        const td_group_options *options, td_group **group);

/** Waits for what was started, and frees the group, which is in no list. */
void td__group_free(td_group *group);

/** The same for one that is in the list. */
void td__group_end(td_group *group);

void td__root_forget_names(struct td__root *root);

#endif
