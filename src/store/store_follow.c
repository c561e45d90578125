/* A standby's side of replication: frames of the primary's are carried out on the copy; see store_replica.h.
 *
 * A snapshot is put together beside the copy that is there, and replaces it when it is whole. */
#include "store/store_replica.h"

#include "base/fail.h"
#include "store/store_engine.h"

#include <string.h>

static void drop_coming(struct td__replica *replica)
{
    td__replica_forget_all(&replica->coming.clients);
    td__kv_free(&replica->coming.kv);
    replica->coming.kv = (struct td__kv){0};
    replica->coming.open = false;
}

static bool begin_snapshot(struct td__replica *replica, struct td__reader *reader)
{
    uint64_t term = td__reader_u64(reader), version = td__reader_u64(reader);
    uint64_t sequence = td__reader_u64(reader);
    if (!td__reader_done(reader) || term < replica->term || !term)
        return false;
    drop_coming(replica);
    replica->coming.open = true;
    replica->coming.term = replica->term = term;
    replica->coming.version = version;
    replica->coming.sequence = sequence;
    return true;
}

static bool take_key(struct td__replica *replica, struct td__reader *reader)
{
    struct td__span key = td__reader_string(reader, TD_STORE_MAX_KEY);
    struct td__span value = td__reader_string(reader, TD_STORE_MAX_VALUE);
    return td__reader_done(reader) && replica->coming.open &&
           !td__kv_set(&replica->coming.kv, key, value);
}

static bool copy_span(struct td__span span, td_bytes *bytes)
{
    td_bytes_free(bytes);
    return !td_bytes_copy(span.data, span.size, bytes);
}

static bool take_client(struct td__replica *replica, struct td__reader *reader)
{
    uint64_t id = td__reader_u64(reader);
    struct td__known_client *known = replica->coming.open && !reader->failed
                                         ? td__replica_know(&replica->coming.clients, id)
                                         : NULL;
    if (!known)
        return false;
    known->done = td__reader_u64(reader);
    known->gone = td__reader_u8(reader);
    bool will = td__reader_u8(reader);
    struct td__span key = td__reader_string(reader, TD_STORE_MAX_KEY);
    struct td__span value = td__reader_string(reader, TD_STORE_MAX_VALUE);
    if (reader->failed ||
        (will && (!copy_span(key, &known->will_key) || !copy_span(value, &known->will_value))))
        return false;
    uint64_t failed = td__reader_u64(reader);
    uint8_t status = td__reader_u8(reader);
    struct td__span text = td__reader_string(reader, TD__REPLICA_NOTE - 1);
    uint32_t count = td__reader_u32(reader);
    if (reader->failed || count > TD__REPLICA_WINDOW || status > TD_ERR_ABORTED)
        return false;
    if (failed)
        td__replica_note(known, failed, status, text.data, text.size);
    known->answered = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t number = td__reader_u64(reader);
        td__replica_remember(known, number, TD__WIRE_ADD, (int64_t)td__reader_u64(reader));
    }
    return td__reader_done(reader);
}

static bool end_snapshot(struct td__engine *engine, struct td__reader *reader)
{
    struct td__replica *replica = engine->replica;
    if (!td__reader_done(reader) || !replica->coming.open)
        return false;
    td__kv_free(&engine->kv);
    td__replica_forget_all(&replica->clients);
    engine->kv = replica->coming.kv;
    replica->clients = replica->coming.clients;
    replica->copy_term = replica->coming.term;
    replica->copy_version = replica->coming.version;
    replica->sequence = replica->coming.sequence;
    replica->coming.kv = (struct td__kv){0};
    replica->coming.clients = (struct td__map){0};
    replica->coming.open = false;
    replica->whole = false; /* until the primary counts on it */
    return true;
}

static bool take_members(struct td__replica *replica, struct td__reader *reader)
{
    struct td__replica_list list;
    uint64_t version = td__reader_u64(reader);
    if (!td__replica_read_members(reader, &list) || !td__reader_done(reader) ||
        version <= replica->copy_version)
        return false;
    replica->copy_version = version;
    replica->members = list;
    replica->whole = false;
    for (int i = 0; i < list.count; i++)
        replica->whole |= list.at[i].number == replica->number;
    return true;
}

