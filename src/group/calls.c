/* The calls on buffers: each checks its arguments, before anything is started, and hands a td_call on. */
#include "base/fail.h"
#include "group/process_group.h"
#include "reduce/reduction.h"

/* What one call was given, and what is known about it so far. */
struct checked {
    td_group *group;
    td_call call;
    size_t element;
};

static td_status begin(struct checked *checked, td_group *group, td_op_kind kind, td_dtype dtype,
                       size_t count, const void *input, void *output)
{
    checked->group = td__group_enter(group, td_op_kind_name(kind));
    if (!checked->group)
        return TD_ERR_STATE;
    checked->element = td_dtype_size(dtype);
    if (!checked->element)
        return td_fail(TD_ERR_INVALID, "%s: %d is no dtype", td_op_kind_name(kind), (int)dtype);
    size_t bytes;
    if (__builtin_mul_overflow(count, checked->element, &bytes) ||
        __builtin_mul_overflow(bytes, (size_t)checked->group->size, &bytes) || bytes > SIZE_MAX / 4)
        return td_fail(TD_ERR_INVALID, "%s: %zu elements are more than memory can hold",
                       td_op_kind_name(kind), count);
    checked->call = (td_call){
        .kind = kind,
        .input = input,
        .output = output,
        .count = count,
        .dtype = dtype,
        .root = -1,
        .peer = -1,
    };
    return TD_OK;
}

/* A root or another rank, given as a rank of the world. */
static td_status check_rank(const struct checked *checked, const char *role, int global, int *rank)
{
    const td_group *group = checked->group;
    *rank = td_get_group_rank(group, global);
    if (*rank >= 0)
        return TD_OK;
    const char *name = td_op_kind_name(checked->call.kind);
    if (global < 0 || global >= group->root->size)
        return td_fail(TD_ERR_INVALID, "%s: %s %d is out of range; ranks are 0 to %d", name, role,
                       global, group->root->size - 1);
    return td_fail(TD_ERR_INVALID, "%s: %s %d is not in group \"%s\"", name, role, global,
                   group->name);
}

static td_status check_op(const struct checked *checked)
{
    struct td__reduction reduction;
    td_status status = td__reduction_of(checked->call.op, checked->call.dtype, &reduction);
    return status ? td_fail(status, "%s: %s", td_op_kind_name(checked->call.kind), td_last_error())
                  : TD_OK;
}

static td_status check_pointer(const struct checked *checked, const char *role, const void *memory,
                               size_t elements)
{
    const char *name = td_op_kind_name(checked->call.kind);
    if (elements && !memory)
        return td_fail(TD_ERR_INVALID, "%s: the %s is NULL, and should have %zu elements", name,
                       role, elements);
    size_t align = checked->element > 8 ? checked->element / 2 : checked->element;
    if (checked->call.dtype == TD_COMPLEX64)
        align = 4;
    if (elements && (uintptr_t)memory % align)
        return td_fail(TD_ERR_INVALID, "%s: the %s at %p is not aligned to its %s elements", name,
                       role, memory, td_dtype_name(checked->call.dtype));
    return TD_OK;
}

/* Input and output of these numbers of elements may only meet where `offset` elements lie between
 * their starts; a negative one: nowhere. */
static td_status check_overlap(const struct checked *checked, size_t inputs, size_t outputs,
                               int64_t input_offset, int64_t output_offset)
{
    const char *input = checked->call.input, *output = checked->call.output;
    size_t e = checked->element;
    if (!inputs || !outputs || !input || !output)
        return TD_OK;
    uintptr_t in = (uintptr_t)input, out = (uintptr_t)output;
    if (in >= out + outputs * e || out >= in + inputs * e)
        return TD_OK;
    if (input_offset >= 0 && in == out + (uintptr_t)input_offset * e)
        return TD_OK;
    if (output_offset >= 0 && out == in + (uintptr_t)output_offset * e)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "%s: input and output overlap, and not in the way that stands for «in place»",
                   td_op_kind_name(checked->call.kind));
}

static td_status check_buffers(const struct checked *checked, size_t inputs, size_t outputs,
                               int64_t input_offset, int64_t output_offset)
{
    TD_TRY(check_pointer(checked, "input", checked->call.input, inputs));
    TD_TRY(check_pointer(checked, "output", checked->call.output, outputs));
    return check_overlap(checked, inputs, outputs, input_offset, output_offset);
}

/* ---- Collectives ----------------------------------------------------------------------------- */

