/* A collective call with its context, for the transports of the native backend. */
#ifndef TD_CALL_OPERATION_H
#define TD_CALL_OPERATION_H

#include "base/clock.h"
#include "collective/schedule.h"
#include "reduce/reduction.h"

#include <tandem/backend.h>

/* The group creates and checks it, and passes `call` to the backend; the native backend gets the whole struct
 * with TD__CONTAINER(). In the operations that it derives from this one, call.root is an index in the comm that
 * runs them. A broadcast has its buffer as input and as output. */
struct td__operation {
    td_call call;
    struct td__reduction reduction; /* `dtype` is set for every operation */

    /* Set by the native backend: */
    int called_root;       /* call.root as the caller passed it, a rank of the group */
    uint32_t past;         /* a hash of all earlier calls; see call_history.h */
    td__deadline deadline; /* 0: call.timeout_ms after the first wait, so that a call that does not
                              wait reads no clock */
    const char *group;     /* its name, for error texts */
    int parts; /* the number of the counts of the call, if it has any: ranks of the group */
    /* NULL, or memory of td_alloc() that replaces a buffer. Freed after a failure is published: until then, other ranks
     * may access it. */
    void *copy;
};

/* The size limit of an error text that is sent to other ranks. */
enum { TD__REASON_TEXT = 1024 };

/** "all_reduce #812 on group "world"", in a thread-local buffer. */
const char *td__operation_describe(const struct td__operation *operation);

/* call.detail: what else must be equal on all ranks. The purpose of the call; or, with one of the highest bits, a
 * hash: of the sizes of a list of tensors, of the counts of uneven parts, or of a call on memory of a device of which
 * this is a piece. */
enum { TD__DETAIL_SPLIT = 1, TD__DETAIL_STAGED = 0x20000000, TD__DETAIL_UNEVEN = 0x40000000 };
#define TD__DETAIL_LIST 0x80000000u

/** " for td_group_split()"; "" for 0. */
const char *td__detail_text(uint32_t detail, char text[64]);

/** Of two calls that differ: where the first one has its memory, if the other one has it elsewhere; else "". */
const char *td__place_text(uint32_t detail, uint32_t other);

/** What to do about two calls that differ. */
const char *td__remedy_text(uint32_t detail, uint32_t other, const char *otherwise);

/** "(3, 5, 0, 2)": the first TD__NAMED_COUNTS of `size` counts. Returns `text`. */
enum { TD__NAMED_COUNTS = 8, TD__COUNTS_TEXT = 24 * TD__NAMED_COUNTS };
const char *td__counts_text(const size_t *counts, int size, char text[TD__COUNTS_TEXT]);

/** The sum of the first `parts` counts: the offset of part `parts`. */
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

/** Whether a collective has a root; whether it reduces. */
static inline bool td__has_root(td_op_kind kind)
{
    return kind == TD_OP_BROADCAST || kind == TD_OP_REDUCE || kind == TD_OP_SCATTER ||
           kind == TD_OP_GATHER;
}

static inline bool td__reduces(td_op_kind kind)
{
    return kind == TD_OP_REDUCE || kind == TD_OP_ALL_REDUCE || kind == TD_OP_REDUCE_SCATTER;
}

/** Whether the parts of all_gather or reduce_scatter are uneven; call.count is their sum then. */
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

/** The offset of part `part` in elements; with the number of parts, the size of all. */
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
