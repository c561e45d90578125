/* Requests of two clients to the store's engine, cut out of a stream of bytes as tcp_server.c does. A client may become a
 * standby: what it is sent is followed by an engine of its own, which must accept all of it and have the same store at
 * the end.
 *
 *     byte 0      bits 0 … 5   the stream is cut into reads after every n bytes; 0: not at all
 *                 bit 6, 7     client 0, 1 is slow: one answer more, and it is full
 *     then        segments: control, length (one byte each), that many bytes
 *
 *     control     bit 0        which client
 *                 bit 1        its connection ends before the segment, and a new one begins
 *                 bit 2        the segment is an op and a body; the rest of the frame is made
 *                 bits 3 … 7   the id, where the frame is made; a made frame whose op is 128 or more goes to a
 *                              standby instead, as if its primary had sent it */
#include "fuzz.h"

#include "store/store_engine.h"

#include <stdlib.h>
#include <string.h>

enum { CLIENTS = 2, LONGEST_INPUT = 8192 };

struct client {
    struct td__session session;
    struct td__buffer in;
    bool has_output; /* the engine has reported output */
    bool open;
    bool slow;
    struct td__engine copy; /* where it is a standby */
};

static void on_output(struct td__session *session)
{
    TD__CONTAINER(session, struct client, session)->has_output = true;
}

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void make_standby(struct td__engine *engine)
{
    check(!td__replica_begin(engine));
    engine->replica->role = TD__REPLICA_STANDBY;
    engine->replica->term = engine->replica->copy_term = engine->replica->copy_version = 0;
}

/* What the primary has sent to a standby. */
static void follow(struct client *client, const struct td__wire_header *header, const uint8_t *body)
{
    if (!client->copy.replica)
        make_standby(&client->copy);
    if (header->code != TD__REPLICA_STATE)
        check(td__replica_follow(&client->copy, header, body));
}

static void compare(const struct td__engine *engine, const struct client *client)
{
    const struct td__map *map = &engine->kv.map;
    if (!client->copy.replica || !client->copy.replica->copy_term || !client->session.standby ||
        client->session.end)
        return;
    check(client->copy.kv.map.size == map->size);
    check(client->copy.replica->clients.size == engine->replica->clients.size);
    check(client->copy.replica->sequence == engine->replica->sequence);
    for (struct td__map_node *node = td__map_next(map, NULL); node;
         node = td__map_next(map, node)) {
        struct td__span key = {node->key, node->key_size};
        struct td__blob *here = td__kv_find(&engine->kv, key);
        struct td__blob *there = td__kv_find(&client->copy.kv, key);
        check(there && there->size == here->size && !memcmp(there->data, here->data, here->size));
    }
}

static void begin(struct client *client, struct td__engine *engine)
{
    *client = (struct client){.open = true, .slow = client->slow};
    client->session = (struct td__session){.engine = engine, .on_output = on_output};
    if (client->slow)
        client->session.in_flight = TD__SESSION_OUT_LIMIT;
}

static void end(struct client *client)
{
    if (!client->open)
        return;
    td__session_end(&client->session);
    td__engine_free(&client->copy);
    check(client->session.waiter_count == 0 && LIST_EMPTY(&client->session.waiters));
    td__buffer_free(&client->in);
    client->open = false;
}

/* All that was answered must be frames, and was announced. Then it is sent: forgotten. */
static void take_output(struct client *client)
{
    struct td__buffer *out = &client->session.out;
    if (!client->open || !out->size)
        return;
    check(client->has_output && !out->failed);
    for (size_t at = 0; at < out->size;) {
        struct td__wire_header header;
        check(out->size - at >= TD__WIRE_HEADER);
        check(td__wire_read_header(out->data + at, &header));
        check(header.body_size <= out->size - at - TD__WIRE_HEADER);
        bool of_replica = header.code >= TD__REPLICA_STATE && header.code <= TD__REPLICA_CHANGE;
        check(header.code <= TD_ERR_ABORTED || of_replica);
        if (of_replica && client->session.standby)
            follow(client, &header, out->data + at + TD__WIRE_HEADER);
        at += TD__WIRE_HEADER + header.body_size;
    }
    out->size = 0;
    client->has_output = false;
}

