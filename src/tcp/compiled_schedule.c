/* Compiled schedules; see compiled_schedule.h.
 *
 * All blocks that one rank sends to another in one round become one transfer, in the order of the steps: it has
 * one header, and mostly needs one system call. Sender and receiver build the same transfer, since every
 * algorithm sends and receives a block in the same round. */
#include "tcp/compiled_schedule.h"

#include <stdlib.h>

static bool is_transfer(const struct td__step *step, bool sends)
{
    return sends ? step->kind == TD__STEP_SEND
                 : step->kind == TD__STEP_RECV || step->kind == TD__STEP_RECV_REDUCE;
}

/* A schedule that is being compiled. latest[peer] is the index of the last transfer to or from `peer`; it
 * belongs to the current round and direction if it is not below their first transfer. */
struct build {
    struct td__compiled_schedule *compiled;
    uint32_t transfers, segments;
    uint32_t *latest;
};

/* Adds the transfers of one direction in the steps from `first` to `end`. */
static void add_transfers(struct build *build, uint32_t first, uint32_t end, bool sends)
{
    struct td__compiled_schedule *compiled = build->compiled;
    const struct td__step *steps = compiled->schedule.steps;
    uint32_t begin = build->transfers;
    for (uint32_t i = first; i < end; i++) {
        if (!is_transfer(&steps[i], sends))
            continue;
        uint32_t *latest = &build->latest[steps[i].peer];
        if (*latest == UINT32_MAX || *latest < begin) {
            *latest = build->transfers;
            compiled->transfers[build->transfers++] = (struct td__transfer){.peer = steps[i].peer};
        }
        compiled->transfers[*latest].count++;
    }
    for (uint32_t i = begin; i < build->transfers; i++) {
        compiled->transfers[i].first = build->segments;
        build->segments += compiled->transfers[i].count;
        compiled->transfers[i].count = 0;
    }
    for (uint32_t i = first; i < end; i++) {
        if (!is_transfer(&steps[i], sends))
            continue;
        struct td__transfer *transfer = &compiled->transfers[build->latest[steps[i].peer]];
        compiled->segments[transfer->first + transfer->count++] = (struct td__segment){
            .buffer = steps[i].buffer,
            .reduces = steps[i].kind == TD__STEP_RECV_REDUCE,
            .block = steps[i].block,
            .count = steps[i].count};
    }
}

/* This rank knows only its own steps; a symmetric algorithm has the same on all ranks. */
static bool is_one_by_one(const struct td__algorithm *algorithm,
                          const struct td__schedule *schedule)
{
    bool one = algorithm->symmetric;
    for (uint32_t i = 0; i < schedule->count; i++)
        one = one && schedule->steps[i].count == 1;
    return one;
}

static void add_rounds(struct build *build)
{
    struct td__compiled_schedule *compiled = build->compiled;
    const struct td__schedule *schedule = &compiled->schedule;
    for (uint32_t i = 0; i < schedule->count;) {
        struct td__compiled_round *round = &compiled->rounds[compiled->round_count++];
        uint32_t first = i;
        while (i < schedule->count && schedule->steps[i].round == schedule->steps[first].round) {
            const struct td__step *step = &schedule->steps[i++];
            if (step->kind == TD__STEP_SEND)
                compiled->sends = true;
            else if (step->buffer == TD__DATA)
                compiled->writes_data = true;
        }
        round->first_local = first;
        round->end_local = i;
        round->first_send = build->transfers;
        add_transfers(build, first, i, true);
        round->first_recv = build->transfers;
        add_transfers(build, first, i, false);
        round->end = build->transfers;
        if (round->end - round->first_send > compiled->most_transfers)
            compiled->most_transfers = round->end - round->first_send;
    }
}

struct td__compiled_schedule *td__compiled_schedule_create(const struct td__algorithm *algorithm,
                                                           const struct td__plan *plan)
{
    struct td__compiled_schedule *compiled = calloc(1, sizeof *compiled);
    if (!compiled)
        return NULL;
    struct build build = {.compiled = compiled};
    if (!td__schedule_build(algorithm, plan, &compiled->schedule) ||
        compiled->schedule.count > INT32_MAX)
        goto destroy;
    size_t steps = compiled->schedule.count + 1;
    compiled->rounds = calloc(steps, sizeof *compiled->rounds);
    compiled->transfers = calloc(steps, sizeof *compiled->transfers);
    compiled->segments = calloc(steps, sizeof *compiled->segments);
    build.latest = malloc((size_t)plan->size * sizeof *build.latest);
    if (!compiled->rounds || !compiled->transfers || !compiled->segments || !build.latest)
        goto destroy;
    for (int32_t i = 0; i < plan->size; i++)
        build.latest[i] = UINT32_MAX;
    add_rounds(&build);
    compiled->one_by_one = is_one_by_one(algorithm, &compiled->schedule);
    free(build.latest);
    return compiled;

destroy:
    free(build.latest);
    td__compiled_schedule_destroy(compiled);
    return NULL;
}

void td__compiled_schedule_destroy(struct td__compiled_schedule *compiled)
{
    if (!compiled)
        return;
    td__schedule_free(&compiled->schedule);
    free(compiled->rounds);
    free(compiled->transfers);
    free(compiled->segments);
    free(compiled);
}
