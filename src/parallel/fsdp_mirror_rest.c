/* What of a training's state is not divided, as bytes; see fsdp_mirror.h.
 *
 *     | planes | numbers of the optimizer | its groups | of each parameter: steps, how many buffers | buffers of the module | */
#include "base/buffer.h"
#include "base/fail.h"
#include "optim/optimizer.h"
#include "parallel/fsdp_copies.h"
#include "parallel/fsdp_mirror.h"

#include <stdlib.h>
#include <string.h>

/* ---- The optimizer ------------------------------------------------------------------------------------------------- */

/* The buffers that a parameter has. */
static int buffers_of(const struct td__parameter *parameter)
{
    int count = 0;
    while (count < TD__BUFFERS_MOST && parameter->buffers[count])
        count++;
    return count;
}

int td__mirror_count_planes(const td_optimizer *optimizer)
{
    int most = 0;
    for (int i = 0; i < optimizer->count; i++) {
        int count = buffers_of(&optimizer->parameters[i]);
        most = count > most ? count : most;
    }
    return 1 + most;
}

struct td__parameter *td__mirror_parameter(const td_optimizer *optimizer, const td_tensor *tensor)
{
    for (int i = 0; i < optimizer->count; i++)
        if (optimizer->parameters[i].tensor == tensor)
            return &optimizer->parameters[i];
    return NULL;
}

static void put_optimizer(struct td__buffer *packed, const td_optimizer *optimizer, int planes)
{
    td__buffer_put_u32(packed, (uint32_t)planes);
    td__buffer_put(packed, &optimizer->numbers, sizeof optimizer->numbers);
    td__buffer_put(packed, optimizer->groups,
                   (size_t)optimizer->group_count * sizeof *optimizer->groups);
    for (int i = 0; i < optimizer->count; i++) {
        td__buffer_put_u64(packed, (uint64_t)optimizer->parameters[i].steps);
        td__buffer_put_u8(packed, (uint8_t)buffers_of(&optimizer->parameters[i]));
    }
}

/* ---- The module's buffers ------------------------------------------------------------------------------------------ */

/* A copy that the next pass does not change, in the order of the device's current stream. */
static td_status take_snapshot(td_tensor *buffer, td_tensor **snapshot)
{
    if (!*snapshot)
        *snapshot = td__empty_like(buffer);
    if (!*snapshot)
        return td__error_status();
    return buffer->layout.numel ? td__tensor_copy(*snapshot, buffer) : TD_OK;
}

static td_status put_buffer(struct td__buffer *packed, td_tensor *buffer)
{
    td_tensor *dense = td__contiguous(buffer);
    if (!dense)
        return td__error_status();
    td__buffer_put(packed, td_tensor_data(dense), td_tensor_nbytes(dense));
    td_tensor_release(dense);
    return TD_OK;
}

/* Room for one, which a copy fills in. */
static td_status reserve(struct td__buffer *packed, td_tensor *buffer, td_tensor **snapshot)
{
    static const char zeros[256];
    TD_TRY(take_snapshot(buffer, snapshot));
    for (size_t left = td_tensor_nbytes(buffer); left;) {
        size_t bytes = left < sizeof zeros ? left : sizeof zeros;
        td__buffer_put(packed, zeros, bytes);
        left -= bytes;
    }
    return TD_OK;
}

static td_status put_buffers(struct td__buffer *packed, const struct td__fsdp *fsdp,
                             td_tensor **snapshots)
{
    for (int i = 0; i < fsdp->buffer_count; i++)
        TD_TRY(td__on_host(fsdp->buffers[i]) ? put_buffer(packed, fsdp->buffers[i])
                                             : reserve(packed, fsdp->buffers[i], &snapshots[i]));
    return packed->failed ? td__fail_nomem("td_fsdp") : TD_OK;
}

