/* Objects: byte strings whose lengths the others do not know.
 *
 * Each call is two operations: the lengths first, then the bytes, one after another in one buffer.
 * Scatter and gather move the bytes by an all_to_all with uneven parts, most of them empty, so that
 * no object is padded to the length of the longest; all_gather has to pad. Between the two the group is kept from
 * being destroyed. */
#include "base/fail.h"
#include "dist/tensor_call.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- Buffers of objects ---------------------------------------------------------------------- */

td_status td__objects_check(const char *call, const char *name, const td_bytes *objects, int count)
{
    if (count < 0 || (count > 0 && !objects))
        return td_fail(TD_ERR_INVALID, "%s: %s is %s", call, name,
                       count < 0 ? "a list of a negative length" : "NULL");
    for (int i = 0; i < count; i++)
        if (objects[i].size && !objects[i].data)
            return td_fail(TD_ERR_INVALID, "%s: %s[%d] has %zu bytes, but its data is NULL", call,
                           name, i, objects[i].size);
    return TD_OK;
}

static td_status check_length(const char *call, int count, int size)
{
    if (count == size)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "%s: objects has %d entries, but must have %d, one for each rank of the group",
                   call, count, size);
}

td_status td__objects_add_up(const char *call, const uint64_t *sizes, int count, size_t *total)
{
    uint64_t sum = 0;
    for (int i = 0; i < count; i++)
        if (__builtin_add_overflow(sum, sizes[i], &sum))
            sum = UINT64_MAX;
    if (sum > (uint64_t)SIZE_MAX / 2)
        return td_fail(TD_ERR_MISMATCH, "%s: the objects have %" PRIu64 " bytes, which cannot be",
                       call, sum);
    *total = (size_t)sum;
    return TD_OK;
}

/* A buffer of td_alloc(); of 1 byte where none are needed, so that NULL always is a failure. */
static td_status make_body(const char *call, size_t bytes, char **body)
{
    *body = td_alloc(bytes ? bytes : 1);
    if (*body)
        return TD_OK;
    return td_fail(TD_ERR_NOMEM, "%s: no memory for objects of %zu bytes", call, bytes);
}

void td__objects_pack(char *body, const td_bytes *objects, int count)
{
    for (int i = 0; i < count; i++) {
        if (objects[i].size)
            memcpy(body, objects[i].data, objects[i].size);
        body += objects[i].size;
    }
}

td_status td__objects_unpack(const char *call, const char *body, const uint64_t *sizes,
                             size_t stride, int count, td_bytes *objects)
{
    td_bytes *made = calloc((size_t)count + 1, sizeof *made);
    if (!made)
        return td__fail_nomem(call);
    for (int i = 0; i < count; i++) {
        size_t size = (size_t)sizes[i];
        char *data = malloc(size + 1);
        if (!data) {
            while (i-- > 0)
                td_bytes_free(&made[i]);
            free(made);
            return td__fail_nomem(call);
        }
        memcpy(data, body, size);
        data[size] = '\0';
        made[i] = (td_bytes){data, size};
        body += stride ? stride : size;
    }
    for (int i = 0; i < count; i++)
        objects[i] = made[i];
    free(made);
    return TD_OK;
}

static uint64_t *make_sizes(const td_bytes *objects, int count)
{
    uint64_t *sizes = calloc((size_t)count + 1, sizeof *sizes);
    for (int i = 0; sizes && objects && i < count; i++)
        sizes[i] = objects[i].size;
    return sizes;
}

/* ---- Broadcast ------------------------------------------------------------------------------- */

