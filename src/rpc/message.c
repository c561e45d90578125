/* Messages as bytes; see message.h. */
#include "rpc/message.h"

#include "base/fail.h"
#include "rpc/block_cache.h"
#include "rpc/rpc_agent.h"
#include "rpc/grad_context.h"
#include "rpc/lease.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>
#include <string.h>

/* ---- Headers --------------------------------------------------------------------------------- */

static bool is_short(const struct td__message_header *header)
{
    return !(header->tensors | header->records | header->rrefs | header->context |
             header->elements | header->message);
}

size_t td__message_header_write(const struct td__message_header *header, uint8_t *end)
{
    bool brief = is_short(header);
    uint8_t *bytes = end - (brief ? TD__SHORT_HEADER_SIZE : TD__HEADER_SIZE);
    td__store_u32(bytes, (uint32_t)header->kind | (brief ? 0 : TD__LONG_HEADER) |
                             (uint32_t)header->copy << 8 | (uint32_t)header->depth << 16);
    td__store_u32(bytes + 4, header->body);
    td__store_u64(bytes + 8, header->id);
    td__store_u32(bytes + 16, header->timeout_ms);
    if (!brief) {
        td__store_u32(bytes + 20, header->tensors);
        td__store_u32(bytes + 24, header->records);
        td__store_u32(bytes + 28, header->rrefs);
        td__store_u64(bytes + 32, header->context);
        td__store_u64(bytes + 40, header->elements);
        td__store_u64(bytes + 48, header->message);
    }
    return (size_t)(end - bytes);
}

bool td__message_header_read(const uint8_t *bytes, struct td__message_header *header)
{
    uint32_t first = td__load_u32(bytes);
    *header = (struct td__message_header){
        .kind = (uint8_t)first & ~TD__LONG_HEADER,
        .copy = (uint8_t)(first >> 8),
        .depth = (uint16_t)(first >> 16),
        .body = td__load_u32(bytes + 4),
        .id = td__load_u64(bytes + 8),
        .timeout_ms = td__load_u32(bytes + 16),
    };
    if (first & TD__LONG_HEADER) {
        header->tensors = td__load_u32(bytes + 20);
        header->records = td__load_u32(bytes + 24);
        header->rrefs = td__load_u32(bytes + 28);
        header->context = td__load_u64(bytes + 32);
        header->elements = td__load_u64(bytes + 40);
        header->message = td__load_u64(bytes + 48);
    }
    return !(first & TD__LONG_HEADER) == is_short(header) && header->kind >= TD__MESSAGE_REQUEST &&
           header->kind < TD__MESSAGE_KINDS && header->copy <= 1 &&
           header->tensors <= TD__MAX_TENSORS && header->rrefs <= TD__MAX_RREFS &&
           header->records >= header->rrefs * TD__RREF_RECORD_SIZE &&
           header->records - header->rrefs * TD__RREF_RECORD_SIZE <=
               header->tensors * TD__RECORD_MAX &&
           (header->tensors || !header->elements);
}

/* ---- Tensor records: dtype, dimensions, flags, shape; of a lent one, or one sent back to its lender, the lease and its
 *      place in the arena, or in what was lent; of one for a device, its name ---- */

enum { LENT = 1, REQUIRES_GRAD = 2, SENT_BACK = 4, ON_DEVICE = 8 }; /* 4 bits */

struct record {
    uint8_t flags;
    struct td__layout layout;
    uint64_t lease, offset;
    struct td__span device;
};

static void put_record(struct td__buffer *bytes, const struct record *record)
{
    td__buffer_put_u8(bytes, (uint8_t)record->layout.dtype);
    td__buffer_put_u8(bytes, (uint8_t)(record->layout.ndim | record->flags << 4));
    for (int d = 0; d < record->layout.ndim; d++)
        td__buffer_put_u64(bytes, (uint64_t)record->layout.shape[d]);
    if (record->flags & (LENT | SENT_BACK)) {
        td__buffer_put_u64(bytes, record->lease);
        td__buffer_put_u64(bytes, record->offset);
    }
    if (record->flags & ON_DEVICE)
        td__buffer_put_string(bytes, record->device.data, record->device.size);
}

