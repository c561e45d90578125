/* The checks that all calls on tensors share. They come first, so that a wrong argument starts
 * nothing and leaves the group in order. */
#include "base/fail.h"
#include "dist/tensor_call.h"
#include "group/process_group.h"

#include <inttypes.h>
#include <stdio.h>

td_status td__check_member(const char *call, td_group **group, struct td__member *member)
{
    td_group *entered = td__group_enter(*group, call);
    if (!entered)
        return TD_ERR_STATE;
    *group = entered;
    *member = (struct td__member){
        .rank = entered->rank, .size = entered->size, .global = entered->ranks[entered->rank]};
    return TD_OK;
}

td_group *td__hold_group(const char *call, td_group *group)
{
    td_group *entered = td__group_enter(group, call);
    if (entered)
        td__group_use(entered);
    return entered;
}

void td__release_group(td_group *group)
{
    td__group_unuse(group);
}

static td_status check_named(const char *call, const char *name, const char *index,
                             const td_tensor *tensor, int use)
{
    if (!tensor) { /* most likely what failed last should have made it */
        const char *before = td__error_text();
        return td_fail(TD_ERR_INVALID, "%s: %s%s is NULL%s%s", call, name, index,
                       *before ? "; the last failure before: " : "", before);
    }
    if ((use & TD__WRITE) && td__layout_repeats(&tensor->layout))
        return td_fail(TD_ERR_INVALID,
                       "%s: elements of %s%s share memory, its strides are %s; pass a td_clone() "
                       "of it",
                       call, name, index,
                       td__shape_text(tensor->layout.strides, tensor->layout.ndim));
    return TD_OK;
}

td_status td__check_tensor(const char *call, const char *name, const td_tensor *tensor, int use)
{
    return check_named(call, name, "", tensor, use);
}

td_status td__check_list(const char *call, const char *name, td_tensor *const *tensors, int count,
                         int expected, int use, const char *like_name, const td_tensor *like)
{
    if (count != expected)
        return td_fail(TD_ERR_INVALID,
                       "%s: %s has %d tensors, but must have %d, one for each rank of the group",
                       call, name, count, expected);
    if (!tensors)
        return td_fail(TD_ERR_INVALID, "%s: %s is NULL", call, name);
    for (int i = 0; i < count; i++) {
        char index[16];
        snprintf(index, sizeof index, "[%d]", i);
        TD_TRY(check_named(call, name, index, tensors[i], use));
        if (!like)
            continue;
        const td_tensor *tensor = tensors[i];
        if (td_tensor_dtype(tensor) != td_tensor_dtype(like) ||
            td_tensor_numel(tensor) != td_tensor_numel(like))
            return td_fail(TD_ERR_INVALID,
                           "%s: %s[%d] has %" PRId64 " elements of %s, but %s has %" PRId64
                           " of %s; all must be the same",
                           call, name, i, td_tensor_numel(tensor),
                           td_dtype_name(td_tensor_dtype(tensor)), like_name, td_tensor_numel(like),
                           td_dtype_name(td_tensor_dtype(like)));
    }
    return TD_OK;
}

td_status td__check_parts(const char *call, const char *whole_name, const td_tensor *whole,
                          const char *part_name, const td_tensor *part, int size)
{
    if (td_tensor_dtype(whole) != td_tensor_dtype(part))
        return td_fail(TD_ERR_INVALID, "%s: %s has dtype %s, but %s has %s", call, whole_name,
                       td_dtype_name(td_tensor_dtype(whole)), part_name,
                       td_dtype_name(td_tensor_dtype(part)));
    int64_t expected;
    if (__builtin_mul_overflow(td_tensor_numel(part), size, &expected) ||
        td_tensor_numel(whole) != expected)
        return td_fail(TD_ERR_INVALID,
                       "%s: %s has %" PRId64 " elements and %s has %" PRId64
                       "; with %d ranks, the first must have %d times as many",
                       call, whole_name, td_tensor_numel(whole), part_name, td_tensor_numel(part),
                       size, size);
    return TD_OK;
}