static td_status broadcast(const char *call, td_bytes *objects, int count, int src, td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member(call, &group, &member));
    bool is_root = member.global == src;
    if (is_root)
        TD_TRY(td__objects_check(call, "objects", objects, count));
    else if (count < 0 || (count > 0 && !objects))
        return td_fail(TD_ERR_INVALID, "%s: objects is NULL", call);

    uint64_t *sizes = make_sizes(is_root ? objects : NULL, count);
    if (!sizes)
        return td__fail_nomem(call);
    char *body = NULL;
    size_t total = 0;
    td_status status = td_group_broadcast(sizes, (size_t)count, TD_U64, src, group, NULL);
    if (!status)
        status = td__objects_add_up(call, sizes, count, &total);
    if (!status)
        status = make_body(call, total, &body);
    if (!status && is_root)
        td__objects_pack(body, objects, count);
    if (!status && total)
        status = td_group_broadcast(body, total, TD_U8, src, group, NULL);
    if (!status && !is_root)
        status = td__objects_unpack(call, body, sizes, 0, count, objects);
    td_free(body);
    free(sizes);
    return status;
}

td_status td_broadcast_object_list(td_bytes *objects, int count, int src, td_group *group)
{
    const char *call = "broadcast_object_list";
    td_group *held = td__hold_group(call, group);
    if (!held)
        return TD_ERR_STATE;
    td_status status = broadcast(call, objects, count, src, held);
    td__release_group(held);
    return status;
}

/* ---- All gather ------------------------------------------------------------------------------ */

static td_status gather_padded(const char *call, td_bytes *objects, td_bytes object,
                               const uint64_t *sizes, const struct td__member *member,
                               td_group *group)
{
    size_t longest = 0, total;
    for (int r = 0; r < member->size; r++)
        if (sizes[r] > longest)
            longest = (size_t)sizes[r];
    if (longest > SIZE_MAX / 2 || __builtin_mul_overflow(longest, (size_t)member->size, &total))
        return td_fail(TD_ERR_MISMATCH, "%s: an object has %zu bytes, which cannot be", call,
                       longest);
    char *body;
    TD_TRY(make_body(call, total, &body));
    char *mine = body + longest * (size_t)member->rank;
    td__objects_pack(mine, &object, 1);
    td_status status = TD_OK;
    if (longest)
        status = td_group_all_gather(body, mine, longest, TD_U8, group, NULL);
    if (!status)
        status = td__objects_unpack(call, body, sizes, longest, member->size, objects);
    td_free(body);
    return status;
}

static td_status all_gather(const char *call, td_bytes *objects, int count, td_bytes object,
                            td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member(call, &group, &member));
    TD_TRY(check_length(call, count, member.size));
    TD_TRY(td__objects_check(call, "object", &object, 1));
    if (!objects)
        return td_fail(TD_ERR_INVALID, "%s: objects is NULL", call);
    uint64_t *sizes = make_sizes(NULL, count);
    if (!sizes)
        return td__fail_nomem(call);
    sizes[member.rank] = object.size;
    td_status status = td_group_all_gather(sizes, &sizes[member.rank], 1, TD_U64, group, NULL);
    if (!status)
        status = gather_padded(call, objects, object, sizes, &member, group);
    free(sizes);
    return status;
}

td_status td_all_gather_object(td_bytes *objects, int count, td_bytes object, td_group *group)
{
    const char *call = "all_gather_object";
    td_group *held = td__hold_group(call, group);
    if (!held)
        return TD_ERR_STATE;
    td_status status = all_gather(call, objects, count, object, held);
    td__release_group(held);
    return status;
}

/* ---- Gather and scatter ---------------------------------------------------------------------- */

/* Checks the list of the root, and that the others have none. */
static td_status check_root_objects(const char *call, const td_bytes *objects, int count, int root,
                                    const struct td__member *member)
{
    if (member->global == root) {
        TD_TRY(check_length(call, count, member->size));
        if (!objects)
            return td_fail(TD_ERR_INVALID, "%s: objects is NULL", call);
    } else if (objects) {
        return td_fail(TD_ERR_INVALID,
                       "%s: rank %d passed a list, but the root is rank %d; others pass NULL", call,
                       member->global, root);
    }
    return TD_OK;
}

/* Moves bytes between the root and all ranks: `all` sizes on the root, `one` size of each rank's.
 */