static td_status get_record(struct td__reader *reader, struct record *record)
{
    int64_t shape[TD_MAX_DIMS];
    td_dtype dtype = (td_dtype)td__reader_u8(reader);
    uint8_t dims = td__reader_u8(reader);
    int ndim = dims & 15;
    *record = (struct record){.flags = dims >> 4};
    if (ndim > TD_MAX_DIMS)
        return td_fail(TD_ERR_INVALID, "a tensor record is not valid");
    for (int d = 0; d < ndim; d++)
        shape[d] = (int64_t)td__reader_u64(reader);
    if (record->flags & (LENT | SENT_BACK)) {
        record->lease = td__reader_u64(reader);
        record->offset = td__reader_u64(reader);
    }
    if (record->flags & ON_DEVICE)
        record->device = td__reader_string(reader, TD__DEVICE_NAME);
    if (reader->failed)
        return td_fail(TD_ERR_INVALID, "a tensor record is cut off");
    if (record->flags & ON_DEVICE &&
        !td__device_name_is_valid(record->device.data, record->device.size))
        return td_fail(TD_ERR_INVALID, "the device of a tensor record is no name of one");
    return td__layout_init(&record->layout, "a tensor record", shape, ndim, NULL, dtype);
}

static size_t layout_bytes(const struct td__layout *layout)
{
    return (size_t)layout->numel * td_dtype_size(layout->dtype);
}

/* ---- Outgoing -------------------------------------------------------------------------------- */

struct td__message *td__message_create(struct td__rpc_agent *agent, int to, bool lend)
{
    _Static_assert(sizeof(struct td__message) <= TD__LARGE_BLOCK, "a message fits into a block");
    struct td__message *message = td__rpc_block_alloc(TD__LARGE_BLOCK);
    if (!message) {
        td__fail_nomem("rpc");
        return NULL;
    }
    memset(message, 0, offsetof(struct td__message, small));
    message->agent = agent;
    message->to = to;
    message->lends = lend;
    message->bytes = (struct td__buffer){.data = message->small,
                                         .size = TD__HEADER_SIZE,
                                         .capacity = sizeof message->small,
                                         .borrowed = true};
    return message;
}

static void drop_recorded(struct td__message *message)
{
    if (!message->recorded)
        return;
    for (int i = 0; i < message->recorded_count; i++)
        td_tensor_release(message->recorded[i]);
    free(message->recorded);
    message->recorded = NULL;
    message->recorded_count = 0;
}

void td__message_free(struct td__message *message)
{
    if (!message)
        return;
    bool sent = message->size && message->written == message->size;
    for (uint32_t i = 0; i < message->count; i++) {
        struct td__outgoing_tensor *outgoing = &message->tensors[i];
        td_tensor_release(outgoing->tensor);
        td_tensor_release(outgoing->held);
        if (outgoing->frozen)
            td__lease_return(outgoing->frozen);
        if (!sent && outgoing->lease)
            td__rpc_lease_end(message->agent, message->to, outgoing->lease);
    }
    for (uint32_t i = 0; !sent && i < message->rref_count; i++)
        td__rref_take_back(message->agent, message->to, &message->rrefs[i]);
    drop_recorded(message);
    if (message->tensors)
        free(message->tensors);
    if (message->rrefs)
        free(message->rrefs);
    td__buffer_free(&message->bytes);
    if (message->record_bytes.data)
        td__buffer_free(&message->record_bytes);
    td__rpc_block_free(message, TD__LARGE_BLOCK);
}

void td__messages_free(struct td__message *message)
{
    for (struct td__message *next; message; message = next) {
        next = message->next;
        td__message_free(message);
    }
}

static bool grow_tensors(struct td__message *message)
{
    uint32_t capacity = message->capacity ? 2 * message->capacity : 4;
    struct td__outgoing_tensor *tensors = realloc(message->tensors, sizeof *tensors * capacity);
    if (!tensors)
        return false;
    message->tensors = tensors;
    message->capacity = capacity;
    return true;
}

static td_status keep_recorded(struct td__message *message, td_tensor *tensor)
{
    size_t count = (size_t)message->recorded_count;
    td_tensor **recorded = realloc(message->recorded, sizeof *recorded * (count + 1));
    if (!recorded)
        return td__fail_nomem("rpc");
    message->recorded = recorded;
    recorded[message->recorded_count++] = td_tensor_retain(tensor);
    return TD_OK;
}