/* The end of a read: all is sent, and clients that were full get their pending answers. */
static void flush_all(struct client *clients)
{
    for (int i = 0; i < CLIENTS; i++) {
        struct client *client = &clients[i];
        take_output(client);
        while (client->open && client->session.owes_answers) {
            td__session_resume(&client->session);
            check(client->session.out.size || !client->session.owes_answers);
            take_output(client);
        }
    }
}

/* Handles the frames that are whole, each in memory of exactly its size. False when it must end. */
static bool handle(struct client *client)
{
    struct td__buffer *in = &client->in;
    size_t used = 0;
    while (in->size - used >= TD__WIRE_HEADER) {
        struct td__wire_header header;
        if (!td__wire_read_header(in->data + used, &header))
            return false;
        if (in->size - used - TD__WIRE_HEADER < header.body_size)
            break;
        uint8_t *body = malloc(header.body_size ? header.body_size : 1);
        memcpy(body, in->data + used + TD__WIRE_HEADER, header.body_size);
        bool fine = td__engine_execute(&client->session, &header, body);
        free(body);
        take_output(client);
        if (!fine || client->session.end == TD__SESSION_ENDS_NOW)
            return false;
        used += TD__WIRE_HEADER + header.body_size;
    }
    td__buffer_consume(in, used);
    return true;
}

static void receive(struct client *clients, struct client *client, const uint8_t *data, size_t size,
                    size_t piece)
{
    while (size && client->open) {
        size_t now = piece && piece < size ? piece : size;
        td__buffer_put(&client->in, data, now);
        data += now;
        size -= now;
        if (!handle(client))
            end(client); /* its will may wake the other one */
        flush_all(clients);
    }
}

/* A frame of a primary's that may be anything. */
static void mislead(struct td__engine *standby, const uint8_t *data, size_t size)
{
    struct td__wire_header header = {.body_size = size - 1, .code = data[0]};
    uint8_t *body = malloc(size);
    memcpy(body, data + 1, size - 1);
    td__replica_follow(standby, &header, body);
    free(body);
}

static void receive_frame(struct client *clients, struct client *client, uint32_t id,
                          const uint8_t *data, size_t size, size_t piece)
{
    struct td__buffer frame = {0};
    td__wire_begin(&frame, id, size ? data[0] : 0);
    if (size)
        td__buffer_put(&frame, data + 1, size - 1);
    td__wire_end(&frame, 0);
    receive(clients, client, frame.data, frame.size, piece);
    td__buffer_free(&frame);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct td__engine engine = {0}, standby = {0};
    struct client clients[CLIENTS] = {0};
    if (size < 1 || size > LONGEST_INPUT)
        return 0;
    size_t piece = data[0] & 63, at = 1;
    make_standby(&standby);
    for (int i = 0; i < CLIENTS; i++) {
        clients[i].slow = data[0] >> (6 + i) & 1;
        begin(&clients[i], &engine);
    }
    while (size - at >= 2) {
        uint8_t control = data[at];
        size_t length = data[at + 1];
        at += 2;
        if (length > size - at)
            length = size - at;
        struct client *client = &clients[control & 1];
        if (control & 2 || !client->open) {
            end(client);
            flush_all(clients);
            begin(client, &engine);
        }
        if (control & 4 && length && data[at] >= TD__REPLICA_STATE)
            mislead(&standby, data + at, length);
        else if (control & 4)
            receive_frame(clients, client, control >> 3, data + at, length, piece);
        else
            receive(clients, client, data + at, length, piece);
        at += length;
    }
    flush_all(clients);
    for (int i = 0; i < CLIENTS; i++)
        if (clients[i].open)
            compare(&engine, &clients[i]);
    for (int i = 0; i < CLIENTS; i++)
        end(&clients[i]);
    td__engine_free(&standby);
    check(engine.waiting.size == 0); /* without clients there are no waiters */
    td__engine_free(&engine);
    return 0;
}
