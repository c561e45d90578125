/* Bytes of a file on their way to an accelerator: two pieces of pinned memory, one of which is read into while the
 * device copies the other. So a tensor of any size needs 2 MiB of the host. */
#include "base/fail.h"
#include "checkpoint/safetensors.h"

td_status td__upload_begin(struct td__upload *upload, const char *call, td_device *device)
{
    if (upload->device == device)
        return TD_OK;
    TD_TRY(td__upload_end(upload));
    *upload = (struct td__upload){.call = call, .device = device};
    for (int i = 0; i < 2; i++) {
        struct td__upload_piece *piece = &upload->pieces[i];
        piece->data = td__pinned_alloc(device, TD__UPLOAD_PIECE, &piece->pinned);
        piece->event = piece->data ? td__event_take(device) : NULL;
        if (!piece->event)
            return td__error_status();
    }
    return TD_OK;
}

td_status td__upload_buffer(struct td__upload *upload, void **data)
{
    struct td__upload_piece *piece = &upload->pieces[upload->next];
    if (piece->is_sent)
        TD_TRY(td__wait_for_event(upload->call, piece->event));
    piece->is_sent = false;
    *data = piece->data;
    return TD_OK;
}

td_status td__upload_send(struct td__upload *upload, const struct td__place *to, size_t bytes)
{
    struct td__upload_piece *piece = &upload->pieces[upload->next];
    struct td__place from = {
        .device = td__host_device(), .data = piece->data, .pinned = piece->pinned};
    TD_TRY(td__copy_between(upload->call, to, &from, bytes, true));
    TD_TRY(td_event_record(piece->event, td__stream_of(upload->device)));
    piece->is_sent = true;
    upload->next = !upload->next;
    return TD_OK;
}

td_status td__upload_end(struct td__upload *upload)
{
    td_status status = TD_OK;
    for (int i = 0; i < 2; i++) {
        struct td__upload_piece *piece = &upload->pieces[i];
        if (piece->is_sent && !status)
            status = td__wait_for_event(upload->call, piece->event);
        td__event_give_back(piece->event);
        if (piece->data)
            td__pinned_free(piece->data, piece->pinned);
    }
    *upload = (struct td__upload){0};
    return status;
}