/* The buffers are the last bytes. */
static td_status add_copies(const struct td__fsdp *fsdp, td_tensor **snapshots, char *data,
                            struct td__copies *copies)
{
    for (int i = 0; i < fsdp->buffer_count; i++) {
        size_t bytes = td_tensor_nbytes(fsdp->buffers[i]);
        if (!td__on_host(fsdp->buffers[i])) {
            struct td__place from = td__place_of(snapshots[i]);
            TD_TRY(td__copies_add(copies, data, &from, bytes));
        }
        data += bytes;
    }
    return TD_OK;
}

td_status td__mirror_pack_rest(const struct td__fsdp *fsdp, const td_optimizer *optimizer,
                               int planes, td_tensor **snapshots, struct td__copies *copies,
                               td_bytes *rest)
{
    struct td__buffer packed = {0};
    put_optimizer(&packed, optimizer, planes);
    size_t before = packed.size;
    td_status status = put_buffers(&packed, fsdp, snapshots);
    if (!status)
        status = add_copies(fsdp, snapshots, (char *)packed.data + before, copies);
    if (status) {
        td__buffer_free(&packed);
        return status;
    }
    free(rest->data);
    *rest = (td_bytes){.data = (char *)packed.data, .size = packed.size};
    return TD_OK;
}

/* ---- Back ---------------------------------------------------------------------------------------------------------- */

td_status td__mirror_read_planes(td_bytes rest, int *planes)
{
    struct td__reader reader = td__reader_of(rest.data, rest.size);
    *planes = (int)td__reader_u32(&reader);
    if (reader.failed || *planes < 1 || *planes > TD__MIRROR_PLANES)
        return td_fail(TD_ERR_MISMATCH, "td_fsdp: what a rank has sent is no state of a model");
    return TD_OK;
}

static td_status fail_other(void)
{
    return td_fail(TD_ERR_MISMATCH, "td_fsdp: this rank has another model or optimizer than the "
                                    "ranks that have trained it");
}

static td_status get(struct td__reader *reader, void *to, size_t bytes)
{
    if ((size_t)(reader->end - reader->at) < bytes)
        return fail_other();
    memcpy(to, reader->at, bytes);
    reader->at += bytes;
    return TD_OK;
}

static td_status set_buffer(td_tensor *buffer, struct td__reader *reader)
{
    td_tensor *dense = td__empty("td_fsdp", buffer->layout.shape, buffer->layout.ndim,
                                 buffer->layout.dtype, td__host_device());
    td_status status = dense ? get(reader, td_tensor_data(dense), td_tensor_nbytes(dense))
                             : td__error_status();
    if (!status && buffer->layout.numel)
        status = td__tensor_copy(buffer, dense);
    if (!status)
        td__tensor_bump_version(buffer);
    td_tensor_release(dense);
    return status;
}

/* Buffers of the optimizer that the state has not are dropped; the others are there. */
static void set_parameter(struct td__parameter *parameter, struct td__reader *reader)
{
    parameter->steps = (int64_t)td__reader_u64(reader);
    int count = td__reader_u8(reader);
    for (int b = count; b < TD__BUFFERS_MOST; b++) {
        td_tensor_release(parameter->buffers[b]);
        parameter->buffers[b] = NULL;
    }
}

td_status td__mirror_set_rest(struct td__fsdp *fsdp, td_optimizer *optimizer, td_bytes rest)
{
    struct td__reader reader = td__reader_of(rest.data, rest.size);
    td__reader_u32(&reader);
    TD_TRY(get(&reader, &optimizer->numbers, sizeof optimizer->numbers));
    TD_TRY(get(&reader, optimizer->groups,
               (size_t)optimizer->group_count * sizeof *optimizer->groups));
    for (int i = 0; i < optimizer->count; i++)
        set_parameter(&optimizer->parameters[i], &reader);
    for (int i = 0; i < fsdp->buffer_count; i++)
        TD_TRY(set_buffer(fsdp->buffers[i], &reader));
    return td__reader_done(&reader) ? TD_OK : fail_other();
}
