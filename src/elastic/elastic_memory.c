/* Plain memory as a replica: gradients go through a td_reducer with slices, and the program's own function makes the update.
 * The reducer is made anew for other ranks; the memory of the gradients is the program's, and stays. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"

#include <stdlib.h>
#include <string.h>

struct memory_replica {
    struct td__elastic_replica base;
    td_elastic_memory memory; /* its lists are copies */
    td_reducer *reducer;
};

static struct memory_replica *of(struct td__elastic_replica *replica)
{
    return (struct memory_replica *)replica;
}

static td_status memory_bind(struct td__elastic_replica *base, td_group *group, int slices)
{
    struct memory_replica *replica = of(base);
    td_reducer_destroy(replica->reducer);
    replica->reducer = td_reducer_create(replica->memory.gradients, replica->memory.gradient_count,
                                         &(td_reducer_options){.group = group, .slices = slices});
    return replica->reducer ? TD_OK : td__error_status();
}

static td_status memory_compute(struct td__elastic_replica *base, td_elastic *elastic)
{
    struct memory_replica *replica = of(base);
    struct td__elastic_share share = td__elastic_share(elastic, elastic->active_rank);
    for (int k = share.first; k < share.first + share.count; k++) {
        TD_TRY(td__elastic_fetch(elastic, k));
        TD_TRY(td__elastic_slice(elastic, NULL, k));
        for (int i = replica->memory.gradient_count - 1; i >= 0; i--)
            TD_TRY(td_reducer_ready(replica->reducer, i));
        TD_TRY(td_reducer_wait(replica->reducer));
    }
    return TD_OK;
}

/* The next bind() makes another reducer; this waits for the calls of this one. */
static td_status memory_undo(struct td__elastic_replica *base)
{
    td_reducer_destroy(of(base)->reducer);
    of(base)->reducer = NULL;
    return TD_OK;
}

static td_status memory_commit(struct td__elastic_replica *base, td_elastic *elastic)
{
    (void)base;
    return elastic->options.update(td__elastic_committed(elastic), elastic->options.update_arg);
}

static td_status memory_list(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                             struct td__elastic_replica_pieces *list)
{
    const td_elastic_memory *memory = &of(base)->memory;
    bool outcome = kind == TD__PIECES_OUTCOME;
    const td_reducer_buffer *buffers = outcome ? memory->gradients : memory->state;
    int count = outcome ? memory->gradient_count : memory->state_count;
    for (int i = 0; i < count; i++)
        TD_TRY(
            td__pieces_add(list, (struct td__elastic_replica_piece){
                                     .data = buffers[i].data,
                                     .bytes = buffers[i].count * td_dtype_size(buffers[i].dtype)}));
    return TD_OK;
}

static td_status memory_put(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                            struct td__buffer *text)
{
    struct td__elastic_replica_pieces list = {0};
    td_status status = memory_list(base, kind, &list);
    for (int i = 0; i < list.count; i++)
        td__buffer_put_u64(text, list.pieces[i].bytes);
    td__pieces_free(&list);
    return !status && text->failed ? td__fail_nomem("td_elastic") : status;
}

/* The ranks have compared what they put. */
static td_status memory_take(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                             struct td__reader *text)
{
    (void)base, (void)kind, (void)text;
    return TD_OK;
}

static td_status memory_filled(struct td__elastic_replica *base, enum td__elastic_replica_part kind)
{
    (void)base, (void)kind;
    return TD_OK;
}

static void memory_free(struct td__elastic_replica *base)
{
    struct memory_replica *replica = of(base);
    td_reducer_destroy(replica->reducer);
    free((void *)replica->memory.gradients);
    free((void *)replica->memory.state);
    free(replica);
}

static const struct td__elastic_replica_ops memory_ops = {
    .bind = memory_bind,
    .compute = memory_compute,
    .undo = memory_undo,
    .commit = memory_commit,
    .list = memory_list,
    .put = memory_put,
    .take = memory_take,
    .filled = memory_filled,
    .free = memory_free,
};

static const td_reducer_buffer *copy(const td_reducer_buffer *from, int count)
{
    td_reducer_buffer *to = calloc((size_t)count + 1, sizeof *to);
    if (to && count)
        memcpy(to, from, (size_t)count * sizeof *to);
    return to;
}

static td_status check(const td_elastic_memory *memory)
{
    if (memory->gradient_count < 1 || memory->state_count < 1 || !memory->gradients ||
        !memory->state)
        return td_fail(TD_ERR_INVALID,
                       "td_elastic_create: the memory has %d gradients and %d parts of state; it "
                       "needs one of each at least",
                       memory->gradient_count, memory->state_count);
    for (int i = 0; i < memory->gradient_count + memory->state_count; i++) {
        bool gradient = i < memory->gradient_count;
        int index = gradient ? i : i - memory->gradient_count;
        const td_reducer_buffer *buffer = gradient ? &memory->gradients[index]
                                                   : &memory->state[index];
        if ((!buffer->data && buffer->count) || !td_dtype_size(buffer->dtype))
            return td_fail(TD_ERR_INVALID,
                           "td_elastic_create: %s %d has no memory, or no dtype; the reducer's own "
                           "memory would not outlive it",
                           gradient ? "gradient" : "part of state", index);
    }
    return TD_OK;
}

td_status td__memory_replica(td_elastic *elastic, struct td__elastic_replica **replica_out)
{
    const td_elastic_memory *memory = elastic->options.memory;
    TD_TRY(check(memory));
    if (!elastic->options.update)
        return td_fail(TD_ERR_INVALID, "td_elastic_create: plain memory needs the function update");
    struct memory_replica *replica = calloc(1, sizeof *replica);
    if (!replica)
        return td__fail_nomem("td_elastic_create");
    replica->base.ops = &memory_ops;
    replica->memory = *memory;
    replica->memory.gradients = copy(memory->gradients, memory->gradient_count);
    replica->memory.state = copy(memory->state, memory->state_count);
    if (!replica->memory.gradients || !replica->memory.state) {
        memory_free(&replica->base);
        return td__fail_nomem("td_elastic_create");
    }
    *replica_out = &replica->base;
    return TD_OK;
}
