/* The root: what a world and all groups of its ranks share; see process_group.h. */
#ifndef TD_GROUP_ROOT_H
#define TD_GROUP_ROOT_H

#include "group/process_group.h"
#include "store/address_exchange.h"

enum { TD__ROOT_KEY = TD__EXCHANGE_KEY };

/** The key, in the root's store, that the first member of a group sets to notify a rank that rejoins that the group has
 *  grown. */
void td__grown_key(const char *name, int64_t epoch, int rank, char key[TD__ROOT_KEY]);

/** The world's root has grown: `grown` is the world from now on, and the former one is kept until the world ends.
 *  Does nothing if `root` is not the world's. */
void td__world_outgrow(struct td__root *root, td_group *grown);

/** `root` is destroyed before the world ends: removes it from the former worlds. */
void td__world_forget(const struct td__root *root);

/** td_group_open(); `world`: for td_init_process_group(). */
td_status td__root_open(td_store *store, int rank, int size, const td_group_options *options,
                        bool world, td_group **first);

/** td_group_join(); `world`: for td_init_process_group(). The component recovery, above this one, defines it. */
td_status td__root_join(td_store *store, const td_group_options *options, bool world,
                        td_group **group);

/** The members of the world of `group` admit newcomers: from now on a process that is started again for one that has ended
 *  asks to be admitted, too, and does not take that one's place by itself (td_group_grow()). Or they do not any more: those
 *  that wait fail. By one of the members. */
td_status td__root_welcome(const td_group *group, bool welcome);

/** Whether they have said the one or the other, in the store of the job: then such a process calls td__root_join(). */
td_status td__root_asks_newcomers(td_store *store, const char *name, bool *asks);

/** Checks the variables that a world needs, before any other is asked to wait for it. */
td_status td__root_check_environment(void);

/** The world that `group` belongs to, NULL: the process's; NULL (and the last error set) as td__group_enter(), but
 *  this rank need not be in the group. */
struct td__root *td__root_enter(td_group *group, const char *what);

/** Checks the options of a call on a group of `root`; NULL: of a call that opens a world. */
td_status td__check_group_options(const char *what, const td_group_options *options,
                                  const struct td__root *root);

/** Opens a root: its part of the store and its endpoint. Checked arguments. */
td_status td__root_make(td_store *store, int rank, int size, const td_group_options *options,
                        struct td__root **root);

/** When the endpoint has the cards of all ranks: makes the first group, and starts the failure detector. Frees the root
 *  on failure. */
td_status td__root_begin(struct td__root *root, td_group **first);

/** Frees a root without groups; `status` is the reason, for the recorder. */
void td__root_free(struct td__root *root, td_status status);

/* The roots of shells: `name` is the reason why they have ended. */
extern struct td__root td__ended_world, td__ended_opened;

/** Ends all groups of a root, and the root. The groups are kept as shells with the root `ended`; the first one only if
 *  the program has its handle and the process's world ends. TD_ERR_MISMATCH if the ranks of a group have made different
 *  calls; the root has ended then, too. */
td_status td__root_close(td_group *first, struct td__root *ended);

/** Ends a world that has not come about: without waiting for the others, which do not need it either. The last error stays
 *  as it was. */
void td__root_discard(td_group *first);

/** How long a rank that leaves waits for other ranks to make the calls that it has made. */
enum { TD__VERIFY_MS = 1000 };

/** Waits for all started calls, and then, at most until `deadline`, until the other ranks are known to have made the
 *  same calls. TD_ERR_MISMATCH if a rank has made another call, and no call has returned that yet. */
td_status td__group_verify(td_group *group, td__deadline deadline);

/** Makes a group of ranks of the root, which first makes that of all its ranks. `key` is a text that no other group of
 *  these ranks has, NULL: the number of groups of these ranks before. */
td_status td__group_add(struct td__root *root, const int *ranks, int count, const char *key,
                        const td_group_options *options, td_group **group);

/** Waits for all started calls, and ends the group. It is freed, or kept as a shell with the root `ended`. */
void td__group_end(td_group *group, struct td__root *ended);

void td__root_forget_names(struct td__root *root);

#endif
