/* Building schedules; see schedule.h. */
#include "collective/schedule.h"

#include <stdlib.h>
#include <string.h>

static void add(struct td__schedule *schedule, struct td__step step)
{
    if (schedule->failed)
        return;
    if (schedule->count == schedule->capacity) {
        size_t capacity = schedule->capacity ? schedule->capacity * 2 : 16;
        struct td__step *steps = realloc(schedule->steps, capacity * sizeof *steps);
        if (!steps) {
            schedule->failed = true;
            return;
        }
        schedule->steps = steps;
        schedule->capacity = capacity;
    }
    step.round = schedule->rounds;
    schedule->steps[schedule->count++] = step;
}

static void add_transfer(struct td__schedule *schedule, enum td__step_kind kind, int32_t peer,
                         enum td__schedule_buffer buffer, int32_t block, int32_t count)
{
    add(schedule, (struct td__step){.kind = (uint8_t)kind,
                                    .buffer = (uint8_t)buffer,
                                    .peer = peer,
                                    .block = block,
                                    .count = count});
}

void td__send(struct td__schedule *schedule, int32_t peer, enum td__schedule_buffer buffer,
              int32_t block, int32_t count)
{
    add_transfer(schedule, TD__STEP_SEND, peer, buffer, block, count);
}

void td__recv(struct td__schedule *schedule, int32_t peer, enum td__schedule_buffer buffer,
              int32_t block, int32_t count)
{
    add_transfer(schedule, TD__STEP_RECV, peer, buffer, block, count);
}

void td__recv_reduce(struct td__schedule *schedule, int32_t peer, enum td__schedule_buffer buffer,
                     int32_t block, int32_t count)
{
    add_transfer(schedule, TD__STEP_RECV_REDUCE, peer, buffer, block, count);
}

static void add_local(struct td__schedule *schedule, enum td__step_kind kind,
                      enum td__schedule_buffer buffer, int32_t block, enum td__schedule_buffer from,
                      int32_t from_block, int32_t count)
{
    add(schedule, (struct td__step){.kind = (uint8_t)kind,
                                    .buffer = (uint8_t)buffer,
                                    .from = (uint8_t)from,
                                    .block = block,
                                    .count = count,
                                    .from_block = from_block});
}

void td__copy(struct td__schedule *schedule, enum td__schedule_buffer buffer, int32_t block,
              enum td__schedule_buffer from, int32_t from_block, int32_t count)
{
    add_local(schedule, TD__STEP_COPY, buffer, block, from, from_block, count);
}

void td__reduce(struct td__schedule *schedule, enum td__schedule_buffer buffer, int32_t block,
                enum td__schedule_buffer from, int32_t from_block, int32_t count)
{
    add_local(schedule, TD__STEP_REDUCE, buffer, block, from, from_block, count);
}

void td__end_round(struct td__schedule *schedule)
{
    schedule->rounds++;
}

void td__scratch_block(struct td__schedule *schedule, int32_t like)
{
    int32_t count = schedule->scratch_blocks;
    if (schedule->failed)
        return;
    if ((count & (count - 1)) == 0) { /* room for twice as many, each time a power of two is full */
        size_t room = count ? 2 * (size_t)count : 1;
        int32_t *grown = realloc(schedule->scratch_like, room * sizeof *grown);
        if (!grown) {
            schedule->failed = true;
            return;
        }
        schedule->scratch_like = grown;
    }
    schedule->scratch_like[schedule->scratch_blocks++] = like;
}

bool td__schedule_build(const struct td__algorithm *algorithm, const struct td__plan *plan,
                        struct td__schedule *schedule)
{
    *schedule = (struct td__schedule){.blocks = 1};
    algorithm->build(plan, schedule);
    return !schedule->failed;
}

void td__schedule_free(struct td__schedule *schedule)
{
    free(schedule->steps);
    free(schedule->scratch_like);
    *schedule = (struct td__schedule){0};
}

const char *td_op_kind_name(td_op_kind kind)
{
    static const char *const names[TD_OP_KINDS] = {
        "broadcast",      "reduce",     "all_reduce", "scatter", "gather", "all_gather",
        "reduce_scatter", "all_to_all", "barrier",    "send",    "recv",
    };
    return (unsigned)kind < TD_OP_KINDS ? names[kind] : "unknown";
}

const struct td__algorithm *td__algorithm_find(td_op_kind op, const char *name)
{
    for (const struct td__algorithm *at = td__algorithms; at->name; at++)
        if (at->op == op && !strcmp(at->name, name))
            return at;
    return NULL;
}