td_status td__group_broadcast(td_group *group, void *data, size_t count, td_dtype dtype, int root,
                              uint32_t detail, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_BROADCAST, dtype, count, data, data));
    c.call.detail = detail;
    TD_TRY(check_rank(&c, "root", root, &c.call.root));
    TD_TRY(check_buffers(&c, count, count, 0, 0));
    return td__group_run(c.group, &c.call, work);
}

td_status td_group_broadcast(td_group *group, void *data, size_t count, td_dtype dtype, int root,
                             td_work **work)
{
    return td__group_broadcast(group, data, count, dtype, root, 0, work);
}

td_status td__group_all_reduce(td_group *group, const void *input, void *output, size_t count,
                               td_dtype dtype, td_reduce_op op, uint32_t detail, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_ALL_REDUCE, dtype, count, input, output));
    c.call.detail = detail;
    c.call.op = op;
    TD_TRY(check_op(&c));
    TD_TRY(check_buffers(&c, count, count, 0, 0));
    return td__group_run(c.group, &c.call, work);
}

td_status td_group_all_reduce(td_group *group, const void *input, void *output, size_t count,
                              td_dtype dtype, td_reduce_op op, td_work **work)
{
    return td__group_all_reduce(group, input, output, count, dtype, op, 0, work);
}

td_status td_group_reduce(td_group *group, const void *input, void *output, size_t count,
                          td_dtype dtype, td_reduce_op op, int root, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_REDUCE, dtype, count, input, output));
    c.call.op = op;
    TD_TRY(check_op(&c));
    TD_TRY(check_rank(&c, "root", root, &c.call.root));
    bool is_root = c.call.root == c.group->rank;
    if (!is_root)
        c.call.output = NULL;
    TD_TRY(check_buffers(&c, count, is_root ? count : 0, 0, 0));
    return td__group_run(c.group, &c.call, work);
}

/* Scatter and gather: the root has the parts of all on one side, every rank one part on the other. */
static td_status run_parts(td_group *group, td_op_kind kind, const void *input, void *output,
                           size_t count, td_dtype dtype, int root, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, kind, dtype, count, input, output));
    TD_TRY(check_rank(&c, "root", root, &c.call.root));
    bool is_root = c.call.root == c.group->rank, scatter = kind == TD_OP_SCATTER;
    if (!is_root && scatter)
        c.call.input = NULL;
    else if (!is_root)
        c.call.output = NULL;
    size_t all = is_root ? count * (size_t)c.group->size : 0;
    int64_t own = (int64_t)(count * (size_t)c.group->rank);
    TD_TRY(scatter ? check_buffers(&c, all, count, -1, own)
                   : check_buffers(&c, count, all, own, -1));
    return td__group_run(c.group, &c.call, work);
}

td_status td_group_scatter(td_group *group, const void *input, void *output, size_t count,
                           td_dtype dtype, int root, td_work **work)
{
    return run_parts(group, TD_OP_SCATTER, input, output, count, dtype, root, work);
}

td_status td_group_gather(td_group *group, const void *input, void *output, size_t count,
                          td_dtype dtype, int root, td_work **work)
{
    return run_parts(group, TD_OP_GATHER, input, output, count, dtype, root, work);
}

td_status td__group_all_gather(td_group *group, const void *input, void *output, size_t count,
                               td_dtype dtype, uint32_t detail, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_ALL_GATHER, dtype, count, input, output));
    c.call.detail = detail;
    TD_TRY(check_buffers(&c, count, count * (size_t)c.group->size,
                         (int64_t)(count * (size_t)c.group->rank), -1));
    return td__group_run(c.group, &c.call, work);
}

td_status td_group_all_gather(td_group *group, const void *input, void *output, size_t count,
                              td_dtype dtype, td_work **work)
{
    return td__group_all_gather(group, input, output, count, dtype, 0, work);
}

td_status td__group_reduce_scatter(td_group *group, const void *input, void *output, size_t count,
                                   td_dtype dtype, td_reduce_op op, uint32_t detail, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_REDUCE_SCATTER, dtype, count, input, output));
    c.call.detail = detail;
    c.call.op = op;
    TD_TRY(check_op(&c));
    TD_TRY(check_buffers(&c, count * (size_t)c.group->size, count, -1,
                         (int64_t)(count * (size_t)c.group->rank)));
    return td__group_run(c.group, &c.call, work);
}

td_status td_group_reduce_scatter(td_group *group, const void *input, void *output, size_t count,
                                  td_dtype dtype, td_reduce_op op, td_work **work)
{
    return td__group_reduce_scatter(group, input, output, count, dtype, op, 0, work);
}

