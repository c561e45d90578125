/* The calls on buffers: each becomes a td_call, which is checked here once, before anything is started. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "call/operation.h"
#include "group/process_group.h"

/* ---- Checks ---------------------------------------------------------------------------------- */

static td_status check_count(const td_group *group, const td_call *call)
{
    TD_TRY(td__check_dtype(td_op_kind_name(call->kind), call->dtype));
    size_t element = td_dtype_size(call->dtype), bytes;
    if (__builtin_mul_overflow(call->count, element, &bytes) ||
        __builtin_mul_overflow(bytes, (size_t)group->size, &bytes) || bytes > SIZE_MAX / 4)
        return td_fail(TD_ERR_INVALID, "%s: %zu elements are more than memory can hold",
                       td_op_kind_name(call->kind), call->count);
    return TD_OK;
}

/* A root or another rank, given as a rank of the world. */
static td_status check_rank(const td_group *group, const td_call *call, const char *role,
                            int global, int *rank)
{
    *rank = td_get_group_rank(group, global);
    if (*rank >= 0)
        return TD_OK;
    const char *name = td_op_kind_name(call->kind);
    if (global < 0 || global >= group->root->size)
        return td_fail(TD_ERR_INVALID, "%s: %s %d is out of range; ranks are 0 to %d", name, role,
                       global, group->root->size - 1);
    return td_fail(TD_ERR_INVALID, "%s: %s %d is not in group \"%s\"", name, role, global,
                   group->name);
}

static td_status set_reduction(struct td__operation *operation)
{
    const td_call *call = &operation->call;
    if (!td__reduces(call->kind)) {
        operation->reduction = (struct td__reduction){
            .dtype = call->dtype, .op = TD_SUM, .factor = 1};
        return TD_OK;
    }
    td_status status = td__reduction_of(call->op, call->dtype, &operation->reduction);
    return status ? td_fail(status, "%s: %s", td_op_kind_name(call->kind), td__error_text())
                  : TD_OK;
}

static td_status check_pointer(const td_call *call, const char *role, const void *memory,
                               size_t elements)
{
    size_t element = td_dtype_size(call->dtype);
    size_t align = element > 8 ? element / 2 : element;
    if (call->dtype == TD_COMPLEX64)
        align = 4;
    if (!elements || (memory && (uintptr_t)memory % align == 0))
        return TD_OK;
    if (!memory)
        return td_fail(TD_ERR_INVALID, "%s: the %s is NULL, and should have %zu elements",
                       td_op_kind_name(call->kind), role, elements);
    return td_fail(TD_ERR_INVALID, "%s: the %s at %p is not aligned to its %s elements",
                   td_op_kind_name(call->kind), role, memory, td_dtype_name(call->dtype));
}

/* How many elements this rank has on each side. */
struct sides {
    size_t inputs, outputs;
};

bool td__call_overlaps(const td_group *group, const td_call *call, size_t input_bytes,
                       size_t output_bytes)
{
    uintptr_t in = (uintptr_t)call->input, out = (uintptr_t)call->output;
    size_t rank = (size_t)group->rank;
    if (!input_bytes || !output_bytes || in >= out + output_bytes || out >= in + input_bytes)
        return false;
    if (call->input_counts && call->kind == TD_OP_ALL_TO_ALL)
        return true;
    if (call->input_counts) {
        size_t own = td__sum_counts(call->input_counts, group->rank) * td_dtype_size(call->dtype);
        return input_bytes <= output_bytes ? in != out + own : out != in + own;
    }
    if (input_bytes <= output_bytes)
        return in != out + (input_bytes < output_bytes ? rank * input_bytes : 0);
    return out != in + rank * output_bytes;
}

static td_status check_overlap(const td_group *group, const td_call *call, struct sides sides)
{
    size_t element = td_dtype_size(call->dtype);
    if (!td__call_overlaps(group, call, sides.inputs * element, sides.outputs * element))
        return TD_OK;
    return td_fail(
        TD_ERR_INVALID,
        "%s: input and output overlap; for in-place pass the same pointer or this rank's "
        "own slice",
        td_op_kind_name(call->kind));
}