/* A message may wait for room, or for a link: a later write of the program to the tensor must not change it. */
static bool freeze(struct td__outgoing_tensor *outgoing)
{
    struct td__storage *storage = outgoing->tensor->storage;
    bool small = layout_bytes(&outgoing->tensor->layout) < TD__LEND_FROM;
    if (small || td__storage_is_borrowed(storage) || !td__storage_is_lendable(storage)) {
        td_tensor *copy = td__clone(outgoing->tensor);
        td_tensor_release(outgoing->tensor);
        outgoing->tensor = copy;
        return copy;
    }
    outgoing->elements = td_tensor_data(outgoing->tensor);
    return !td__storage_lend(storage, &outgoing->frozen);
}

static td_status put_tensor(void *arg, td_tensor *tensor, uint32_t *number)
{
    struct td__message *message = arg;
    if (message->count == TD__MAX_TENSORS)
        return td_fail(TD_ERR_INVALID, "a message has more than %d tensors", TD__MAX_TENSORS);
    if (message->count == message->capacity && !grow_tensors(message))
        return td__fail_nomem("rpc");
    const char *device = td__device_name_for(message->agent, message->to, tensor->storage->device,
                                             message->request);
    struct record record = {.layout = tensor->layout};
    if (device) {
        record.flags |= ON_DEVICE;
        record.device = (struct td__span){device, strlen(device)};
    }
    if (message->records && td_grad_enabled() && td_tensor_requires_grad(tensor)) {
        TD_TRY(keep_recorded(message, tensor));
        record.flags |= REQUIRES_GRAD;
    }
    td_tensor *kept = td__to_host("rpc", tensor);
    if (!kept)
        return td__error_status();
    struct td__outgoing_tensor outgoing = {.tensor = kept};
    bool lend = message->lends && layout_bytes(&record.layout) >= TD__LEND_FROM;
    if (lend &&
        td__rpc_is_lent_by(message->agent, message->to, kept, &record.lease, &record.offset)) {
        record.flags |= SENT_BACK;
        outgoing = (struct td__outgoing_tensor){.held = kept};
    } else if (lend) {
        td_status status = td__rpc_lend(message->agent, message->to, &kept, &record.lease,
                                        &record.offset);
        if (status) {
            td_tensor_release(kept);
            return status;
        }
        record.flags |= LENT;
        td_tensor_release(kept);
        outgoing = (struct td__outgoing_tensor){.lease = record.lease};
    } else if (message->to != message->agent->rank && kept->storage == tensor->storage &&
               !freeze(&outgoing)) {
        td_tensor_release(outgoing.tensor);
        return TD_ERR_NOMEM;
    }
    put_record(&message->record_bytes, &record);
    *number = message->count;
    message->tensors[message->count++] = outgoing;
    return TD_OK;
}

static td_status put_rref(void *arg, td_rref *rref, struct td__buffer *bytes)
{
    struct td__message *message = arg;
    if (message->rref_count == TD__MAX_RREFS)
        return td_fail(TD_ERR_INVALID, "a message has more than %d references", TD__MAX_RREFS);
    if (message->rref_count == message->rref_capacity) {
        uint32_t capacity = message->rref_capacity ? 2 * message->rref_capacity : 4;
        struct td__rref_record *rrefs = realloc(message->rrefs, sizeof *rrefs * capacity);
        if (!rrefs)
            return td__fail_nomem("rpc");
        message->rrefs = rrefs;
        message->rref_capacity = capacity;
    }
    TD_TRY(td__rref_put(message->agent, message->to, rref, &message->rrefs[message->rref_count]));
    td__buffer_put_u32(bytes, message->rref_count++);
    return TD_OK;
}

static const td__codec_fns outgoing_fns = {.put_tensor = put_tensor, .put_rref = put_rref};

td_status td__message_put(struct td__message *message, const td_value *value)
{
    return td__encode(value, &outgoing_fns, message, &message->bytes);
}

/* Puts the records between the header and the body. */
static void insert_records(struct td__message *message)
{
    size_t size = message->record_bytes.size, body = message->bytes.size - TD__HEADER_SIZE;
    if (!size)
        return;
    if (td__buffer_reserve(&message->bytes, size)) {
        uint8_t *at = message->bytes.data + TD__HEADER_SIZE;
        memmove(at + size, at, body);
        memcpy(at, message->record_bytes.data, size);
        message->bytes.size += size;
    }
    td__buffer_free(&message->record_bytes);
}

