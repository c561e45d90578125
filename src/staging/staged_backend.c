/* Calls on memory of devices for backends that have host memory only, and `stage_devices`; see process_group.h.
 *
 * Collectives are cut into pieces as those of the native backend are (staging.h), and each piece is a call of the
 * backend. A message is copied as a whole: its memory on the host belongs to a work of its own, which the backend
 * completes, and the caller's work follows that. */
#include "staging/staging.h"

#include "base/fail.h"
#include "device/device_internal.h"

#include <stdlib.h>

/* ---- Collectives --------------------------------------------------------------------------------------- */

struct staged_run {
    struct td__part *part;
    td_collective_fn slot;
};

static td_status run_piece(void *arg, struct td__operation *piece)
{
    const struct staged_run *run = arg;
    return td__needs_padding(run->part, &piece->call)
               ? td__call_padded(run->part, &piece->call, run->slot)
               : run->slot(run->part->self, &piece->call);
}

/* In a copy: other threads read the call of a work. */
td_status td__stage_collective(struct td__part *part, const td_call *call, td_collective_fn slot)
{
    struct td__operation staged = *TD__CONTAINER(call, struct td__operation, call);
    struct staged_run run = {.part = part, .slot = slot};
    struct td__staged_call *stage = NULL;
    staged.call.detail = td__staged_detail(call);
    staged.called_root = call->root;
    staged.past = 0;
    staged.copy = NULL;
    staged.deadline = 0;
    staged.group = part->group->name;
    staged.parts = part->group->size;
    td_status status = td__staged_call_run(part, &staged, run_piece, &run, &stage);
    td__staged_call_free(stage);
    return status;
}

/* ---- Messages -------------------------------------------------------------------------------------------- */

struct staged_copy {
    td_call call; /* on host memory */
    td_device *device;
    td_stream *stream;
    char *data; /* of the device */
    size_t bytes;
    void *host, *pinned;
    td_work *work; /* the caller's; NULL: it blocks */
};

static td_status take_copy(const td_call *call, struct staged_copy *copy)
{
    bool sends = call->kind == TD_OP_SEND;
    *copy = (struct staged_copy){
        .call = *call,
        .device = call->device,
        .stream = call->stream,
        .data = sends ? (char *)call->input : call->output,
        .bytes = call->count * td_dtype_size(call->dtype),
    };
    copy->host = td__pinned_alloc(call->device, copy->bytes ? copy->bytes : 1, &copy->pinned);
    if (!copy->host)
        return td__error_status();
    copy->call.device = NULL;
    copy->call.stream = NULL;
    copy->call.input = sends ? copy->host : NULL;
    copy->call.output = sends ? NULL : copy->host;
    return TD_OK;
}

static void drop_copy(struct staged_copy *copy)
{
    if (!copy->host)
        return;
    td__pinned_use(copy->pinned, copy->stream);
    td__pinned_free(copy->host, copy->pinned);
}

static td_status copy_out(const struct staged_copy *copy)
{
    td_device *device = copy->device;
    if (copy->bytes)
        TD_TRY(td__ops_of(device)->copy_out(device->self, copy->stream->self, copy->host,
                                            copy->data, copy->bytes, true));
    return td__wait_for_stream("td_send", copy->stream);
}

static td_status copy_in(const struct staged_copy *copy, size_t bytes)
{
    td_device *device = copy->device;
    return bytes ? td__ops_of(device)->copy_in(device->self, copy->stream->self, copy->data,
                                               copy->host, bytes, true)
                 : TD_OK;
}

/* The backend has completed the work on host memory. */
static void on_complete(td_work *host_work, td_status status, void *arg)
{
    struct staged_copy *copy = arg;
    td_work *work = copy->work;
    size_t received = td_work_received(host_work);
    int source = td_work_source(host_work);
    status = td_work_status(host_work);
    if (!status && copy->call.kind == TD_OP_RECV)
        status = copy_in(copy, received);
    drop_copy(copy);
    free(copy);
    td_work_complete(work, status, source < 0 ? -1 : td__group_index(work->group, source),
                     received);
}

/* The caller waits for the copy of a send, so that messages stay in order. */
static td_status start(const struct td__part *part, struct staged_copy *copy)
{
    if (copy->call.kind == TD_OP_SEND)
        TD_TRY(copy_out(copy));
    td_work *host_work = td__work_create(part->group, &copy->call);
    if (!host_work)
        return td__error_status();
    td_status status = part->ops->post(part->self, &host_work->operation.call, host_work);
    if (status)
        host_work->owners = 1;
    else
        td__work_set_callback(host_work, on_complete, copy); /* has room for one callback */
    td_work_release(host_work);
    return status;
}

td_status td__stage_post(const struct td__part *part, const td_call *call, td_work *work)
{
    struct staged_copy *copy = calloc(1, sizeof *copy);
    if (!copy)
        return td__fail_nomem("message");
    td_status status = take_copy(call, copy);
    copy->work = work;
    if (!status)
        status = start(part, copy);
    if (status) {
        drop_copy(copy);
        free(copy);
    }
    return status;
}

td_status td__stage_message(const struct td__part *part, const td_call *call)
{
    td_work *work = td__work_create(part->group, call);
    if (!work)
        return td__error_status();
    td_status status = td__stage_post(part, &work->operation.call, work);
    if (status) {
        work->owners = 1;
    } else {
        td__work_finish(work);
        status = td_work_status(work);
    }
    td_work_release(work);
    return status;
}