static td_status total(const td_group *group, const td_call *call, const char *role,
                       const size_t *counts, size_t *sum)
{
    *sum = 0;
    for (int i = 0; i < group->size; i++)
        if (__builtin_add_overflow(*sum, counts[i], sum) ||
            *sum > SIZE_MAX / 4 / td_dtype_size(call->dtype))
            return td_fail(TD_ERR_INVALID, "%s: the %scounts are more than memory can hold",
                           td_op_kind_name(call->kind), role);
    return TD_OK;
}

static td_status count_uneven(const td_group *group, const td_call *call, struct sides *sides)
{
    TD_TRY(total(group, call, "input ", call->input_counts, &sides->inputs));
    TD_TRY(total(group, call, "output ", call->output_counts, &sides->outputs));
    size_t sends = call->input_counts[group->rank], expects = call->output_counts[group->rank];
    if (sends != expects)
        return td_fail(TD_ERR_INVALID,
                       "all_to_all: rank %d sends %zu elements to itself and expects %zu",
                       group->ranks[group->rank], sends, expects);
    return TD_OK;
}

/* all_gather and reduce_scatter. A hash distinguishes lists with the same sum. */
static td_status count_parts(const td_group *group, td_call *call, struct sides *sides)
{
    const size_t *counts = call->input_counts;
    uint64_t hash = 0;
    TD_TRY(total(group, call, "", counts, &call->count));
    for (int i = 0; i < group->size; i++) {
        hash = (hash ^ counts[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    call->detail = (uint32_t)hash >> 2 | TD__DETAIL_UNEVEN;
    sides->inputs = sides->outputs = call->count;
    *(call->kind == TD_OP_ALL_GATHER ? &sides->inputs : &sides->outputs) = counts[group->rank];
    return TD_OK;
}

/* Scatter and gather: the root has the parts of all ranks on one side, and every rank has one part on the other. A
 * buffer that this rank does not use becomes NULL. */
static td_status check_collective(const td_group *group, struct td__operation *operation, int root)
{
    td_call *call = &operation->call;
    size_t one = call->count, all = one * (size_t)group->size;
    struct sides sides = {one, one};
    bool rooted = td__has_root(call->kind);
    TD_TRY(set_reduction(operation));
    if (rooted)
        TD_TRY(check_rank(group, call, "root", root, &call->root));
    if (call->kind == TD_OP_SCATTER || call->kind == TD_OP_REDUCE_SCATTER ||
        call->kind == TD_OP_ALL_TO_ALL)
        sides.inputs = all;
    if (call->kind == TD_OP_GATHER || call->kind == TD_OP_ALL_GATHER ||
        call->kind == TD_OP_ALL_TO_ALL)
        sides.outputs = all;
    if (rooted && call->root != group->rank && call->kind == TD_OP_SCATTER) {
        call->input = NULL;
        sides.inputs = 0;
    } else if (rooted && call->root != group->rank && call->kind != TD_OP_BROADCAST) {
        call->output = NULL;
        sides.outputs = 0;
    }
    if (call->input_counts)
        TD_TRY(call->kind == TD_OP_ALL_TO_ALL ? count_uneven(group, call, &sides)
                                              : count_parts(group, call, &sides));
    TD_TRY(check_pointer(call, "input", call->input, sides.inputs));
    TD_TRY(check_pointer(call, "output", call->output, sides.outputs));
    return check_overlap(group, call, sides);
}

td_status td__check_message(const td_group *group, td_call *call, int other)
{
    bool sends = call->kind == TD_OP_SEND;
    const char *name = td_op_kind_name(call->kind),
               *role = sends ? "destination rank" : "source rank";
    if (!sends && other == TD_ANY_SOURCE)
        call->peer = TD_ANY_SOURCE;
    else
        TD_TRY(check_rank(group, call, role, other, &call->peer));
    if (call->peer == group->rank)
        return td_fail(TD_ERR_INVALID, "%s: %s %d is this rank itself; a rank cannot %s itself",
                       name, role, other, sends ? "send to" : "receive from");
    return TD_OK;
}

td_status td__check_tag(const td_call *call)
{
    if (call->tag >= 0 || (call->kind == TD_OP_RECV && call->tag == TD_ANY_TAG))
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: tag %d is negative; tags are 0 and above",
                   td_op_kind_name(call->kind), call->tag);
}

td_status td__group_call(td_group *group, struct td__operation *operation, int rank, td_work **work)
{
    td_call *call = &operation->call;
    call->root = call->peer = -1;
    if (call->kind == TD_OP_BARRIER) {
        set_reduction(operation);
        return td__group_run(group, operation, work);
    }
    TD_TRY(check_count(group, call));
    if (call->kind >= TD_OP_SEND) {
        TD_TRY(
            check_pointer(call, "buffer", call->input ? call->input : call->output, call->count));
        TD_TRY(td__check_message(group, call, rank));
        if (call->device && !td__part_prepare(group, call))
            return td__error_status();
        return td__group_post(group, call, work);
    }
    TD_TRY(check_collective(group, operation, rank));
    if (call->device && !td__part_prepare(group, call))
        return td__error_status();
    return td__group_run(group, operation, work);
}

/* ---- The calls ------------------------------------------------------------------------------- */

/* Sets the fields one by one, but those that td__group_call() sets: clearing the whole struct would take too long for a
 * small call. */
static inline void set_call(struct td__operation *operation, td_op_kind kind, void *output,
                            const void *input, size_t count, td_dtype dtype, td_reduce_op op)
{
    td_call *call = &operation->call;
    call->kind = kind;
    call->input = input;
    call->output = output;
    call->count = count;
    call->input_counts = call->output_counts = NULL;
    call->dtype = dtype;
    call->op = op;
    call->tag = 0;
    call->timeout_ms = 0;
    call->sequence = 0;
    call->detail = 0;
    call->device = NULL;
    call->stream = NULL;
}

static td_status enter_and_call(td_group *group, struct td__operation *operation, int rank,
                                td_work **work)
{
    group = td__group_enter(group, td_op_kind_name(operation->call.kind));
    return group ? td__group_call(group, operation, rank, work) : TD_ERR_STATE;
}

/* A call without parts; `rank` is the root, or -1. */
static inline td_status call_even(td_op_kind kind, void *output, const void *input, size_t count,
                                  td_dtype dtype, td_reduce_op op, int rank, td_group *group,
                                  td_work **work)
{
    struct td__operation operation;
    set_call(&operation, kind, output, input, count, dtype, op);
    return enter_and_call(group, &operation, rank, work);
}

static inline td_status call_message(td_op_kind kind, void *output, const void *input, size_t count,
                                     td_dtype dtype, int rank, int tag, td_group *group,
                                     td_work **work)
{
    struct td__operation operation;
    set_call(&operation, kind, output, input, count, dtype, TD_SUM);
    operation.call.tag = tag;
    TD_TRY(td__check_tag(&operation.call));
    return enter_and_call(group, &operation, rank, work);
}

td_status td_group_broadcast(void *data, size_t count, td_dtype dtype, int src, td_group *group,
                             td_work **work)
{
    return call_even(TD_OP_BROADCAST, data, data, count, dtype, TD_SUM, src, group, work);
}

td_status td_group_all_reduce(void *output, const void *input, size_t count, td_dtype dtype,
                              td_reduce_op op, td_group *group, td_work **work)
{
    return call_even(TD_OP_ALL_REDUCE, output, input, count, dtype, op, -1, group, work);
}

td_status td_group_reduce(void *output, const void *input, size_t count, td_dtype dtype, int dst,
                          td_reduce_op op, td_group *group, td_work **work)
{
    return call_even(TD_OP_REDUCE, output, input, count, dtype, op, dst, group, work);
}

td_status td_group_scatter(void *output, const void *input, size_t count, td_dtype dtype, int src,
                           td_group *group, td_work **work)
{
    return call_even(TD_OP_SCATTER, output, input, count, dtype, TD_SUM, src, group, work);
}

td_status td_group_gather(void *output, const void *input, size_t count, td_dtype dtype, int dst,
                          td_group *group, td_work **work)
{
    return call_even(TD_OP_GATHER, output, input, count, dtype, TD_SUM, dst, group, work);
}

td_status td_group_all_gather(void *output, const void *input, size_t count, td_dtype dtype,
                              td_group *group, td_work **work)
{
    return call_even(TD_OP_ALL_GATHER, output, input, count, dtype, TD_SUM, -1, group, work);
}

td_status td_group_reduce_scatter(void *output, const void *input, size_t count, td_dtype dtype,
                                  td_reduce_op op, td_group *group, td_work **work)
{
    return call_even(TD_OP_REDUCE_SCATTER, output, input, count, dtype, op, -1, group, work);
}

td_status td_group_all_to_all(void *output, const void *input, size_t count, td_dtype dtype,
                              td_group *group, td_work **work)
{
    return call_even(TD_OP_ALL_TO_ALL, output, input, count, dtype, TD_SUM, -1, group, work);
}

td_status td_group_all_to_all_v(void *output, const void *input, const size_t *output_counts,
                                const size_t *input_counts, td_dtype dtype, td_group *group,
                                td_work **work)
{
    if (!input_counts || !output_counts)
        return td_fail(TD_ERR_INVALID, "all_to_all: the list of %s counts is NULL",
                       input_counts ? "output" : "input");
    struct td__operation operation;
    set_call(&operation, TD_OP_ALL_TO_ALL, output, input, 0, dtype, TD_SUM);
    operation.call.input_counts = input_counts;
    operation.call.output_counts = output_counts;
    return enter_and_call(group, &operation, -1, work);
}

/* Equal parts make an even call: all ranks pass the same list, so all of them decide the same. */
static td_status call_with_parts(struct td__operation *operation, const size_t *counts,
                                 td_group *group, td_work **work)
{
    td_call *call = &operation->call;
    group = td__group_enter(group, td_op_kind_name(call->kind));
    if (!group)
        return TD_ERR_STATE;
    if (!counts)
        return td_fail(TD_ERR_INVALID, "%s: the list of counts is NULL",
                       td_op_kind_name(call->kind));
    bool even = true;
    for (int i = 1; i < group->size && even; i++)
        even = counts[i] == counts[0];
    if (even)
        call->count = counts[0];
    else
        call->input_counts = call->output_counts = counts;
    return td__group_call(group, operation, -1, work);
}

td_status td_group_all_gather_v(void *output, const void *input, const size_t *counts,
                                td_dtype dtype, td_group *group, td_work **work)
{
    struct td__operation operation;
    set_call(&operation, TD_OP_ALL_GATHER, output, input, 0, dtype, TD_SUM);
    return call_with_parts(&operation, counts, group, work);
}

td_status td_group_reduce_scatter_v(void *output, const void *input, const size_t *counts,
                                    td_dtype dtype, td_reduce_op op, td_group *group,
                                    td_work **work)
{
    struct td__operation operation;
    set_call(&operation, TD_OP_REDUCE_SCATTER, output, input, 0, dtype, op);
    return call_with_parts(&operation, counts, group, work);
}

td_status td_group_barrier(td_group *group, td_work **work)
{
    return call_even(TD_OP_BARRIER, NULL, NULL, 0, TD_U8, TD_SUM, -1, group, work);
}

td_status td_group_send(const void *data, size_t count, td_dtype dtype, int dst, int tag,
                        td_group *group, td_work **work)
{
    return call_message(TD_OP_SEND, NULL, data, count, dtype, dst, tag, group, work);
}

td_status td_group_recv(void *data, size_t count, td_dtype dtype, int src, int tag, td_group *group,
                        td_work **work)
{
    return call_message(TD_OP_RECV, data, NULL, count, dtype, src, tag, group, work);
}