static td_status move_bytes(const char *call, const struct td__member *member, td_group *group,
                            int root, const char *input, char *output, const uint64_t *all,
                            uint64_t one, bool to_root)
{
    size_t *whole = calloc((size_t)member->size, sizeof *whole);
    size_t *part = calloc((size_t)member->size, sizeof *part);
    td_status status = TD_ERR_NOMEM;
    if (!whole || !part) {
        td__fail_nomem(call);
        goto free_counts;
    }
    if (member->global == root)
        for (int r = 0; r < member->size; r++)
            whole[r] = (size_t)all[r];
    part[td_get_group_rank(group, root)] = (size_t)one;
    status = td_group_all_to_all_v(output, input, to_root ? whole : part, to_root ? part : whole,
                                   TD_U8, group, NULL);
free_counts:
    free(whole);
    free(part);
    return status;
}

static td_status gather(const char *call, td_bytes object, td_bytes *objects, int count, int dst,
                        td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member(call, &group, &member));
    TD_TRY(check_root_objects(call, objects, count, dst, &member));
    TD_TRY(td__objects_check(call, "object", &object, 1));
    bool is_root = member.global == dst;
    uint64_t *sizes = make_sizes(NULL, member.size);
    if (!sizes)
        return td__fail_nomem(call);

    uint64_t own = object.size;
    char *body = NULL;
    size_t total = 0;
    td_status status = td_group_gather(is_root ? sizes : NULL, &own, 1, TD_U64, dst, group, NULL);
    if (!status && is_root)
        status = td__objects_add_up(call, sizes, member.size, &total);
    if (!status)
        status = make_body(call, total, &body);
    if (!status)
        status = move_bytes(call, &member, group, dst, object.data, body, sizes, own, true);
    if (!status && is_root)
        status = td__objects_unpack(call, body, sizes, 0, member.size, objects);
    td_free(body);
    free(sizes);
    return status;
}

td_status td_gather_object(td_bytes object, td_bytes *objects, int count, int dst, td_group *group)
{
    const char *call = "gather_object";
    td_group *held = td__hold_group(call, group);
    if (!held)
        return TD_ERR_STATE;
    td_status status = gather(call, object, objects, count, dst, held);
    td__release_group(held);
    return status;
}

static td_status scatter(const char *call, td_bytes *object, const td_bytes *objects, int count,
                         int src, td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member(call, &group, &member));
    TD_TRY(check_root_objects(call, objects, count, src, &member));
    bool is_root = member.global == src;
    if (is_root)
        TD_TRY(td__objects_check(call, "objects", objects, count));
    if (!object)
        return td_fail(TD_ERR_INVALID, "%s: object is NULL", call);
    uint64_t *sizes = make_sizes(objects, member.size);
    if (!sizes)
        return td__fail_nomem(call);

    uint64_t own = 0;
    char *input = NULL, *output = NULL;
    size_t total = 0, bytes = 0;
    td_status status = td_group_scatter(&own, is_root ? sizes : NULL, 1, TD_U64, src, group, NULL);
    if (!status)
        status = td__objects_add_up(call, &own, 1, &bytes);
    if (!status && is_root)
        status = td__objects_add_up(call, sizes, member.size, &total);
    if (!status)
        status = make_body(call, total, &input);
    if (!status)
        status = make_body(call, bytes, &output);
    if (!status && is_root)
        td__objects_pack(input, objects, count);
    if (!status)
        status = move_bytes(call, &member, group, src, input, output, sizes, own, false);
    if (!status)
        status = td__objects_unpack(call, output, &own, 0, 1, object);
    td_free(output);
    td_free(input);
    free(sizes);
    return status;
}

td_status td_scatter_object_list(td_bytes *object, const td_bytes *objects, int count, int src,
                                 td_group *group)
{
    const char *call = "scatter_object_list";
    td_group *held = td__hold_group(call, group);
    if (!held)
        return TD_ERR_STATE;
    td_status status = scatter(call, object, objects, count, src, held);
    td__release_group(held);
    return status;
}
