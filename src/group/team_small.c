/* Small calls on one host: each rank puts its data into its slot and announces that; whoever needs
 * data waits for the slots of those who have them. One synchronisation, and none for a rank that only
 * gives (the root of a broadcast, the others of a reduce), which runs ahead.
 *
 * Slots are used in turn (team.h), so a slot is never written while somebody still reads it. */
#include "group/team.h"

#include "base/fail.h"

#include <string.h>

/* Up to here every rank reads everybody's data. Beyond that sharing the work pays for the second
 * synchronisation; where ranks have to take turns on a processor, that one is dearer. */
enum { SPACIOUS_LIMIT = 8 << 10, CROWDED_LIMIT = 32 << 10 };

size_t td__team_small_limit(const struct td__team *team)
{
    return team->crowded ? CROWDED_LIMIT : SPACIOUS_LIMIT;
}

static void copy(void *to, const void *from, size_t size)
{
    if (size && to != from)
        memcpy(to, from, size);
}

/* Where `index` has its data of the call at hand, `bytes` in all. */
static char *data_of(struct td__team *team, int index, size_t bytes)
{
    return bytes <= TD__TINY_BYTES ? td__team_post(team, index)->tiny
                                   : td__team_slot(team, index)->data;
}

/* `given` is what each has in its slot, of which the part from `offset` on is reduced. */
static td_status reduce_slots(struct td__team *team, const struct td__operation *operation,
                              size_t given, size_t offset)
{
    void *output = operation->output;
    for (int i = 0; i < team->size; i++)
        team->sources[i] = data_of(team, i, given) + offset;
    struct td__reduction reduction = td__team_reduction(team, operation);
    if (operation->count)
        td__reduce_many(&reduction, &output, 1, team->sources, team->size, operation->count);
    return TD_OK;
}

/* The part of everybody's slot from `part` on, one after another. */
static void collect(struct td__team *team, const struct td__operation *operation, size_t given,
                    size_t part, size_t bytes)
{
    char *output = operation->output;
    for (int i = 0; i < team->size; i++)
        copy(output + (size_t)i * bytes, data_of(team, i, given) + part, bytes);
}

td_status td__team_small(struct td__team *team, const struct td__operation *operation)
{
    size_t bytes = operation->count * td__operation_element(operation);
    size_t all = bytes * (size_t)team->size, part = bytes * (size_t)team->index;
    bool is_root = operation->root == team->index;
    enum td__collective kind = operation->kind;

    bool by_parts = kind == TD__SCATTER || kind == TD__REDUCE_SCATTER || kind == TD__ALL_TO_ALL;
    size_t given = by_parts ? all : bytes;
    bool gives = kind == TD__BROADCAST || kind == TD__SCATTER ? is_root : kind != TD__BARRIER;
    bool tiny = given <= TD__TINY_BYTES && operation->reduction.op != TD_PREMUL_SUM;
    TD_TRY(tiny ? td__team_begin_tiny(team, operation) : td__team_begin(team, operation));
    if (gives)
        copy(data_of(team, team->index, given), operation->input, given);
    td__team_reach(team, 1);

    switch (kind) {
    case TD__BROADCAST:
    case TD__SCATTER:
        if (!is_root) {
            TD_TRY(td__team_await(team, operation, operation->root, 1));
            copy(operation->output,
                 data_of(team, operation->root, given) + (kind == TD__SCATTER ? part : 0), bytes);
        } else if (kind == TD__SCATTER && bytes) {
            copy(operation->output, (const char *)operation->input + part, bytes);
        }
        return TD_OK;
    case TD__REDUCE:
    case TD__GATHER:
        if (!is_root)
            return TD_OK;
        TD_TRY(td__team_await_all(team, operation, 1));
        if (kind == TD__REDUCE)
            return reduce_slots(team, operation, given, 0);
        collect(team, operation, given, 0, bytes);
        return TD_OK;
    default:
        break;
    }

    if (kind == TD__BARRIER && team->crowded)
        return td__team_await_release(team, operation);
    TD_TRY(td__team_await_all(team, operation, 1));
    switch (kind) {
    case TD__ALL_REDUCE:
        return reduce_slots(team, operation, given, 0);
    case TD__REDUCE_SCATTER:
        return reduce_slots(team, operation, given, part);
    case TD__ALL_GATHER:
        collect(team, operation, given, 0, bytes);
        return TD_OK;
    case TD__ALL_TO_ALL:
        collect(team, operation, given, part, bytes);
        return TD_OK;
    default: /* a barrier */
        return TD_OK;
    }
}
