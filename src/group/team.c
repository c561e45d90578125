/* Ranks on one host: announcing, waiting, and failing together; see team.h. */
#include "group/team.h"

#include "base/fail.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    PHASE_BITS = 24,
    LOOKS = 200,
    QUIET_MS = 2000,
    QUIET_PAUSE_NS = 50000,
};

#define SLICE_NS ((int64_t)50000000) /* the longest sleep before looking around */

/* ---- Failing together ------------------------------------------------------------------------ */

/* The first failure is everybody's: it is written down for the others, who are woken. */
static td_status break_team(struct td__team *team, td_status status)
{
    uint32_t whole = 0;
    if (atomic_compare_exchange_strong(&team->head->broken, &whole, 1)) {
        snprintf(team->head->reason, sizeof team->head->reason, "%s", td_last_error());
        team->head->status = status;
        atomic_store(&team->head->broken, 2);
        for (int i = 0; i < team->size; i++)
            td__bell_ring(&team->cells[i].bell);
    }
    return status;
}

td_status td__team_fail(struct td__team *team, td_status status, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return break_team(team, td__fail(status, "%s", text));
}

void td__team_break(struct td__team *team, td_status status)
{
    if (atomic_load(&team->attached))
        break_team(team, status);
}

static td_status broken(struct td__team *team)
{
    char reason[sizeof team->head->reason];
    memcpy(reason, team->head->reason, sizeof reason);
    reason[sizeof reason - 1] = 0;
    uint32_t status = team->head->status;
    return td__fail(status > TD_OK && status <= TD_ERR_ABORTED ? (td_status)status : TD_ERR_PEER,
                    "%s", reason);
}

/* Either the writer sees that the call has failed, or the one who failed sees that it writes. */
td_status td__team_write_begin(struct td__team *team)
{
    atomic_store(&team->cells[team->index].writing, 1);
    if (atomic_load(&team->head->broken) != 2)
        return TD_OK;
    td__team_write_end(team);
    return broken(team);
}

void td__team_write_end(struct td__team *team)
{
    atomic_store_explicit(&team->cells[team->index].writing, 0, memory_order_release);
}

void td__team_await_quiet(struct td__team *team)
{
    if (!atomic_load(&team->attached))
        return;
    td__deadline end = td__deadline_in_ms(QUIET_MS);
    for (int i = 0; i < team->size; i++)
        while (i != team->index && atomic_load(&team->cells[i].writing) &&
               td__endpoint_presence(team->endpoint, team->world_ranks[i]) == TD__PRESENT &&
               !td__deadline_passed(end))
            td__sleep_ns(QUIET_PAUSE_NS);
}

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

static struct td__post_it *post_of(const struct td__team *team, int index, uint64_t call)
{
    return &team->cells[index].posts[call % TD__TEAM_POSTS];
}