td_status td__message_seal(struct td__message *message, struct td__message_header *header,
                           size_t max)
{
    for (uint32_t i = 0; i < message->rref_count; i++) {
        td__buffer_put_u64(&message->record_bytes, message->rrefs[i].id);
        td__buffer_put_u64(&message->record_bytes, message->rrefs[i].fork);
        td__buffer_put_u32(&message->record_bytes, (uint32_t)message->rrefs[i].owner);
    }
    size_t records = message->record_bytes.size, body = message->bytes.size - TD__HEADER_SIZE;
    if (header->context)
        TD_TRY(td__context_send(message, header));
    drop_recorded(message); /* it may wait for long, and they may be lent by another worker */
    if (records + body > max || records + body > UINT32_MAX)
        return td_fail(TD_ERR_INVALID,
                       "the values of a call have %zu bytes without their tensors; the limit is "
                       "%zu (td_rpc_options.max_message)",
                       records + body, max);
    bool whole = !message->record_bytes.failed;
    insert_records(message);
    if (!whole || message->bytes.failed)
        return td__fail_nomem("rpc");
    header->tensors = message->count;
    header->rrefs = message->rref_count;
    header->records = (uint32_t)records;
    header->body = (uint32_t)body;
    header->elements = 0;
    for (uint32_t i = 0; i < message->count; i++)
        if (message->tensors[i].tensor)
            header->elements += layout_bytes(&message->tensors[i].tensor->layout);
    message->skip = TD__HEADER_SIZE -
                    td__message_header_write(header, message->bytes.data + TD__HEADER_SIZE);
    message->size = message->bytes.size - message->skip + header->elements;
    return TD_OK;
}

const void *td__message_next(const struct td__message *message, size_t *size)
{
    size_t at = message->written + message->skip;
    if (at < message->bytes.size) {
        *size = message->bytes.size - at;
        return message->bytes.data + at;
    }
    at -= message->bytes.size;
    for (uint32_t i = 0; i < message->count; i++) {
        td_tensor *tensor = message->tensors[i].tensor;
        size_t bytes = tensor ? layout_bytes(&tensor->layout) : 0;
        if (at < bytes) {
            *size = bytes - at;
            const char *elements = message->tensors[i].elements;
            return (elements ? elements : (const char *)td_tensor_data(tensor)) + at;
        }
        at -= bytes;
    }
    *size = 0;
    return NULL;
}

/* ---- Incoming -------------------------------------------------------------------------------- */

/* It cannot be served: what comes of it is skipped. */
static void refuse(struct td__incoming *incoming)
{
    incoming->status = td__error_status();
    incoming->text = strdup(td__error_text());
}

/* What is left of a block beside the struct. */
enum { SMALL_INCOMING = TD__LARGE_BLOCK - sizeof(struct td__incoming) };

/* Memory for a message of `size` bytes; *capacity is at least that. */
static struct td__incoming *take_memory(size_t size, size_t *capacity)
{
    *capacity = size < SMALL_INCOMING ? SMALL_INCOMING : size;
    return size <= SMALL_INCOMING ? td__rpc_block_alloc(TD__LARGE_BLOCK)
                                  : malloc(sizeof(struct td__incoming) + size);
}

static void give_memory(struct td__incoming *incoming)
{
    if (incoming->capacity == SMALL_INCOMING)
        td__rpc_block_free(incoming, TD__LARGE_BLOCK);
    else
        free(incoming);
}

struct td__incoming *td__incoming_create(struct td__rpc_agent *agent, int from,
                                         const struct td__message_header *header, size_t max)
{
    size_t size = (size_t)header->records + header->body, capacity;
    bool fits = size <= max;
    struct td__incoming *incoming = take_memory(fits ? size : 0, &capacity);
    if (!incoming)
        return NULL;
    *incoming = (struct td__incoming){.agent = agent,
                                      .from = from,
                                      .header = *header,
                                      .bytes = (uint8_t *)(incoming + 1),
                                      .capacity = capacity};
    if (!fits) {
        td_fail(TD_ERR_INVALID, "a message of %zu bytes without its tensors; the limit is %zu",
                size, max);
        refuse(incoming);
        incoming->skip = size + header->elements;
    }
    return incoming;
}

static td_status note_device(struct td__incoming *incoming, uint32_t at, struct td__span name)
{
    if (!incoming->devices)
        incoming->devices = calloc(incoming->header.tensors, sizeof *incoming->devices);
    if (!incoming->devices)
        return td__fail_nomem("rpc");
    incoming->devices[at] = name;
    return TD_OK;
}