td_status td_group_all_to_all(td_group *group, const void *input, void *output, size_t count,
                              td_dtype dtype, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_ALL_TO_ALL, dtype, count, input, output));
    size_t all = count * (size_t)c.group->size;
    TD_TRY(check_buffers(&c, all, all, 0, 0));
    return td__group_run(c.group, &c.call, work);
}

static td_status total(const struct checked *c, const char *role, const size_t *counts, size_t *sum)
{
    *sum = 0;
    for (int i = 0; i < c->group->size; i++)
        if (__builtin_add_overflow(*sum, counts[i], sum) || *sum > SIZE_MAX / 4 / c->element)
            return td_fail(TD_ERR_INVALID,
                           "all_to_all: the %s counts are more than memory can hold", role);
    return TD_OK;
}

td_status td_group_all_to_all_v(td_group *group, const void *input, const size_t *input_counts,
                                void *output, const size_t *output_counts, td_dtype dtype,
                                td_work **work)
{
    struct checked c;
    size_t inputs, outputs;
    TD_TRY(begin(&c, group, TD_OP_ALL_TO_ALL, dtype, 0, input, output));
    if (!input_counts || !output_counts)
        return td_fail(TD_ERR_INVALID, "all_to_all: the list of %s counts is NULL",
                       input_counts ? "output" : "input");
    TD_TRY(total(&c, "input", input_counts, &inputs));
    TD_TRY(total(&c, "output", output_counts, &outputs));
    TD_TRY(check_buffers(&c, inputs, outputs, -1, -1));
    if (input_counts[c.group->rank] != output_counts[c.group->rank])
        return td_fail(TD_ERR_INVALID,
                       "all_to_all: rank %d sends %zu elements to itself and expects %zu",
                       c.group->ranks[c.group->rank], input_counts[c.group->rank],
                       output_counts[c.group->rank]);
    c.call.input_counts = input_counts;
    c.call.output_counts = output_counts;
    return td__group_run(c.group, &c.call, work);
}

td_status td_group_barrier(td_group *group, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_BARRIER, TD_U8, 0, NULL, NULL));
    return td__group_run(c.group, &c.call, work);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static td_status check_message(struct checked *c, const void *data, int other, int tag,
                               const char *role)
{
    TD_TRY(check_pointer(c, "buffer", data, c->call.count));
    if (c->call.kind == TD_OP_RECV && other == TD_ANY_SOURCE)
        c->call.peer = TD_ANY_SOURCE;
    else
        TD_TRY(check_rank(c, role, other, &c->call.peer));
    if (c->call.peer == c->group->rank)
        return td_fail(TD_ERR_INVALID, "%s: %s %d is this rank itself",
                       td_op_kind_name(c->call.kind), role, other);
    if (tag == TD_ANY_TAG && c->call.kind == TD_OP_SEND)
        return td_fail(TD_ERR_INVALID, "%s: the tag is %d; tags are 0 and above",
                       td_op_kind_name(c->call.kind), tag);
    c->call.tag = tag;
    return TD_OK;
}

td_status td__group_send(td_group *group, const void *data, size_t count, td_dtype dtype, int dst,
                         int tag, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_SEND, dtype, count, data, NULL));
    TD_TRY(check_message(&c, data, dst, tag, "destination"));
    return td__group_post(c.group, &c.call, work);
}

td_status td__group_recv(td_group *group, void *data, size_t count, td_dtype dtype, int src,
                         int tag, td_work **work)
{
    struct checked c;
    TD_TRY(begin(&c, group, TD_OP_RECV, dtype, count, NULL, data));
    TD_TRY(check_message(&c, data, src, tag, "source"));
    return td__group_post(c.group, &c.call, work);
}

/* Tags below TD_ANY_TAG are the library's own. */
static td_status check_tag(const char *call, int tag)
{
    return tag < TD_ANY_TAG
               ? td_fail(TD_ERR_INVALID, "%s: the tag is %d; tags are 0 and above", call, tag)
               : TD_OK;
}

td_status td_group_send(td_group *group, const void *data, size_t count, td_dtype dtype, int dst,
                        int tag, td_work **work)
{
    TD_TRY(check_tag("send", tag));
    return td__group_send(group, data, count, dtype, dst, tag, work);
}

td_status td_group_recv(td_group *group, void *data, size_t count, td_dtype dtype, int src, int tag,
                        td_work **work)
{
    TD_TRY(check_tag("recv", tag));
    return td__group_recv(group, data, count, dtype, src, tag, work);
}