td_status td__team_state(struct td__team *team)
{
    bool failed = atomic_load(&team->attached) &&
                  atomic_load_explicit(&team->head->broken, memory_order_acquire) == 2;
    return failed ? broken(team) : TD_OK;
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

static td_status differ(struct td__team *team, const struct td__operation *operation, uint64_t call,
                        int index)
{
    char ours[160], theirs[160];
    describe_print(post_of(team, team->index, call)->print, *detail_of(team, team->index, call),
                   ours, sizeof ours);
    describe_print(post_of(team, index, call)->print, *detail_of(team, index, call), theirs,
                   sizeof theirs);
    return td__team_fail(
        team, TD_ERR_MISMATCH,
        "call #%llu on group \"%s\": rank %d called %s, rank %d called %s; every rank must make the "
        "same calls in the same order",
        (unsigned long long)(operation->sequence - (team->call - call)), operation->group,
        team->world_ranks[team->index], ours, team->world_ranks[index], theirs);
}

/* Compares all calls since the last comparison up to `call`, which `index` has begun. A print stays for
 * TD__TEAM_POSTS calls, and nobody is further ahead than TD__TEAM_DEPTH. */
static td_status compare_calls(struct td__team *team, const struct td__operation *operation,
                               int index, uint64_t call)
{
    for (uint64_t c = team->floor + 1; c <= call; c++) {
        uint64_t print = post_of(team, team->index, c)->print;
        if (post_of(team, index, c)->print != print ||
            (print & DETAILED && *detail_of(team, index, c) != *detail_of(team, team->index, c)))
            return differ(team, operation, c, index);
    }
    return TD_OK;
}

/* `stage` is what somebody has not reached; 0: all have come, but not all is done. */
static td_status too_late(struct td__team *team, const struct td__operation *operation,
                          uint64_t stage)
{
    char missing[256] = "";
    size_t length = 0;
    int count = 0;
    for (int i = 0; i < team->size && length < sizeof missing - 16; i++)
        if (atomic_load(&post_of(team, i, stage >> PHASE_BITS)->stage) < stage) {
            length += (size_t)snprintf(missing + length, sizeof missing - length, "%s%d",
                                       length ? ", " : "", team->world_ranks[i]);
            count++;
        }
    if (!count)
        td__fail(TD_ERR_TIMEOUT, "%s: not done in time; all ranks have called it",
                 td__operation_describe(operation));
    else
        td__fail(TD_ERR_TIMEOUT, "%s: not done in time; rank%s %s %s not %s",
                 td__operation_describe(operation), count > 1 ? "s" : "", missing,
                 count > 1 ? "have" : "has",
                 (stage & ((1u << PHASE_BITS) - 1)) <= 1 ? "called it" : "finished its part");
    /* Before the others are told: they shall learn where everybody was now. */
    if (team->explain)
        team->explain(team->outside_arg, operation);
    return break_team(team, TD_ERR_TIMEOUT);
}

/* One that has failed says so before it leaves, and that is why it is gone. */
static td_status gone(struct td__team *team, const struct td__operation *operation, int index)
{
    TD_TRY(td__team_state(team));
    const char *farewell = td__endpoint_farewell(team->endpoint, team->world_ranks[index]);
    return td__team_fail(
        team, TD_ERR_PEER, "%s: %s %s", td__operation_describe(operation),
        td__endpoint_describe(team->endpoint, team->world_ranks[index]),
        farewell && !atomic_load(&team->cells[index].leaving) ? farewell : "has left the group");
}

/* ---- Announcing and waiting ------------------------------------------------------------------ */

static uint64_t stage_of(uint64_t call, unsigned phase)
{
    return call << PHASE_BITS | phase;
}

/* A member that has ended or left: `index`, or with -1 any of them. -1 where there is none. */
static int find_lost(struct td__team *team, int index)
{
    for (int i = 0; i < team->size; i++)
        if ((index < 0 || i == index) &&
            (atomic_load(&team->cells[i].leaving) ||
             td__endpoint_presence(team->endpoint, team->world_ranks[i]) != TD__PRESENT))
            return i;
    return -1;
}

static bool is_reached(const _Atomic uint64_t *reached, uint64_t stage, int index)
{
    uint64_t now = atomic_load_explicit(reached, memory_order_acquire);
    return index < 0 ? now == stage : now >= stage;
}

/* Waits until `reached` is `stage` or more. `index` is the one who brings that about, or -1: anybody, and
 * then it must be `stage` exactly. */
static td_status await_value(struct td__team *team, const struct td__operation *operation,
                             const _Atomic uint64_t *reached, uint64_t stage, int index)
{
    /* Where everyone has a processor it is often a matter of nanoseconds. */
    for (int looks = team->crowded ? 1 : LOOKS; looks; looks--)
        if (is_reached(reached, stage, index))
            return TD_OK;
    if (!team->deadline)
        team->deadline = td__operation_deadline(operation);
    struct td__waiting waiting;
    td_status status = TD_OK;
    td__waiting_begin(&waiting, &team->cells[team->index].bell, team->crowded, SLICE_NS,
                      team->deadline);
    waiting.sleepers = &team->head->sleepers;
    while (!is_reached(reached, stage, index)) {
        if (atomic_load_explicit(&team->head->broken, memory_order_acquire) == 2) {
            status = broken(team);
            break;
        }
        if (!td__waiting_step(&waiting)) {
            status = too_late(team, operation, index < 0 ? 0 : stage);
            break;
        }
        if (waiting.slept && team->outside &&
            (status = team->outside(team->outside_arg, operation))) {
            break_team(team, status);
            break;
        }
        int lost = waiting.slept ? find_lost(team, index) : -1;
        if (lost >= 0 && !is_reached(reached, stage, index)) {
            status = gone(team, operation, lost);
            break;
        }
    }
    td__waiting_end(&waiting);
    return status;
}

static td_status await_stage(struct td__team *team, const struct td__operation *operation,
                             int index, uint64_t stage)
{
    return await_value(team, operation, &post_of(team, index, stage >> PHASE_BITS)->stage, stage,
                       index);
}

td_status td__team_begin(struct td__team *team, const struct td__operation *operation)
{
    uint64_t call = ++team->call;
    team->deadline = operation->deadline;
    if (call >= team->floor + TD__TEAM_DEPTH) {
        uint64_t floor = call - TD__TEAM_DEPTH + 1;
        for (int i = 0; i < team->size; i++) {
            if (i == team->index)
                continue;
            TD_TRY(await_stage(team, operation, i, stage_of(floor, 0)));
            TD_TRY(compare_calls(team, operation, i, floor));
        }
        team->floor = floor;
    }
    uint64_t print = print_of(operation);
    post_of(team, team->index, call)->print = print;
    if (print & DETAILED)
        *detail_of(team, team->index, call) = details_of(operation);
    if (operation->reduction.op == TD_PREMUL_SUM)
        td__team_slot(team, team->index)->notice.factor = operation->reduction.factor;
    return TD_OK;
}

/* For a change that all may be waiting for; it was made before. */
static void wake_sleepers(struct td__team *team)
{
    td__bell_fence();
    if (!atomic_load_explicit(&team->head->sleepers, memory_order_relaxed))
        return;
    for (int i = 0; i < team->size; i++)
        if (i != team->index &&
            atomic_load_explicit(&team->cells[i].bell.sleeping, memory_order_relaxed))
            td__bell_wake(&team->cells[i].bell);
}

void td__team_reach(struct td__team *team, unsigned phase)
{
    atomic_store_explicit(&td__team_post(team, team->index)->stage, stage_of(team->call, phase),
                          memory_order_release);
    wake_sleepers(team);
}

/* A word that counts within one call, and begins anew in the next: its upper half is the call. */
static uint64_t count_up(_Atomic uint64_t *word, uint64_t call, uint32_t more)
{
    uint64_t before = atomic_load_explicit(word, memory_order_relaxed), after;
    do
        after = (before >> 32 == (uint32_t)call ? before : call << 32) + more;
    while (!atomic_compare_exchange_weak_explicit(word, &before, after, memory_order_acq_rel,
                                                  memory_order_relaxed));
    return after;
}

int td__team_claim(struct td__team *team, int owner)
{
    return (int)((uint32_t)count_up(&team->cells[owner].claims, team->call, 1) - 1);
}

td_status td__team_complete(struct td__team *team, const struct td__operation *operation,
                            uint32_t done, uint32_t total)
{
    _Atomic uint64_t *word = &team->head->done[team->call % TD__TEAM_DEPTH];
    uint64_t all = team->call << 32 | total;
    if (done && count_up(word, team->call, done) == all)
        wake_sleepers(team);
    return await_value(team, operation, word, all, -1);
}

td_status td__team_await(struct td__team *team, const struct td__operation *operation, int index,
                         unsigned phase)
{
    TD_TRY(await_stage(team, operation, index, stage_of(team->call, phase)));
    return phase == 1 ? compare_calls(team, operation, index, team->call) : TD_OK;
}

td_status td__team_await_all(struct td__team *team, const struct td__operation *operation,
                             unsigned phase)
{
    for (int i = 1; i < team->size; i++)
        TD_TRY(td__team_await(team, operation, (team->index + i) % team->size, phase));
    team->floor = team->call;
    return TD_OK;
}

struct td__reduction td__team_reduction(struct td__team *team,
                                        const struct td__operation *operation)
{
    struct td__reduction reduction = operation->reduction;
    if (!reduction.user && reduction.op == TD_PREMUL_SUM) {
        for (int i = 0; i < team->size; i++)
            team->factors[i] = td__team_slot(team, i)->notice.factor;
        reduction.factors = team->factors;
    }
    return reduction;
}

size_t td__part(size_t count, int parts, int index)
{
    size_t unit = count / (size_t)parts >= 4096 ? 1024 : 64;
    size_t units = count / unit, each = units / (size_t)parts, more = units % (size_t)parts;
    if (index == parts)
        return count;
    return unit * (each * (size_t)index + ((size_t)index < more ? (size_t)index : more));
}

/* ---- Running --------------------------------------------------------------------------------- */

/* The bytes that a rank puts into its slot for a small call: the most that any rank has to. */
static size_t slot_bytes(const struct td__team *team, const struct td__operation *operation)
{
    size_t one = operation->count * td__operation_element(operation), all;
    switch (operation->kind) {
    case TD__SCATTER:
    case TD__REDUCE_SCATTER:
    case TD__ALL_TO_ALL:
        return __builtin_mul_overflow(one, (size_t)team->size, &all) ? SIZE_MAX : all;
    default:
        return one;
    }
}

td_status td__team_run(struct td__team *team, const struct td__operation *operation)
{
    if (atomic_load_explicit(&team->head->broken, memory_order_acquire) == 2)
        return broken(team);
    if (!operation->input_counts && slot_bytes(team, operation) <= td__team_small_limit(team))
        return td__team_small(team, operation);
    return td__team_large(team, operation);
}

td_status td__team_mention(struct td__team *team, const struct td__operation *operation)
{
    if (atomic_load_explicit(&team->head->broken, memory_order_acquire) == 2)
        return broken(team);
    TD_TRY(td__team_begin(team, operation));
    td__team_reach(team, 1);
    return TD_OK;
}
