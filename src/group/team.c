/* Ranks on one host: announcing, waiting, and failing together; see team.h. */
#include "group/team.h"

#include "base/fail.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    LOOKS = 40, /* at what is waited for, with a pause between two, before the clock is looked at */
    SEEN = 64, /* calls after which a rank says where it is, though it has a processor of its own */
    QUIET_MS = 2000,
    QUIET_PAUSE_NS = 50000,
    REASON_MS = 1000, /* for one who has failed to write down why */
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
    td__deadline end = td__deadline_in_ms(REASON_MS);
    while (atomic_load(&team->head->broken) != 2)
        if (td__deadline_passed(end))
            return td__fail(TD_ERR_PEER,
                            "a rank of this host ended while it told why a call failed");
        else
            td__sleep_ns(QUIET_PAUSE_NS);
    memcpy(reason, team->head->reason, sizeof reason);
    reason[sizeof reason - 1] = 0;
    uint32_t status = team->head->status;
    return td__fail(status > TD_OK && status <= TD_ERR_ABORTED ? (td_status)status : TD_ERR_PEER,
                    "%s", reason);
}

/* Either the writer sees that the call has failed, or the one who failed sees that it writes: also where
 * somebody else has failed at the same time, and is still writing down why. */
td_status td__team_write_begin(struct td__team *team)
{
    atomic_store(&team->cells[team->index].writing, 1);
    if (!atomic_load(&team->head->broken))
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

td_status td__team_state(struct td__team *team)
{
    return atomic_load(&team->attached) && td__team_is_broken(team) ? broken(team) : TD_OK;
}

/* Puts the members that have not reached `stage` into `text`; how many there are. */
static int list_missing(const struct td__team *team, uint64_t stage, char *text, size_t room)
{
    size_t length = 0;
    int count = 0;
    text[0] = 0;
    for (int i = 0; i < team->size && length < room - 16; i++)
        if (atomic_load(&td__team_post_of(team, i, stage >> TD__PHASE_BITS)->stage) < stage) {
            length += (size_t)snprintf(text + length, room - length, "%s%d", length ? ", " : "",
                                       team->world_ranks[i]);
            count++;
        }
    return count;
}

/* `stage` is what somebody has not reached; 0: all have come, but not all is done. Who has not called is to
 * blame for those who have not finished. */
static td_status too_late(struct td__team *team, const struct td__operation *operation,
                          uint64_t stage)
{
    char missing[256];
    uint64_t first = td__team_stage(stage >> TD__PHASE_BITS, 1);
    bool called = stage > first && !list_missing(team, first, missing, sizeof missing);
    int count = list_missing(team, called || !stage ? stage : first, missing, sizeof missing);
    if (!count)
        td__fail(TD_ERR_TIMEOUT, "%s: not done in time; all ranks have called it",
                 td__operation_describe(operation));
    else
        td__fail(TD_ERR_TIMEOUT, "%s: not done in time; rank%s %s %s not %s",
                 td__operation_describe(operation), count > 1 ? "s" : "", missing,
                 count > 1 ? "have" : "has", called ? "finished its part" : "called it");
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

/* ---- Announcing and waiting ------------------------------------------------------------------
 *
 * What a call costs where everyone has a processor is how often a cache line goes from one to another. A
 * post-it needs to go once; but a line that the other side has a copy of, from the last time or since it looks
 * at it, must be taken from there before it can be written. So a rank takes the line of its next post-it
 * back while it waits anyway, and does not look at those of the others at once, since they are mostly written
 * in the same moment; nor does it look without a pause, which holds up its own stores. On processors that
 * are far apart (0.33 µs for a round trip) an exchange takes 0.2 µs instead of 0.5. */

int td__team_find_lost(struct td__team *team, int index)
{
    for (int i = 0; i < team->size; i++)
        if ((index < 0 || i == index) &&
            (atomic_load(&team->cells[i].leaving) ||
             td__endpoint_presence(team->endpoint, team->world_ranks[i]) != TD__PRESENT))
            return i;
    return -1;
}

/* What else is known about a wait: others are waited for as well, by this rank or by the one that it waits
 * for; or members of one processor that wait for the same take turns. */
enum { FOR_ALL = 1, IN_TURN = 2 };

/* In a crowded team: whether a member that is waited for may need this processor. */
static bool is_wanted_here(const struct td__team *team, int index, unsigned how)
{
    int here = td__bell_processor(&team->cells[team->index].bell);
    if (index < 0 || td__bell_processor(&team->cells[index].bell) == here)
        return true;
    for (int i = 0; how & FOR_ALL && i < team->size; i++)
        if (i != team->index && td__bell_processor(&team->cells[i].bell) == here &&
            atomic_load_explicit(&td__team_post(team, i)->stage, memory_order_relaxed) <
                td__team_stage(team->call, 1))
            return true;
    return false;
}

static bool is_reached(const _Atomic uint64_t *reached, uint64_t stage, int index)
{
    uint64_t now = atomic_load_explicit(reached, memory_order_acquire);
    return index < 0 ? now == stage : now >= stage;
}

/* One step of waiting for `index`, or -1: anybody. */
static td_status wait_a_step(struct td__team *team, const struct td__operation *operation,
                             struct td__waiting *waiting, uint64_t stage, int index, unsigned how)
{
    if (td__team_is_broken(team))
        return broken(team);
    waiting->elsewhere = team->crowded && !waiting->spins && !is_wanted_here(team, index, how);
    if (!td__waiting_step(waiting))
        return too_late(team, operation, index < 0 ? 0 : stage);
    if (td__waiting_yields(waiting))
        td__team_spread(team, waiting->now);
    if (!waiting->slept || !team->outside)
        return TD_OK;
    td_status status = team->outside(team->outside_arg, operation);
    return status ? break_team(team, status) : TD_OK;
}

/* Waits until `reached` is `stage` or more. `index` is the one who brings that about, or -1: anybody, and
 * then it must be `stage` exactly. */
static td_status await_value(struct td__team *team, const struct td__operation *operation,
                             const _Atomic uint64_t *reached, uint64_t stage, int index,
                             unsigned how)
{
    /* Where everyone has a processor it is often a matter of nanoseconds. */
    for (int looks = team->crowded ? 1 : LOOKS; looks; looks--) {
        if (is_reached(reached, stage, index))
            return TD_OK;
        if (looks > 1)
            td__pause_processor();
    }
    if (!team->deadline)
        team->deadline = td__operation_deadline(operation);
    struct td__waiting waiting;
    td_status status = TD_OK;
    td__waiting_begin(&waiting, &team->cells[team->index].bell, team->crowded, SLICE_NS,
                      team->deadline);
    waiting.sleepers = &team->head->sleepers;
    /* Whoever has waited longer is served first, unless it will be over before that. */
    waiting.spun = how & IN_TURN && td__bell_is_idle(&team->cells[index].bell);
    while (!status && !is_reached(reached, stage, index)) {
        status = wait_a_step(team, operation, &waiting, stage, index, how);
        int lost = !status && waiting.slept ? td__team_find_lost(team, index) : -1;
        if (lost >= 0 && !is_reached(reached, stage, index))
            status = gone(team, operation, lost);
    }
    td__waiting_end(&waiting);
    return status;
}

static td_status await_stage(struct td__team *team, const struct td__operation *operation,
                             int index, uint64_t stage, unsigned how)
{
    return await_value(team, operation,
                       &td__team_post_of(team, index, stage >> TD__PHASE_BITS)->stage, stage, index,
                       how);
}

/* Begins a call that may run `depth` calls ahead of the slowest member. Where that is reached, half of it is
 * waited for, so that this does not happen with every call. */
static td_status begin(struct td__team *team, const struct td__operation *operation, uint64_t depth)
{
    uint64_t call = ++team->call;
    team->deadline = operation->deadline;
    if (team->crowded || call % SEEN == 0)
        td__bell_here(&team->cells[team->index].bell);
    if (call >= team->floor + depth) {
        uint64_t floor = call - depth / 2;
        for (int i = 0; i < team->size; i++) {
            if (i == team->index)
                continue;
            TD_TRY(await_stage(team, operation, i, td__team_stage(floor, 0), FOR_ALL));
            TD_TRY(td__team_compare(team, operation, i, floor));
        }
        team->floor = floor;
    }
    td__team_note(team, operation);
    return TD_OK;
}

td_status td__team_begin(struct td__team *team, const struct td__operation *operation)
{
    TD_TRY(begin(team, operation, TD__TEAM_DEPTH));
    if (operation->reduction.op == TD_PREMUL_SUM)
        td__team_slot(team, team->index)->notice.factor = operation->reduction.factor;
    return TD_OK;
}

td_status td__team_begin_tiny(struct td__team *team, const struct td__operation *operation)
{
    return begin(team, operation, TD__TEAM_AHEAD);
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
    atomic_store_explicit(&td__team_post(team, team->index)->stage,
                          td__team_stage(team->call, phase), memory_order_release);
    /* Nobody looks at that print any more, nor before the stage beside it. */
    td__team_post_of(team, team->index, team->call + 1)->print = 0;
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
    return await_value(team, operation, word, all, -1, FOR_ALL);
}

static inline void pause_before_looking(const struct td__team *team)
{
    for (unsigned i = 0; i < team->pauses; i++)
        td__pause_processor();
}

td_status td__team_await(struct td__team *team, const struct td__operation *operation, int index,
                         unsigned phase)
{
    pause_before_looking(team);
    TD_TRY(await_stage(team, operation, index, td__team_stage(team->call, phase), 0));
    return phase == 1 ? td__team_compare(team, operation, index, team->call) : TD_OK;
}

td_status td__team_await_all(struct td__team *team, const struct td__operation *operation,
                             unsigned phase)
{
    uint64_t stage = td__team_stage(team->call, phase);
    pause_before_looking(team);
    for (int i = 1; i < team->size; i++) {
        int index = (team->index + i) % team->size;
        TD_TRY(await_stage(team, operation, index, stage, FOR_ALL));
        if (phase == 1)
            TD_TRY(td__team_compare(team, operation, index, team->call));
    }
    team->floor = team->call;
    return TD_OK;
}

td_status td__team_await_release(struct td__team *team, const struct td__operation *operation)
{
    if (team->index == 0) {
        TD_TRY(td__team_await_all(team, operation, 1));
        td__team_reach(team, 2);
        return TD_OK;
    }
    TD_TRY(await_stage(team, operation, 0, td__team_stage(team->call, 1), FOR_ALL));
    TD_TRY(td__team_compare(team, operation, 0, team->call));
    TD_TRY(await_stage(team, operation, 0, td__team_stage(team->call, 2), FOR_ALL | IN_TURN));
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
    if (td__team_is_broken(team))
        return broken(team);
    if (!operation->input_counts && slot_bytes(team, operation) <= td__team_small_limit(team))
        return td__team_small(team, operation);
    return td__team_large(team, operation);
}

td_status td__team_mention(struct td__team *team, const struct td__operation *operation)
{
    if (td__team_is_broken(team))
        return broken(team);
    TD_TRY(td__team_begin_tiny(team, operation));
    td__team_reach(team, 1);
    return TD_OK;
}
