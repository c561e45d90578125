/* A collective as the native backend carries it out: the same for shared memory, sockets and both. */
#ifndef TD_CALL_OPERATION_H
#define TD_CALL_OPERATION_H

#include "base/clock.h"
#include "collective/schedule.h"
#include "reduce/reduction.h"

#include <tandem/backend.h>

/* A call with what the native backend knows of it. The root of `call` is the index in the comm that carries it
 * out; its dtype and its operation are in the reduction. A broadcast has its buffer on both sides. */
struct td__operation {
    td_call call;
    int called_root;                /* the rank in the group, as it was called */
    struct td__reduction reduction; /* its dtype is the dtype of every operation */
    uint32_t past;                  /* all calls before it, in one word; see call_history.h */
    td__deadline
        deadline; /* 0: call.timeout_ms after somebody has to wait; a call that need not wait does
                              not look at the clock */
    const char *group; /* its name, for messages */
};

/* How long the sentence of a failure may be that others are told. */
enum { TD__REASON_TEXT = 1024 };

/** "all_reduce #812 on group "world"", into a buffer of the thread's own. */
const char *td__operation_describe(const struct td__operation *operation);

/* Details of calls: what they are made for, where that must agree and nothing else tells. Or, with the
 * highest bit, the sizes of a list of tensors. */
enum { TD__DETAIL_SPLIT = 1 };
#define TD__DETAIL_LIST 0x80000000u

/** " for td_group_split()"; "" for 0. */
const char *td__detail_text(uint32_t detail, char text[64]);

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
