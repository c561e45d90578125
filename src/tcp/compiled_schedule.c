/* Compiled schedules; see compiled_schedule.h.
 *
 * All blocks that go from one rank to another in one round become one message, in the order of the
 * steps. Both sides do this alike, since every algorithm sends in the round in which the other side
 * receives; so the message has one header, and mostly takes one system call. */
#include "tcp/compiled_schedule.h"

#include <stdlib.h>

static bool is_message(const struct td__step *step)
{
    return step->kind == TD__STEP_SEND || step->kind == TD__STEP_RECV ||
           step->kind == TD__STEP_RECV_REDUCE;
}

/* A schedule that is being compiled. `latest` has, for each partner, the last message to or from it: a
 * number above the round's first one says that it belongs to this round. */
struct build {
    struct td__compiled_schedule *compiled;
    uint32_t messages, segments;
    uint32_t *latest;
};

/* Adds the messages of one direction in the steps from `first` to `end`. */
static void add_messages(struct build *build, uint32_t first, uint32_t end, bool sends)
{
    struct td__compiled_schedule *compiled = build->compiled;
    const struct td__step *steps = compiled->schedule.steps;
    uint32_t begin = build->messages;
    for (uint32_t i = first; i < end; i++) {
        if (!is_message(&steps[i]) || (steps[i].kind == TD__STEP_SEND) != sends)
            continue;
        uint32_t *latest = &build->latest[steps[i].peer];
        if (*latest == UINT32_MAX || *latest < begin) {
            *latest = build->messages;
            compiled->messages[build->messages++] = (struct td__message){.peer = steps[i].peer};
        }
        compiled->messages[*latest].count++;
    }
    for (uint32_t i = begin; i < build->messages; i++) {
        compiled->messages[i].first = build->segments;
        build->segments += compiled->messages[i].count;
        compiled->messages[i].count = 0;
    }
    for (uint32_t i = first; i < end; i++) {
        if (!is_message(&steps[i]) || (steps[i].kind == TD__STEP_SEND) != sends)
            continue;
        struct td__message *message = &compiled->messages[build->latest[steps[i].peer]];
        compiled->segments[message->first + message->count++] = (struct td__segment){
            .place = steps[i].place,
            .reduces = steps[i].kind == TD__STEP_RECV_REDUCE,
            .block = steps[i].block,
            .count = steps[i].count};
    }
}

/* Only where all ranks have the same steps does this rank know it for all of them. */
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
            else if (step->place == TD__DATA)
                compiled->writes_data = true;
        }
        round->first_local = first;
        round->end_local = i;
        round->first_send = build->messages;
        add_messages(build, first, i, true);
        round->first_recv = build->messages;
        add_messages(build, first, i, false);
        round->end = build->messages;
        if (round->end - round->first_send > compiled->most_messages)
            compiled->most_messages = round->end - round->first_send;
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
    compiled->messages = calloc(steps, sizeof *compiled->messages);
    compiled->segments = calloc(steps, sizeof *compiled->segments);
    build.latest = malloc((size_t)plan->size * sizeof *build.latest);
    if (!compiled->rounds || !compiled->messages || !compiled->segments || !build.latest)
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
    free(compiled->messages);
    free(compiled->segments);
    free(compiled);
}
