/* Copies of bytes between any two devices. */
#include "device/device_internal.h"

#include "base/copy.h"
#include "base/fail.h"

#include <string.h>

static td_status copy_in(const char *call, const struct td__place *to, const struct td__place *from,
                         size_t bytes, bool async)
{
    td_device *device = to->device;
    td_stream *stream = td__stream_of(device);
    if (td__is_captured(stream))
        return td__fail_captured(call, "copies from the host", device);
    bool pinned = async && from->pinned;
    TD_TRY(td__ops_of(device)->copy_in(device->self, stream->self, to->data, from->data, bytes,
                                       pinned));
    if (pinned)
        td__pinned_use(from->pinned, stream);
    td__block_use(to->block, stream);
    return TD_OK;
}

static td_status copy_out(const char *call, const struct td__place *to,
                          const struct td__place *from, size_t bytes, bool async)
{
    td_device *device = from->device;
    td_stream *stream = td__stream_of(device);
    if (td__is_captured(stream))
        return td__fail_captured(call, "copies to the host, and waits for it", device);
    TD_TRY(td__ops_of(device)->copy_out(device->self, stream->self, to->data, from->data, bytes,
                                        to->pinned != NULL));
    td__block_use(from->block, stream);
    if (!async || !to->pinned)
        return td__wait_for_stream(call, stream);
    td__pinned_use(to->pinned, stream);
    return TD_OK;
}

static td_status copy_inside(const struct td__place *to, const struct td__place *from, size_t bytes)
{
    td_stream *stream = td__stream_of(to->device);
    TD_TRY(
        td__ops_of(to->device)->copy(to->device->self, stream->self, to->data, from->data, bytes));
    td__block_use(to->block, stream);
    td__block_use(from->block, stream);
    return TD_OK;
}

/* Between two devices of one kind, on the stream of the receiving one: after all that is enqueued on the other's stream,
 * and before what will be. */
static td_status copy_across(const struct td__place *to, const struct td__place *from, size_t bytes)
{
    td_stream *stream = td__stream_of(to->device), *other = td__stream_of(from->device);
    TD_TRY(td_stream_wait_stream(stream, other));
    TD_TRY(td__ops_of(to->device)
               ->copy_from(to->device->self, stream->self, to->data, from->device->self, from->data,
                           bytes));
    td__block_use(to->block, stream);
    td__block_use(from->block, stream);
    return td_stream_wait_stream(other, stream);
}

/* By way of the host. */
static td_status carry(const char *call, const struct td__place *to, const struct td__place *from,
                       size_t bytes)
{
    struct td__place host = {.device = td__host_device()};
    host.data = td__pinned_alloc(to->device, bytes, &host.pinned);
    if (!host.data)
        return TD_ERR_NOMEM;
    td_status status = copy_out(call, &host, from, bytes, false);
    if (!status)
        status = copy_in(call, to, &host, bytes, true);
    td__pinned_free(host.data, host.pinned);
    return status;
}

td_status td__copy_between(const char *call, const struct td__place *to,
                           const struct td__place *from, size_t bytes, bool async)
{
    bool to_host = to->device->is_host, from_host = from->device->is_host;
    if (bytes == 0)
        return TD_OK;
    if (td__is_meta(to->device) || td__is_meta(from->device))
        return td__fail_meta(call, td__is_meta(to->device) ? to->device : from->device);
    if (to_host && from_host) {
        td__copy_bytes(to->data, from->data, bytes, bytes > td__cache_bytes(3) / 4);
        return TD_OK;
    }
    if (from_host)
        return copy_in(call, to, from, bytes, async);
    if (to_host)
        return copy_out(call, to, from, bytes, async);
    if (to->device == from->device)
        return copy_inside(to, from, bytes);
    if (to->device->kind == from->device->kind && td__ops_of(to->device)->copy_from)
        return copy_across(to, from, bytes);
    return carry(call, to, from, bytes);
}

td_status td__fill_bytes(const struct td__place *place, unsigned char value, size_t bytes)
{
    td_device *device = place->device;
    if (bytes == 0)
        return TD_OK;
    if (td__is_meta(device))
        return td__fail_meta("tensor", device);
    td_stream *stream = td__stream_of(device);
    TD_TRY(td__ops_of(device)->fill(device->self, stream->self, place->data, value, bytes));
    td__block_use(place->block, stream);
    return TD_OK;
}
