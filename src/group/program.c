/* Programs; see program.h.
 *
 * All blocks that go from one rank to another in one round become one message, in the order of the
 * steps. Both sides do this alike, since every algorithm sends in the round in which the other side
 * receives; so the message has one header, and mostly takes one system call. */
#include "group/program.h"

#include <stdlib.h>

static bool is_message(const struct td__step *step)
{
    return step->kind == TD__STEP_SEND || step->kind == TD__STEP_RECV ||
           step->kind == TD__STEP_RECV_REDUCE;
}

/* The building of a program. `latest` has, for each partner, the last message to or from it: a
 * number above the round's first one says that it belongs to this round. */
struct build {
    struct td__program *program;
    uint32_t messages, segments;
    uint32_t *latest;
};

/* Adds the messages of one direction in the steps from `first` to `end`. */
static void add_messages(struct build *build, uint32_t first, uint32_t end, bool sends)
{
    struct td__program *program = build->program;
    const struct td__step *steps = program->schedule.steps;
    uint32_t begin = build->messages;
    for (uint32_t i = first; i < end; i++) {
        if (!is_message(&steps[i]) || (steps[i].kind == TD__STEP_SEND) != sends)
            continue;
        uint32_t *latest = &build->latest[steps[i].peer];
        if (*latest == UINT32_MAX || *latest < begin) {
            *latest = build->messages;
            program->messages[build->messages++] = (struct td__message){.peer = steps[i].peer};
        }
        program->messages[*latest].count++;
    }
    for (uint32_t i = begin; i < build->messages; i++) {
        program->messages[i].first = build->segments;
        build->segments += program->messages[i].count;
        program->messages[i].count = 0;
    }
    for (uint32_t i = first; i < end; i++) {
        if (!is_message(&steps[i]) || (steps[i].kind == TD__STEP_SEND) != sends)
            continue;
        struct td__message *message = &program->messages[build->latest[steps[i].peer]];
        program->segments[message->first + message->count++] = (struct td__segment){
            .place = steps[i].place,
            .reduces = steps[i].kind == TD__STEP_RECV_REDUCE,
            .block = steps[i].block,
            .count = steps[i].count};
    }
}

/* Only of an algorithm in which all ranks do alike can one rank tell it for all. */
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
    struct td__program *program = build->program;
    const struct td__schedule *schedule = &program->schedule;
    for (uint32_t i = 0; i < schedule->count;) {
        struct td__program_round *round = &program->rounds[program->round_count++];
        uint32_t first = i;
        while (i < schedule->count && schedule->steps[i].round == schedule->steps[first].round) {
            const struct td__step *step = &schedule->steps[i++];
            if (step->kind == TD__STEP_SEND)
                program->sends = true;
            else if (step->place == TD__DATA)
                program->writes_data = true;
        }
        round->first_local = first;
        round->end_local = i;
        round->first_send = build->messages;
        add_messages(build, first, i, true);
        round->first_recv = build->messages;
        add_messages(build, first, i, false);
        round->end = build->messages;
        if (round->end - round->first_send > program->most_messages)
            program->most_messages = round->end - round->first_send;
    }
}

struct td__program *td__program_create(const struct td__algorithm *algorithm,
                                       const struct td__plan *plan)
{
    struct td__program *program = calloc(1, sizeof *program);
    if (!program)
        return NULL;
    struct build build = {.program = program};
    if (!td__schedule_build(algorithm, plan, &program->schedule) ||
        program->schedule.count > INT32_MAX)
        goto destroy;
    size_t steps = program->schedule.count + 1;
    program->rounds = calloc(steps, sizeof *program->rounds);
    program->messages = calloc(steps, sizeof *program->messages);
    program->segments = calloc(steps, sizeof *program->segments);
    build.latest = malloc((size_t)plan->size * sizeof *build.latest);
    if (!program->rounds || !program->messages || !program->segments || !build.latest)
        goto destroy;
    for (int32_t i = 0; i < plan->size; i++)
        build.latest[i] = UINT32_MAX;
    add_rounds(&build);
    program->one_by_one = is_one_by_one(algorithm, &program->schedule);
    free(build.latest);
    return program;

destroy:
    free(build.latest);
    td__program_destroy(program);
    return NULL;
}

void td__program_destroy(struct td__program *program)
{
    if (!program)
        return;
    td__schedule_free(&program->schedule);
    free(program->rounds);
    free(program->messages);
    free(program->segments);
    free(program);
}
