/* A message from another worker: its header, its tensor records, its body and the elements of its tensors.
 *
 *     byte 0     how many bytes come at a time; 0: all
 *     48 bytes   the header
 *     the rest   what comes behind it
 *
 * Nothing is written outside of what the message has room for. The message is complete, or refused, after as many bytes
 * as the header says. Its body is a value or refused. Names of devices are in the message, and can be such. */
#include "fuzz.h"

#include "rpc/message.h"
#include "rpc/rpc_agent.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_MESSAGE = 4096, MAX_ELEMENTS = 1 << 16 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

/* Gives a message what comes, `piece` bytes at a time; false if that is not enough. */
static bool feed(struct td__incoming *incoming, const uint8_t *data, size_t size, size_t piece)
{
    for (;;) {
        size_t want;
        void *to = td__incoming_next(incoming, &want);
        if (!want)
            return true;
        if (!size)
            return false;
        size_t now = piece && piece < want ? piece : want;
        now = now < size ? now : size;
        if (to)
            memcpy(to, data, now);
        td__incoming_advance(incoming, now);
        data += now;
        size -= now;
    }
}

static uint64_t expected_size(const struct td__message_header *header)
{
    return (uint64_t)header->records + header->body + header->elements;
}

static void read_body(struct td__incoming *incoming)
{
    struct td__reader body = td__incoming_body(incoming);
    td_value *value = td__incoming_value(incoming, body.at, (size_t)(body.end - body.at));
    check(value || *td_last_error());
    td_value_release(value);
}

static void check_devices(const struct td__incoming *incoming)
{
    for (uint32_t i = 0; incoming->devices && i < incoming->header.tensors; i++) {
        struct td__span name = incoming->devices[i];
        const char *records = (const char *)incoming->bytes;
        check(!name.size ||
              (td__device_name_is_valid(name.data, name.size) && name.data >= records &&
               name.data + name.size <= records + incoming->header.records));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct td__rpc_agent agent; /* of rank 0, alone: nobody lends it memory */
    struct td__message_header header;
    uint8_t written[TD__HEADER_SIZE];
    size_t head = size > 1 ? td__message_header_size(data[1]) : SIZE_MAX - 1;
    if (size < 1 + head)
        return 0;
    if (!td__message_header_read(data + 1, &header))
        return 0;
    check(td__message_header_write(&header, written + sizeof written) == head);
    check(!memcmp(written + sizeof written - head, data + 1, head));
    if (header.elements > MAX_ELEMENTS)
        return 0;
    struct td__incoming *incoming = td__incoming_create(&agent, 0, &header, MAX_MESSAGE);
    check(incoming);
    size_t rest = size - 1 - head;
    bool complete = feed(incoming, data + 1 + head, rest, data[0]);
    check(complete == (rest >= expected_size(&header)));
    if (complete && !incoming->status)
        read_body(incoming);
    check_devices(incoming);
    check(!incoming->status || incoming->text);
    td__incoming_free(incoming);
    return 0;
}
