/* A new world of members of a group and of newcomers: what td_group_grow() and td_group_admit() share.
 *
 *     each member     a new endpoint, and its card                    td__new_world_prepare()
 *     all members     gather their cards; fail if one has none
 *     first member    has the cards of the newcomers                  td__new_world_spread()
 *     each member     has all cards, and makes the first group        td__new_world_begin()
 *
 * The members use no store for this. */
#ifndef TD_RECOVERY_NEW_WORLD_H
#define TD_RECOVERY_NEW_WORLD_H

#include "group/root.h"

enum { TD__NEW_WORLD_CARD = 1020 };

struct td__world_card {
    uint32_t size; /* 0: not known yet */
    char bytes[TD__NEW_WORLD_CARD];
};

struct td__new_world {
    const char *what;  /* the call, for texts */
    td_group *group;   /* the members */
    const int *places; /* their ranks in the new world, by index */
    struct td__root *fresh;
    int size;
    struct td__world_card *cards; /* of all ranks of the new world */
};

/** False if it is too long. */
bool td__world_card_set(struct td__world_card *card, const void *bytes, size_t size);

/** Opens a root like `old` for this member, and gathers the cards of the members: collective on them. What it has made
 *  is freed by td__new_world_free(). */
td_status td__new_world_prepare(struct td__new_world *world, const struct td__root *old, int size);

/** The first member broadcasts its status, and if that is TD_OK the cards of all ranks. */
td_status td__new_world_spread(struct td__new_world *world, td_status status);

/** Passes the cards to a new root, and makes its first group. It owns the root then, also on failure. */
td_status td__new_world_connect(struct td__root *fresh, const struct td__world_card *cards,
                                td_group **group);
td_status td__new_world_begin(struct td__new_world *world, td_group **group);

void td__new_world_free(struct td__new_world *world);

#endif