/* Makes tensor number `at`. `left`: bytes of the message's elements that no record has claimed yet. */
static td_status make_tensor(struct td__incoming *incoming, struct td__reader *reader,
                             uint64_t left, uint32_t at)
{
    struct record record;
    td_tensor **tensor = &incoming->tensors[at];
    size_t *size = &incoming->sizes[at];
    TD_TRY(get_record(reader, &record));
    incoming->recorded[at] = record.flags & REQUIRES_GRAD;
    incoming->recorded_count += incoming->recorded[at];
    if (record.flags & ON_DEVICE && note_device(incoming, at, record.device)) {
        if (record.flags & LENT)
            td__rpc_give_back(incoming->agent, incoming->from, record.lease);
        return TD_ERR_NOMEM;
    }
    if (record.flags & LENT)
        return td__rpc_borrow(incoming->agent, incoming->from, record.lease, record.offset,
                              &record.layout, tensor);
    if (record.flags & SENT_BACK)
        return td__rpc_take_back(incoming->agent, incoming->from, record.lease, record.offset,
                                 &record.layout, tensor);
    *size = layout_bytes(&record.layout);
    if (*size > left)
        return td_fail(TD_ERR_INVALID, "the tensor records have more elements than the message");
    *tensor = td__empty("rpc", record.layout.shape, record.layout.ndim, record.layout.dtype,
                        td__host_device());
    return *tensor ? TD_OK : td__error_status();
}

/* The tensors cannot be made from number `at` on: what is lent goes back. */
static td_status refuse_tensors(struct td__incoming *incoming, struct td__reader *reader,
                                uint32_t at)
{
    struct td__error error;
    struct record record;
    td__error_save(&error);
    for (; at < incoming->header.tensors && !get_record(reader, &record); at++)
        if (record.flags & LENT)
            td__rpc_give_back(incoming->agent, incoming->from, record.lease);
    return td__error_restore(&error);
}

/* The records are there: makes the tensors, whose elements follow. */
static td_status make_tensors(struct td__incoming *incoming)
{
    uint32_t count = incoming->header.tensors;
    uint64_t left = incoming->header.elements;
    struct td__reader reader = td__reader_of(
        incoming->bytes, incoming->header.records - incoming->header.rrefs * TD__RREF_RECORD_SIZE);
    incoming->tensors = calloc(count + 1, sizeof *incoming->tensors);
    incoming->sizes = calloc(count + 1, sizeof *incoming->sizes);
    incoming->recorded = calloc(count + 1, sizeof *incoming->recorded);
    if (!incoming->tensors || !incoming->sizes || !incoming->recorded) {
        td__fail_nomem("rpc");
        return refuse_tensors(incoming, &reader, 0);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (make_tensor(incoming, &reader, left, i))
            return refuse_tensors(incoming, &reader, i + 1);
        left -= incoming->sizes[i];
    }
    return td__reader_done(&reader) && !left
               ? TD_OK
               : td_fail(TD_ERR_INVALID, "the tensor records are not valid");
}

void *td__incoming_next(struct td__incoming *incoming, size_t *size)
{
    size_t whole = (size_t)incoming->header.records + incoming->header.body;
    if (incoming->status) {
        *size = incoming->skip > SIZE_MAX ? SIZE_MAX : (size_t)incoming->skip;
        incoming->complete = !*size;
        return NULL;
    }
    *size = whole - incoming->have;
    if (*size)
        return incoming->bytes + incoming->have;
    if (!incoming->header.tensors) {
        incoming->complete = true;
        return NULL;
    }
    if (!incoming->tensors && make_tensors(incoming)) {
        refuse(incoming);
        incoming->skip = incoming->header.elements;
        return td__incoming_next(incoming, size);
    }
    for (; incoming->inline_at < incoming->header.tensors; incoming->inline_at++) {
        td_tensor *tensor = incoming->tensors[incoming->inline_at];
        size_t left = incoming->sizes[incoming->inline_at] - incoming->inline_have;
        if (left) {
            *size = left;
            return (char *)td_tensor_data(tensor) + incoming->inline_have;
        }
        incoming->inline_have = 0;
    }
    *size = 0;
    incoming->complete = true;
    return NULL;
}

void td__incoming_advance(struct td__incoming *incoming, size_t size)
{
    if (incoming->status)
        incoming->skip -= size;
    else if (incoming->have < (size_t)incoming->header.records + incoming->header.body)
        incoming->have += size;
    else
        incoming->inline_have += size;
}

