/* A collective as the native backend carries it out: the same for shared memory, sockets and both. */
#ifndef TD_CALL_OPERATION_H
#define TD_CALL_OPERATION_H

#include "base/clock.h"
#include "collective/schedule.h"
#include "reduce/reduction.h"

#include <tandem/backend.h>

/* A call with what the library knows of it. The group makes and checks it once, and hands `call` to the backend; the
 * native backend finds the rest around it. In the operations that it makes of this one the root of `call` is an index
 * in the comm that carries them out. A broadcast has its buffer on both sides. */
struct td__operation {
    td_call call;
    struct td__reduction reduction; /* its dtype is the dtype of every operation */

    /* The native backend's: */
    int called_root; /* the rank in the group, as it was called */
    uint32_t past;   /* all calls before it, in one word; see call_history.h */
    td__deadline
        deadline;      /* 0: call.timeout_ms after the first wait; a call that need not wait does
                              not look at the clock */
    const char *group; /* its name, for error texts */
    int parts;         /* ranks of the group: how many counts the call has, where it has any */
};

/* How long the sentence of a failure may be that is sent to other ranks. */
enum { TD__REASON_TEXT = 1024 };

/** "all_reduce #812 on group "world"", into a buffer of the thread's own. */
const char *td__operation_describe(const struct td__operation *operation);

/* Details of calls: their purpose, where all ranks must agree on it and no other member shows it. Or, with one of
 * the highest bits, a hash: of the sizes of a list of tensors, or of the counts of uneven parts. */
enum { TD__DETAIL_SPLIT = 1, TD__DETAIL_UNEVEN = 0x40000000 };
#define TD__DETAIL_LIST 0x80000000u

/** " for td_group_split()"; "" for 0. */
const char *td__detail_text(uint32_t detail, char text[64]);

/** "3, 5, 0, 2": the first TD__NAMED_COUNTS of `size` counts. Returns `text`. */
enum { TD__NAMED_COUNTS = 8, TD__COUNTS_TEXT = 24 * TD__NAMED_COUNTS };
const char *td__counts_text(const size_t *counts, int size, char text[TD__COUNTS_TEXT]);

/** The sum of the first `parts` counts: where part `parts` begins. */
static inline size_t td__sum_counts(const size_t *counts, int parts)
{
    size_t sum = 0;
    for (int i = 0; i < parts; i++)
        sum += counts[i];
    return sum;
}

static inline size_t td__largest_count(const size_t *counts, int size)
{
    size_t largest = 0;
    for (int i = 0; i < size; i++)
        largest = counts[i] > largest ? counts[i] : largest;
    return largest;
}

/** Whether the parts of all_gather or reduce_scatter are uneven; its count is that of the whole then. */
static inline bool td__operation_uneven(const struct td__operation *operation)
{
    return operation->call.input_counts && operation->call.kind != TD_OP_ALL_TO_ALL;
}

/** Elements of part `part` of all_gather or reduce_scatter. */
static inline size_t td__operation_part(const struct td__operation *operation, int part)
{
    return operation->call.input_counts ? operation->call.input_counts[part]
                                        : operation->call.count;
}

/** Where it begins in the whole, in elements; with `part` the number of parts, the whole. */
static inline size_t td__operation_part_start(const struct td__operation *operation, int part)
{
    return operation->call.input_counts ? td__sum_counts(operation->call.input_counts, part)
                                        : operation->call.count * (size_t)part;
}

static inline td__deadline td__operation_deadline(const struct td__operation *operation)
{
    return operation->deadline ? operation->deadline
                               : td__deadline_in_ms(operation->call.timeout_ms);
}

static inline size_t td__operation_element(const struct td__operation *operation)
{
    return td_dtype_size(operation->reduction.dtype);
}

#endif