static bool take_note(struct td__known_client *known, uint64_t number, struct td__reader *reader)
{
    uint8_t status = td__reader_u8(reader);
    struct td__span text = td__reader_string(reader, TD__REPLICA_NOTE - 1);
    if (!td__reader_done(reader) || status > TD_ERR_ABORTED)
        return false;
    if (known)
        td__replica_note(known, number, status, text.data, text.size);
    return true;
}

/* A request that had an effect at the primary, and has the same one here. */
static bool repeat(struct td__engine *engine, struct td__known_client *known, uint64_t number,
                   uint8_t op, struct td__reader *reader)
{
    struct td__wire_header header = {.body_size = (size_t)(reader->end - reader->at), .code = op};
    struct td__wire_request request;
    struct td__span result;
    if (!td__wire_is_change(op) || td__wire_parse(&header, reader->at, &request))
        return false;
    bool same = true;
    if (op != TD__WIRE_WILL)
        same = !td__engine_apply(engine, &request, &result) && request.had_effect;
    else if (known)
        same = copy_span(*request.keys, &known->will_key) &&
               copy_span(*request.values, &known->will_value);
    if (same && known)
        td__replica_remember(known, number, op, op == TD__WIRE_ADD ? request.number : 1);
    td__wire_request_free(&request);
    return same;
}

/* An entry that is no request. */
static bool take_entry(struct td__engine *engine, struct td__known_client *known, uint64_t number,
                       uint8_t entry, struct td__reader *reader)
{
    struct td__replica *replica = engine->replica;
    if (entry == TD__ENTRY_MEMBERS)
        return take_members(replica, reader);
    if (entry == TD__ENTRY_NOTE)
        return take_note(known, number, reader);
    if (!td__reader_done(reader))
        return false;
    if (entry == TD__ENTRY_BEAT)
        return true;
    if (!known)
        return false;
    if (entry == TD__ENTRY_HELLO) {
        if (number > known->done)
            known->done = number;
        return true;
    }
    if (entry == TD__ENTRY_GONE) {
        known->gone = known->will_key.data;
        return !known->gone ||
               !td__engine_set(engine,
                               (struct td__span){known->will_key.data, known->will_key.size},
                               (struct td__span){known->will_value.data, known->will_value.size});
    }
    if (entry != TD__ENTRY_FORGET)
        return false;
    td__replica_forget(&replica->clients, known);
    return true;
}

static bool take_change(struct td__engine *engine, struct td__reader *reader)
{
    struct td__replica *replica = engine->replica;
    uint64_t sequence = td__reader_u64(reader), id = td__reader_u64(reader);
    uint64_t number = td__reader_u64(reader);
    uint8_t op = td__reader_u8(reader);
    /* Where a later term has been seen, nothing of an earlier one is taken any more. */
    if (reader->failed || replica->coming.open || sequence != replica->sequence + 1 ||
        replica->copy_term != replica->term)
        return false;
    struct td__known_client *known = id ? td__replica_find(&replica->clients, id) : NULL;
    if (id && !known && op != TD__ENTRY_FORGET &&
        !(known = td__replica_know(&replica->clients, id)))
        return false;
    bool fine = op >= TD__ENTRY_HELLO ? take_entry(engine, known, number, op, reader)
                                      : repeat(engine, known, number, op, reader);
    if (fine)
        replica->sequence = sequence;
    return fine;
}

bool td__replica_follow(struct td__engine *engine, const struct td__wire_header *header,
                        const uint8_t *body)
{
    struct td__replica *replica = engine->replica;
    struct td__reader reader = td__reader_of(body, header->body_size);
    if (replica->role == TD__REPLICA_PRIMARY)
        return false;
    switch (header->code) {
    case TD__REPLICA_SNAPSHOT:
        return begin_snapshot(replica, &reader);
    case TD__REPLICA_KEY:
        return take_key(replica, &reader);
    case TD__REPLICA_CLIENT:
        return take_client(replica, &reader);
    case TD__REPLICA_SNAPSHOT_END:
        return end_snapshot(engine, &reader);
    case TD__REPLICA_CHANGE:
        return take_change(engine, &reader);
    }
    return false;
}
