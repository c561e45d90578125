/* What the members of a team have called, and whether it was the same; see team.h.
 *
 * Every call leaves a print in the cell of its rank: all that must agree, in one word. Whoever waits for a
 * rank compares prints with it, of all calls since the last comparison. A rank that only gives waits for
 * nobody; its calls are compared by the next one that waits, before their place is used again, or when it
 * leaves. */
#include "group/team.h"

#include "base/fail.h"

#include <stdio.h>

#define SLICE_NS ((int64_t)10000000)

/* All that must agree, in one word: kind, dtype and operation (4 bits each), root (12), count (39), and
 * whether there are details. The kind of an all_to_all with uneven parts is one above all others. */
enum { UNEVEN = TD__COLLECTIVES, OWN_OPERATION = 15, NO_ROOT = 4095 };

#define DETAILED ((uint64_t)1 << 63)

/* The number of a user's operation, and what the call is made for. */
static uint64_t details_of(const struct td__operation *operation)
{
    return (uint64_t)operation->reduction.number << 32 | operation->detail;
}

static uint64_t print_of(const struct td__operation *operation)
{
    const struct td__reduction *reduction = &operation->reduction;
    uint64_t kind = operation->input_counts ? UNEVEN : operation->kind;
    uint64_t op = reduction->user ? OWN_OPERATION : reduction->op;
    uint64_t root = operation->called_root < 0 ? NO_ROOT
                                               : (uint64_t)operation->called_root % NO_ROOT;
    return kind | (uint64_t)reduction->dtype << 4 | op << 8 | root << 12 |
           (uint64_t)operation->count << 25 >> 1 | (details_of(operation) ? DETAILED : 0);
}

static void describe_print(uint64_t print, uint64_t details, char *text, size_t room)
{
    unsigned kind = print & 15, dtype = print >> 4 & 15, op = print >> 8 & 15;
    unsigned root = print >> 12 & 4095;
    char detail[64];
    const char *name = kind == UNEVEN           ? "all_to_all with uneven parts"
                       : kind < TD__COLLECTIVES ? td__collective_name((enum td__collective)kind)
                                                : "something else";
    int length = snprintf(text, room, "%s", name);
    if (kind != UNEVEN && kind != TD__BARRIER)
        length += snprintf(text + length, room - (size_t)length, " of %llu %s",
                           (unsigned long long)((print & ~DETAILED) >> 24),
                           td_dtype_name((td_dtype)dtype));
    bool reduces = kind == TD__REDUCE || kind == TD__ALL_REDUCE || kind == TD__REDUCE_SCATTER;
    if (reduces && op == OWN_OPERATION)
        length += snprintf(text + length, room - (size_t)length, ", its own operation no. %u",
                           (unsigned)(details >> 32));
    else if (reduces)
        length += snprintf(text + length, room - (size_t)length, ", %s",
                           td_reduce_op_name((td_reduce_op)op));
    if (root != NO_ROOT)
        length += snprintf(text + length, room - (size_t)length, ", root %u", root);
    if (print & DETAILED)
        snprintf(text + length, room - (size_t)length, "%s",
                 td__detail_text((uint32_t)details, detail));
}

static uint64_t *detail_of(const struct td__team *team, int index, uint64_t call)
{
    return &team->cells[index].details[call % TD__TEAM_POSTS];
}

void td__team_note(struct td__team *team, const struct td__operation *operation)
{
    uint64_t print = print_of(operation);
    team->sequence = operation->sequence;
    td__team_post(team, team->index)->print = print;
    if (print & DETAILED)
        *detail_of(team, team->index, team->call) = details_of(operation);
}

static td_status differ(struct td__team *team, const struct td__operation *operation, uint64_t call,
                        int index)
{
    char ours[160], theirs[160];
    describe_print(td__team_post_of(team, team->index, call)->print,
                   *detail_of(team, team->index, call), ours, sizeof ours);
    describe_print(td__team_post_of(team, index, call)->print, *detail_of(team, index, call),
                   theirs, sizeof theirs);
    return td__team_fail(
        team, TD_ERR_MISMATCH,
        "call #%llu on group \"%s\": rank %d called %s, rank %d called %s; every rank must make the "
        "same calls in the same order",
        (unsigned long long)(operation->sequence - (team->call - call)), operation->group,
        team->world_ranks[team->index], ours, team->world_ranks[index], theirs);
}

/* A print stays for TD__TEAM_POSTS calls, and nobody is further ahead than half of that. */
td_status td__team_compare(struct td__team *team, const struct td__operation *operation, int index,
                           uint64_t call)
{
    for (uint64_t c = team->floor + 1; c <= call; c++) {
        uint64_t print = td__team_post_of(team, team->index, c)->print;
        if (td__team_post_of(team, index, c)->print != print ||
            (print & DETAILED && *detail_of(team, index, c) != *detail_of(team, team->index, c)))
            return differ(team, operation, c, index);
    }
    return TD_OK;
}

/* ---- Before leaving -------------------------------------------------------------------------- */

/* The last call that `index` has made, of those that are not compared yet. */
static uint64_t last_call(const struct td__team *team, int index)
{
    uint64_t call = team->floor;
    while (call < team->call &&
           atomic_load_explicit(&td__team_post_of(team, index, call + 1)->stage,
                                memory_order_acquire) >= td__team_stage(call + 1, 1))
        call++;
    return call;
}

/* Whether all that can be known of the others' calls is known. */
static bool is_settled(struct td__team *team)
{
    for (int i = 0; i < team->size; i++)
        if (i != team->index && last_call(team, i) < team->call && td__team_find_lost(team, i) < 0)
            return false;
    return true;
}

td_status td__team_verify(struct td__team *team, const char *group, td__deadline deadline)
{
    if (!atomic_load(&team->attached) || team->floor == team->call)
        return td__team_state(team);
    struct td__operation operation = {
        .kind = TD__BARRIER, .sequence = team->sequence, .group = group};
    struct td__waiting waiting;
    td__waiting_begin(&waiting, &team->cells[team->index].bell, team->crowded, SLICE_NS, deadline);
    waiting.sleepers = &team->head->sleepers;
    while (!is_settled(team) && !td__team_is_broken(team) && td__waiting_step(&waiting))
        ;
    td__waiting_end(&waiting);
    for (int i = 0; i < team->size; i++)
        if (i != team->index && !td__team_is_broken(team))
            TD_TRY(td__team_compare(team, &operation, i, last_call(team, i)));
    return td__team_state(team);
}
