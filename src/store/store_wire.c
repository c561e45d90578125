/* Frames and requests of the store's protocol; see store_wire.h. */
#include "store/store_wire.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

bool td__wire_read_header(const uint8_t *bytes, struct td__wire_header *header)
{
    *header = (struct td__wire_header){
        .body_size = td__load_u32(bytes), .id = td__load_u32(bytes + 4), .code = bytes[8]};
    return header->body_size <= TD__WIRE_MAX_BODY && !bytes[9] && !bytes[10] && !bytes[11];
}

size_t td__wire_begin(struct td__buffer *buffer, uint32_t id, uint8_t code)
{
    size_t start = buffer->size;
    td__buffer_put_u32(buffer, 0);
    td__buffer_put_u32(buffer, id);
    td__buffer_put_u32(buffer, code);
    return start;
}

void td__wire_end(struct td__buffer *buffer, size_t start)
{
    if (!buffer->failed)
        td__store_u32(buffer->data + start, (uint32_t)(buffer->size - start - TD__WIRE_HEADER));
}

/* Room for `count` keys and, with `pairs`, as many values. A key takes four bytes of the body at
 * least, so that a small body cannot make the server allocate much memory. */
static td_status make_room(struct td__wire_request *request, const struct td__reader *reader,
                           size_t count, bool pairs)
{
    if (!count || count > TD_STORE_MAX_KEYS || count > (size_t)(reader->end - reader->at) / 4)
        return td_fail(TD_ERR_INVALID, "store protocol: %zu keys in a request", count);
    size_t spans = count * (pairs ? 2 : 1);
    request->keys = spans <= TD__WIRE_FEW ? request->few : malloc(spans * sizeof *request->keys);
    if (!request->keys)
        return td__fail_nomem("store protocol");
    request->values = pairs ? request->keys + count : NULL;
    request->count = count;
    return TD_OK;
}

static td_status parse_keys(struct td__wire_request *request, struct td__reader *reader,
                            bool listed, bool pairs)
{
    TD_TRY(make_room(request, reader, listed ? td__reader_u32(reader) : 1, pairs));
    for (size_t i = 0; i < request->count; i++) {
        request->keys[i] = td__reader_string(reader, TD_STORE_MAX_KEY);
        if (pairs)
            request->values[i] = td__reader_string(reader, TD_STORE_MAX_VALUE);
    }
    return TD_OK;
}

static td_status parse_body(struct td__wire_request *request, struct td__reader *reader)
{
    switch (request->op) {
    case TD__WIRE_SET:
        return parse_keys(request, reader, true, true);
    case TD__WIRE_APPEND:
    case TD__WIRE_WILL:
        return parse_keys(request, reader, false, true);
    case TD__WIRE_GET:
    case TD__WIRE_WAIT:
    case TD__WIRE_CHECK:
        return parse_keys(request, reader, true, false);
    case TD__WIRE_DELETE:
    case TD__WIRE_NUM_KEYS:
        return parse_keys(request, reader, false, false);
    case TD__WIRE_ADD:
        TD_TRY(parse_keys(request, reader, false, false));
        request->number = (int64_t)td__reader_u64(reader);
        return TD_OK;
    case TD__WIRE_COMPARE_SET:
        TD_TRY(parse_keys(request, reader, false, false));
        request->values = request->few + 1;
        request->values[0] = td__reader_string(reader, TD_STORE_MAX_VALUE);
        request->values[1] = td__reader_string(reader, TD_STORE_MAX_VALUE);
        return TD_OK;
    case TD__WIRE_CANCEL:
        request->number = td__reader_u32(reader);
        return TD_OK;
    case TD__WIRE_SYNC:
    case TD__WIRE_BYE:
        return TD_OK;
    }
    return td_fail(TD_ERR_INVALID, "store protocol: there is no request %d", request->op);
}

td_status td__wire_parse(const struct td__wire_header *header, const uint8_t *body,
                         struct td__wire_request *request)
{
    struct td__reader reader = td__reader_of(body, header->body_size);
    *request = (struct td__wire_request){.op = header->code, .id = header->id};
    td_status status = parse_body(request, &reader);
    if (!status && !td__reader_done(&reader))
        status = td_fail(TD_ERR_INVALID, "store protocol: the body of request %d is malformed",
                         request->op);
    if (status)
        td__wire_request_free(request);
    return status;
}

void td__wire_request_free(struct td__wire_request *request)
{
    if (request->keys != request->few)
        free(request->keys);
    request->keys = NULL;
}
