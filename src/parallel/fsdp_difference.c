/* The ranks of a sharded module ran different units: which one is the first.
 *
 * A collective has found it, or the hash of the units at the end of a pass. After the former the group takes no more calls,
 * so that the ranks compare through its store: each sets what it ran, and reads what the others did. */
#include "base/fail.h"
#include "fault/group_state.h"
#include "parallel/fsdp_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_MS = 2000, KEY_BYTES = 128 };

static void key_of(char *key, const td_group *group, int rank)
{
    snprintf(key, KEY_BYTES, "fsdp/%s/%d", group->name, rank);
}

/* The last rank that has read all lists removes them; the others wait for it, since one of them may host the store. */
static void close_lists(td_store *store, const td_group *group)
{
    char key[KEY_BYTES], done[KEY_BYTES];
    int64_t count;
    key_of(key, group, -1);
    key_of(done, group, -2);
    if (td_store_add(store, key, 1, &count))
        return;
    if (count < group->size) {
        td_store_wait(store, (const char *[]){done}, 1, PATIENCE_MS);
        return;
    }
    for (int r = -1; r < group->size; r++) {
        key_of(key, group, r);
        td_store_delete_key(store, key, NULL);
    }
    td_store_set(store, done, "", 0);
}

static int first_difference(const struct td__fsdp *fsdp, const int32_t *theirs, int count)
{
    int i = 0;
    while (i < fsdp->ran_count && i < count && fsdp->ran[i] == theirs[i])
        i++;
    return i;
}

/* Compares with one rank; a list that is the beginning of the other is a difference for one that has ended its pass. */
static bool compare(const struct td__fsdp *fsdp, const td_bytes *list, int rank, const char *reason)
{
    const td_group *group = fsdp->units[0]->ranks->group;
    int count = (int)(list->size / sizeof(int32_t));
    const int32_t *theirs = (const void *)list->data;
    int i = first_difference(fsdp, theirs, count);
    if (i == fsdp->ran_count && i == count)
        return false;
    bool mine = i < fsdp->ran_count;
    int32_t number = mine ? fsdp->ran[i] : theirs[i];
    const struct td__fsdp_unit *unit = fsdp->units[number < 0 ? ~number : number];
    int self = td_get_global_rank(group, group->rank), other = td_get_global_rank(group, rank);
    td_fail(TD_ERR_MISMATCH,
            "td_fsdp: rank %d ran the %s pass of the unit \"%s\", whose first parameter is \"%s\", "
            "where rank %d did not; all ranks must run the same units in the same order%s%s",
            mine ? self : other, number < 0 ? "backward" : "forward", unit->name,
            td__fsdp_first_name(unit), mine ? other : self, *reason ? ": " : "", reason);
    return true;
}

bool td__fsdp_name_difference(struct td__fsdp *fsdp)
{
    const td_group *group = fsdp->units[0]->ranks->group;
    td_store *store = group->root->store;
    char key[KEY_BYTES];
    char *reason = strdup(td__error_text());
    bool found = false;
    key_of(key, group, group->rank);
    bool sets = reason &&
                !td_store_set(store, key, fsdp->ran, (size_t)fsdp->ran_count * sizeof *fsdp->ran);
    for (int r = 0; r < group->size && sets && !found; r++) {
        td_bytes list = {0};
        key_of(key, group, r);
        if (r == group->rank || td_store_get(store, key, PATIENCE_MS, &list))
            continue;
        found = compare(fsdp, &list, r, reason);
        td_bytes_free(&list);
    }
    struct td__error error;
    td__error_save(&error);
    if (sets)
        close_lists(store, group);
    td__error_restore(&error);
    free(reason);
    return found;
}
