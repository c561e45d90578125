/* Objects in messages.
 *
 *     first message     number of objects, bytes of the second message
 *     second message    the sizes of the objects, their bytes one after another
 *
 * The first one has a fixed length, so that the receiver knows what to expect. It takes the second
 * one also where the number is not the one it asked for: the next message is then at its place
 * again. */
#include "base/fail.h"
#include "dist/tensor_call.h"
#include "group/process_group.h"
#include "group/work.h"

#include <inttypes.h>

struct announcement {
    uint64_t count;
    uint64_t bytes;
};

static td_status check_call(const char *call, td_group *group, const td_bytes *objects, int count)
{
    struct td__member member;
    TD_TRY(td__check_member(call, &group, &member));
    if (count < 1 || !objects)
        return td_fail(TD_ERR_INVALID, "%s: objects is %s", call, count < 1 ? "empty" : "NULL");
    return TD_OK;
}

static td_status message(td_group *group, td_op_kind kind, void *data, size_t count, td_dtype dtype,
                         int rank, td_work **work)
{
    struct td__operation operation = {.call = {.kind = kind,
                                               .input = kind == TD_OP_SEND ? data : NULL,
                                               .output = kind == TD_OP_RECV ? data : NULL,
                                               .count = count,
                                               .dtype = dtype,
                                               .tag = TD__TAG_OBJECT}};
    return td__group_call(group, &operation, rank, work);
}

static td_status send_objects(const char *call, const td_bytes *objects, int count, int dst,
                              td_group *group)
{
    TD_TRY(check_call(call, group, objects, count));
    TD_TRY(td__objects_check(call, "objects", objects, count));
    size_t front = (size_t)count * sizeof(uint64_t);
    struct announcement announced = {.count = (uint64_t)count, .bytes = front};
    for (int i = 0; i < count; i++)
        announced.bytes += objects[i].size;
    char *body = td_alloc(announced.bytes);
    if (!body)
        return td_fail(TD_ERR_NOMEM, "%s: no memory for %" PRIu64 " bytes", call, announced.bytes);
    for (int i = 0; i < count; i++)
        ((uint64_t *)(void *)body)[i] = objects[i].size;
    td__objects_pack(body + front, objects, count);
    td_status status = message(group, TD_OP_SEND, &announced, 2, TD_U64, dst, NULL);
    if (!status)
        status = message(group, TD_OP_SEND, body, announced.bytes, TD_U8, dst, NULL);
    td_free(body);
    return status;
}

td_status td_send_object_list(const td_bytes *objects, int count, int dst, td_group *group)
{
    const char *call = "send_object_list";
    td_group *held = td__hold_group(call, group);
    if (!held)
        return TD_ERR_STATE;
    td_status status = send_objects(call, objects, count, dst, held);
    td__release_group(held);
    return status;
}

/* Receives the first message, also from TD_ANY_SOURCE, and its sender. */
static td_status receive_announcement(td_group *group, int src, struct announcement *announced,
                                      int *source)
{
    td_work *work;
    TD_TRY(message(group, TD_OP_RECV, announced, 2, TD_U64, src, &work));
    td__work_finish(work); /* `announced` is in use until then */
    td_status status = td_work_status(work);
    if (!status)
        *source = td_work_source(work);
    td_work_release(work);
    return status;
}

/* Takes the objects out of the second message. */
static td_status take_objects(const char *call, const char *body, size_t bytes, int count,
                              td_bytes *objects)
{
    const uint64_t *sizes = (const uint64_t *)(const void *)body;
    size_t front = (size_t)count * sizeof *sizes, total;
    TD_TRY(td__objects_add_up(call, sizes, count, &total));
    if (total != bytes - front)
        return td_fail(TD_ERR_MISMATCH, "%s: the sizes add up to %zu bytes, but %zu were received",
                       call, total, bytes - front);
    return td__objects_unpack(call, body + front, sizes, 0, count, objects);
}

static td_status receive_objects(const char *call, td_bytes *objects, int count, int src,
                                 td_group *group, int *source)
{
    TD_TRY(check_call(call, group, objects, count));
    struct announcement announced = {0};
    int from = src;
    TD_TRY(receive_announcement(group, src, &announced, &from));
    uint64_t number = announced.count, bytes = announced.bytes;
    if (number < 1 || number > bytes / sizeof(uint64_t))
        return td_fail(TD_ERR_MISMATCH,
                       "%s: rank %d announced %" PRIu64 " objects in %" PRIu64
                       " bytes, which cannot be",
                       call, from, number, bytes);
    char *body = td_alloc(bytes);
    if (!body)
        return td_fail(TD_ERR_NOMEM, "%s: no memory for %" PRIu64 " bytes from rank %d", call,
                       bytes, from);
    td_status status = message(group, TD_OP_RECV, body, bytes, TD_U8, from, NULL);
    if (!status && number != (uint64_t)count)
        status = td_fail(TD_ERR_MISMATCH,
                         "%s: rank %d sent %" PRIu64 " objects, but the list here has %d", call,
                         from, number, count);
    if (!status)
        status = take_objects(call, body, bytes, count, objects);
    if (!status && source)
        *source = from;
    td_free(body);
    return status;
}

td_status td_recv_object_list(td_bytes *objects, int count, int src, td_group *group, int *source)
{
    const char *call = "recv_object_list";
    td_group *held = td__hold_group(call, group);
    if (!held)
        return TD_ERR_STATE;
    td_status status = receive_objects(call, objects, count, src, held, source);
    td__release_group(held);
    return status;
}
