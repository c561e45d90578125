/* Creates groups of a world's ranks: by a list, by a size, by color.
 *
 * The world is in use meanwhile (td__group_use()), so that the thread that destroys it waits until the new group is in
 * its list. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "call/operation.h"
#include "group/process_group.h"
#include "group/root.h"

#include <stdlib.h>

/* ---- Checks ---------------------------------------------------------------------------------- */

td_status td__check_group_options(const char *what, const td_group_options *options,
                                  const struct td__root *root)
{
    TD_TRY(td__check_kept_timeout(what, "timeout_ms", options->timeout_ms));
    TD_TRY(td__check_reserved(what, options->reserved));
    if (!options->world || (root && options->world->root == root))
        return TD_OK;
    return td_fail(
        TD_ERR_INVALID,
        root ? "%s: options.world is group \"%s\", which belongs to another world than the "
               "group of the call; leave it NULL"
             : "%s: options.world is group \"%s\", but this call opens a world of its own; "
               "leave it NULL, or call td_new_group()",
        what, options->world->name);
}

/* Sets *world to the group of all ranks of options->world, in use until td__group_unuse(). */
static td_status hold_world(const char *what, const td_group_options **options, td_group **world)
{
    static const td_group_options none;
    *options = *options ? *options : &none;
    struct td__root *root = td__root_enter((*options)->world, what);
    if (!root)
        return TD_ERR_STATE;
    TD_TRY(td__check_group_options(what, *options, root));
    *world = root->first;
    td__group_use(*world);
    return TD_OK;
}

static td_status check_list(const struct td__root *root, const char *what, const int *ranks,
                            int count)
{
    char *seen = calloc((size_t)root->size, 1);
    td_status status = seen ? TD_OK : td__fail_nomem(what);
    for (int i = 0; i < count && !status; i++) {
        if (ranks[i] < 0 || ranks[i] >= root->size)
            status = td_fail(TD_ERR_INVALID, "%s: rank %d is out of range; ranks are 0 to %d", what,
                             ranks[i], root->size - 1);
        else if (seen[ranks[i]]++)
            status = td_fail(TD_ERR_INVALID, "%s: rank %d is in the list twice", what, ranks[i]);
    }
    free(seen);
    return status;
}

/* ---- By lists -------------------------------------------------------------------------------- */

td_status td_new_group(const int *ranks, int count, const td_group_options *options,
                       td_group **group)
{
    static const char *const what = "td_new_group";
    td_group *world;
    TD_TRY(hold_world(what, &options, &world));
    if (!ranks) {
        ranks = world->ranks;
        count = world->size;
    }
    td_status status;
    if (!group)
        status = td_fail(TD_ERR_INVALID, "%s: the result is NULL", what);
    else if (count < 1)
        status = td_fail(TD_ERR_INVALID, "%s: %d ranks make no group", what, count);
    else
        status = check_list(world->root, what, ranks, count);
    if (!status)
        status = td__group_add(world->root, ranks, count, NULL, options, group);
    td__group_unuse(world);
    return status;
}

static td_status check_lists(const td_group *world, const char *what, const int *ranks,
                             const int *counts, int groups)
{
    int total = 0;
    for (int i = 0; i < groups; i++) {
        if (counts[i] < 1)
            return td_fail(TD_ERR_INVALID, "%s: %d ranks make no group", what, counts[i]);
        if (counts[i] > world->size - total)
            return td_fail(TD_ERR_INVALID,
                           "%s: more ranks than the world's %d; groups may not overlap", what,
                           world->size);
        total += counts[i];
    }
    return check_list(world->root, what, ranks, total);
}

td_status td_new_subgroups_by_enumeration(const int *ranks, const int *counts, int groups,
                                          const td_group_options *options, td_group **group)
{
    static const char *const what = "td_new_subgroups_by_enumeration";
    td_group *world, *own = NULL;
    TD_TRY(hold_world(what, &options, &world));
    td_status status = ranks && counts && group && groups > 0
                           ? check_lists(world, what, ranks, counts, groups)
                           : td_fail(TD_ERR_INVALID,
                                     "%s: needs a list of ranks and of counts, and a result", what);
    for (int i = 0; i < groups && !status; ranks += counts[i++])
        for (int k = 0; k < counts[i] && !status; k++)
            if (ranks[k] == world->root->rank)
                status = td__group_add(world->root, ranks, counts[i], NULL, options, &own);
    if (!status)
        *group = own;
    td__group_unuse(world);
    return status;
}

td_status td_new_subgroups(int group_size, const td_group_options *options, td_group **group)
{
    td_group *world;
    td_status status;
    TD_TRY(hold_world("td_new_subgroups", &options, &world));
    if (group_size < 1 || world->size % group_size)
        status = td_fail(TD_ERR_INVALID,
                         "td_new_subgroups: a world of %d cannot be cut into groups of %d",
                         world->size, group_size);
    else if (!group)
        status = td_fail(TD_ERR_INVALID, "td_new_subgroups: the result is NULL");
    else
        status = td__group_add(world->root, world->ranks + world->rank / group_size * group_size,
                               group_size, NULL, options, group);
    td__group_unuse(world);
    return status;
}

/* ---- By color -------------------------------------------------------------------------------- */

struct split_key {
    int32_t color, key;
};

static int compare_members(const void *a, const void *b)
{
    const int64_t *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static td_status split(td_group *parent, int color, int key, const td_group_options *options,
                       td_group **group)
{
    size_t size = (size_t)parent->size;
    struct split_key own = {color, key}, *keys = malloc(size * sizeof *keys);
    int64_t *order = malloc(size * sizeof *order);
    int *ranks = malloc(size * sizeof *ranks), count = 0;
    td_status status = keys && order && ranks ? TD_OK : td__fail_nomem("td_group_split");
    if (!status)
        status = td__group_call(parent,
                                &(struct td__operation){.call = {.kind = TD_OP_ALL_GATHER,
                                                                 .input = &own,
                                                                 .output = keys,
                                                                 .count = 2,
                                                                 .dtype = TD_I32,
                                                                 .detail = TD__DETAIL_SPLIT}},
                                -1, NULL);
    for (int i = 0; i < parent->size && !status; i++)
        if (keys[i].color == color)
            order[count++] = ((int64_t)keys[i].key + INT32_MAX + 1) << 31 | i;
    if (!status && color >= 0) {
        qsort(order, (size_t)count, sizeof *order, compare_members);
        for (int i = 0; i < count; i++)
            ranks[i] = parent->ranks[order[i] & INT32_MAX];
        status = td__group_add(parent->root, ranks, count, NULL, options, group);
    } else if (!status) {
        *group = NULL;
    }
    free(keys);
    free(order);
    free(ranks);
    return status;
}

td_status td_group_split(td_group *parent, int color, int key, const td_group_options *options,
                         td_group **group)
{
    parent = td__group_enter(parent, "td_group_split");
    td_group_options none = {0};
    if (!parent)
        return TD_ERR_STATE;
    if (!group)
        return td_fail(TD_ERR_INVALID, "td_group_split: the result is NULL");
    options = options ? options : &none;
    TD_TRY(td__check_group_options("td_group_split", options, parent->root));
    td__group_use(parent);
    td_status status = split(parent, color, key, options, group);
    td__group_unuse(parent);
    return status;
}