struct td__reader td__incoming_body(const struct td__incoming *incoming)
{
    return td__reader_of(incoming->bytes + incoming->header.records, incoming->header.body);
}

/* The names, which are in its records until it is freed. */
static td_status put_on_devices(struct td__incoming *incoming)
{
    bool reply = incoming->header.kind == TD__MESSAGE_REPLY;
    for (uint32_t i = 0; i < incoming->header.tensors; i++) {
        char name[TD__DEVICE_NAME + 1] = "";
        if (!incoming->devices[i].size)
            continue;
        memcpy(name, incoming->devices[i].data, incoming->devices[i].size);
        TD_TRY(
            td__device_arrive(incoming->agent, incoming->from, name, reply, &incoming->tensors[i]));
    }
    return TD_OK;
}

td_status td__incoming_own(struct td__incoming *incoming)
{
    if (incoming->devices)
        TD_TRY(put_on_devices(incoming));
    for (uint32_t i = 0; incoming->header.copy && i < incoming->header.tensors; i++) {
        td_tensor *tensor = incoming->tensors ? incoming->tensors[i] : NULL;
        if (tensor && td__storage_is_borrowed(tensor->storage))
            TD_TRY(td__storage_unshare_by(tensor->storage, td__rpc_copy, incoming->agent));
    }
    return TD_OK;
}

static td_tensor *get_tensor(void *arg, uint32_t number)
{
    struct td__incoming *incoming = arg;
    if (number < incoming->header.tensors)
        return td_tensor_retain(incoming->tensors[number]);
    td_fail(TD_ERR_INVALID, "there is no tensor %u in the message", number);
    return NULL;
}

static struct td__rref_record rref_record(const struct td__incoming *incoming, uint32_t number)
{
    const struct td__message_header *header = &incoming->header;
    const uint8_t *at = incoming->bytes + header->records -
                        (size_t)(header->rrefs - number) * TD__RREF_RECORD_SIZE;
    return (struct td__rref_record){
        .id = td__load_u64(at), .fork = td__load_u64(at + 8), .owner = (int)td__load_u32(at + 16)};
}

/* A reference can be taken once: its fork belongs to one handle. */
static td_rref *get_rref(void *arg, const void *bytes, size_t size)
{
    struct td__incoming *incoming = arg;
    struct td__reader reader = td__reader_of(bytes, size);
    uint32_t number = td__reader_u32(&reader);
    if (!td__reader_done(&reader) || number >= incoming->header.rrefs ||
        (incoming->taken && incoming->taken[number])) {
        td_fail(TD_ERR_INVALID, "a reference in a message is not valid");
        return NULL;
    }
    if (!incoming->taken && !(incoming->taken = calloc(incoming->header.rrefs, sizeof(bool)))) {
        td__fail_nomem("rpc");
        return NULL;
    }
    struct td__rref_record record = rref_record(incoming, number);
    td_rref *rref = td__rref_get(incoming->agent, incoming->from, &record);
    incoming->taken[number] = rref != NULL;
    return rref;
}

/* The message was served without its references, or could not be: they end here. */
static void refuse_rrefs(struct td__incoming *incoming)
{
    size_t whole = (size_t)incoming->header.records + incoming->header.body;
    if (!incoming->complete || incoming->have < whole)
        return;
    for (uint32_t i = 0; i < incoming->header.rrefs; i++) {
        struct td__rref_record record = rref_record(incoming, i);
        if (!incoming->taken || !incoming->taken[i])
            td__rref_refuse(incoming->agent, incoming->from, &record);
    }
}

static const td__codec_fns incoming_fns = {.get_tensor = get_tensor, .get_rref = get_rref};

td_value *td__incoming_value(struct td__incoming *incoming, const void *bytes, size_t size)
{
    return td__decode(bytes, size, &incoming_fns, incoming);
}

void td__incoming_free(struct td__incoming *incoming)
{
    if (!incoming)
        return;
    if (incoming->header.rrefs) {
        refuse_rrefs(incoming);
        free(incoming->taken);
    }
    if (incoming->header.tensors) {
        for (uint32_t i = 0; incoming->tensors && i < incoming->header.tensors; i++)
            td_tensor_release(incoming->tensors[i]);
        free(incoming->tensors);
        free(incoming->sizes);
        free(incoming->recorded);
        free(incoming->devices);
    }
    if (incoming->text)
        free(incoming->text);
    give_memory(incoming);
}
