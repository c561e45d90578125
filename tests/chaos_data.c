/* The buffers of a job, and its result. Each rank chooses for each buffer whether it is memory of the library's
 * or of malloc(). */
#include "chaos_job.h"

#include <stdlib.h>
#include <string.h>

/* ---- Buffers --------------------------------------------------------------------------------- */

/* How many elements of input and output this rank has. */
static void measure(const struct job *job, size_t *input, size_t *output)
{
    const struct operation *operation = &job->operation;
    size_t count = operation->count, all = count * (size_t)job->members->size;
    bool root = job->self == operation->root;
    *input = *output = count;
    switch (operation->kind) {
    case KIND_SCATTER:
        *input = root ? all : 0;
        break;
    case KIND_GATHER:
        *output = root ? all : 0;
        break;
    case KIND_ALL_GATHER:
        *output = all;
        break;
    case KIND_REDUCE_SCATTER:
        *input = all;
        break;
    case KIND_ALL_TO_ALL:
        *input = *output = all;
        break;
    case KIND_UNEVEN:
        *input = *output = 0;
        for (int m = 0; m < job->members->size; m++) {
            *input += uneven_count(operation, job->self, m);
            *output += uneven_count(operation, m, job->self);
        }
        break;
    case KIND_BARRIER:
        *input = *output = 0;
        break;
    case KIND_PAIR:
        *input = root ? count : 0;
        *output = job->self == operation->peer ? count : 0;
        break;
    case KIND_FAN_IN:
        *input = root ? 0 : count;
        *output = root ? all : 0;
        break;
    default:
        break;
    }
}

static bool is_in_place(const struct job *job)
{
    enum kind kind = job->operation.kind;
    return kind == KIND_BROADCAST ||
           (job->operation.in_place && (kind == KIND_ALL_REDUCE || kind == KIND_ALL_TO_ALL ||
                                        (kind == KIND_REDUCE && job->self == job->operation.root)));
}

/* Memory of the library's, or of malloc(): each rank as it likes. */
static char *get_memory(size_t bytes, bool shared)
{
    char *memory = shared ? td_alloc(bytes ? bytes : 1) : malloc(bytes ? bytes : 1);
    if (!memory)
        abort();
    return memory;
}

static void put_back(char *memory, bool shared)
{
    if (shared)
        td_free(memory);
    else
        free(memory);
}

static void fill_input(struct job *job)
{
    const struct operation *operation = &job->operation;
    const struct members *members = job->members;
    size_t element = td_dtype_size(operation->dtype), at = 0;
    int rank = members->ranks[job->self];
    bool whole = operation->kind == KIND_SCATTER || operation->kind == KIND_REDUCE_SCATTER ||
                 operation->kind == KIND_ALL_TO_ALL || operation->kind == KIND_UNEVEN;
    if (operation->kind == KIND_BROADCAST && job->self != operation->root) {
        pattern_poison(job->input, job->input_bytes);
        return;
    }
    if (!whole) {
        pattern_fill(job->input, operation, job->input_bytes / element, rank, 0);
        return;
    }
    for (int m = 0; m < members->size && at < job->input_bytes; m++) {
        size_t count = operation->kind == KIND_UNEVEN ? uneven_count(operation, job->self, m)
                                                      : operation->count;
        pattern_fill(job->input + at, operation, count, rank, m);
        at += count * element;
    }
}

void job_prepare(struct job *job)
{
    size_t input, output, element = td_dtype_size(job->operation.dtype);
    uint64_t choice = mix(job->operation.key, (uint64_t)job->members->ranks[job->self]) >> 7;
    measure(job, &input, &output);
    job->input_bytes = input * element;
    job->output_bytes = output * element;
    job->input_shared = choice & 1;
    job->output_shared = choice & 2;
    job->input = get_memory(job->input_bytes, job->input_shared);
    fill_input(job);
    if (is_in_place(job)) {
        job->output = job->input;
        return;
    }
    job->output = get_memory(job->output_bytes, job->output_shared);
    pattern_poison(job->output, job->output_bytes);
}

void job_clean_up(struct job *job)
{
    for (int i = 0; i < job->work_count; i++)
        td_work_release(job->works[i]);
    if (job->output != job->input)
        put_back(job->output, job->output_shared);
    put_back(job->input, job->input_shared);
}

void job_mark(struct job *job)
{
    pattern_poison(job->input, job->input_bytes);
    if (job->output != job->input)
        pattern_poison(job->output, job->output_bytes);
}

bool job_is_marked(const struct job *job)
{
    return pattern_is_poison(job->input, job->input_bytes) &&
           (job->output == job->input || pattern_is_poison(job->output, job->output_bytes));
}

/* ---- Results --------------------------------------------------------------------------------- */

static bool parts_are_right(const struct job *job)
{
    const struct operation *operation = &job->operation;
    size_t element = td_dtype_size(operation->dtype), at = 0;
    bool exchange = operation->kind == KIND_ALL_TO_ALL || operation->kind == KIND_UNEVEN;
    for (int m = 0; m < job->members->size && at < job->output_bytes; m++) {
        size_t count = operation->kind == KIND_UNEVEN ? uneven_count(operation, m, job->self)
                                                      : operation->count;
        if (!pattern_is(job->output + at, operation, count, job->members->ranks[m],
                        exchange ? job->self : 0))
            return false;
        at += count * element;
    }
    return true;
}

bool job_result_is_right(const struct job *job)
{
    const struct operation *operation = &job->operation;
    const struct members *members = job->members;
    size_t count = operation->count;
    int root = members->ranks[operation->root];
    switch (operation->kind) {
    case KIND_BROADCAST:
        return pattern_is(job->output, operation, count, root, 0);
    case KIND_REDUCE:
        if (job->self != operation->root)
            return pattern_is_poison(job->output, job->output_bytes);
        return pattern_is_reduced(job->output, operation, count, members, 0);
    case KIND_ALL_REDUCE:
        return pattern_is_reduced(job->output, operation, count, members, 0);
    case KIND_SCATTER:
        return pattern_is(job->output, operation, count, root, job->self);
    case KIND_REDUCE_SCATTER:
        return pattern_is_reduced(job->output, operation, count, members, job->self);
    case KIND_GATHER:
    case KIND_ALL_GATHER:
    case KIND_ALL_TO_ALL:
    case KIND_UNEVEN:
        return parts_are_right(job);
    default:
        return true;
    }
}

/* Not where it was in place, of course. */
bool job_input_is_whole(struct job *job)
{
    if (job->output == job->input || !job->input_bytes)
        return true;
    struct job again = *job;
    again.input = malloc(job->input_bytes);
    if (!again.input)
        return true;
    fill_input(&again);
    bool whole = !memcmp(again.input, job->input, job->input_bytes);
    free(again.input);
    return whole;
}
