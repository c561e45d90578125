/* The primary's side of replication, and what every server has in common; see store_replica.h.
 *
 * Order of events for one change of a client, at the primary:
 *
 *     engine carries it out -> a CHANGE is added to what each standby is sent -> the answer is added to what the
 *     client is sent, and held there (tcp_server.c) until td__replica_confirmed() has reached its sequence
 *
 * A list of members has a version. When a standby is dropped, every client is told so before it gets an answer that the
 * dropped one does not have: a client that finds a primary with an older version than it knows refuses it. */
#include "store/store_replica.h"

#include "base/fail.h"
#include "os/address.h"
#include "store/store_engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Lists and reports ----------------------------------------------------------------------- */

void td__replica_put_members(struct td__buffer *buffer, const struct td__replica_list *list)
{
    td__buffer_put_u32(buffer, (uint32_t)list->count);
    for (int i = 0; i < list->count; i++) {
        td__buffer_put_u32(buffer, list->at[i].number);
        td__buffer_put_string(buffer, list->at[i].address, strlen(list->at[i].address));
    }
}

/* A text without zero bytes that fits `room`; false when it is none. */
static bool read_text(struct td__reader *reader, char *text, size_t room)
{
    struct td__span span = td__reader_string(reader, room - 1);
    if (reader->failed || (span.size && memchr(span.data, 0, span.size)))
        return false;
    if (span.size)
        memcpy(text, span.data, span.size);
    text[span.size] = '\0';
    return true;
}

bool td__replica_read_members(struct td__reader *reader, struct td__replica_list *list)
{
    uint32_t count = td__reader_u32(reader);
    if (count > TD__REPLICA_MOST)
        return false;
    list->count = (int)count;
    for (int i = 0; i < list->count; i++) {
        list->at[i].number = td__reader_u32(reader);
        if (!read_text(reader, list->at[i].address, sizeof list->at[i].address))
            return false;
    }
    return !reader->failed;
}

bool td__replica_read_state(const uint8_t *body, size_t size, struct td__replica_report *report)
{
    struct td__reader reader = td__reader_of(body, size);
    report->role = td__reader_u8(&reader);
    uint8_t known = td__reader_u8(&reader);
    report->known = known & 1;
    report->gone = known & 2;
    report->term = td__reader_u64(&reader);
    report->version = td__reader_u64(&reader);
    report->base_term = td__reader_u64(&reader);
    report->base_version = td__reader_u64(&reader);
    report->done = td__reader_u64(&reader);
    report->number = td__reader_u32(&reader);
    return td__replica_read_members(&reader, &report->members) && td__reader_done(&reader) &&
           report->role <= TD__REPLICA_ENDED && known <= 3;
}

void td__replica_put_state(struct td__engine *engine, const struct td__session *session,
                           struct td__buffer *buffer)
{
    static const struct td__replica alone = {
        .role = TD__REPLICA_PRIMARY, .term = 1, .copy_version = 1, .members.count = 1};
    const struct td__replica *replica = engine->replica ? engine->replica : &alone;
    const struct td__known_client *known = session ? session->known : NULL;
    size_t start = td__wire_begin(buffer, 0, TD__REPLICA_STATE);
    td__buffer_put_u8(buffer, (uint8_t)replica->role);
    td__buffer_put_u8(
        buffer, session && session->was_known ? (uint8_t)(1 | (known && known->gone ? 2 : 0)) : 0);
    td__buffer_put_u64(buffer, replica->term);
    td__buffer_put_u64(buffer, replica->copy_version);
    td__buffer_put_u64(buffer, replica->base_term);
    td__buffer_put_u64(buffer, replica->base_version);
    td__buffer_put_u64(buffer, known ? known->done : session ? session->changes : 0);
    td__buffer_put_u32(buffer, replica->number);
    td__replica_put_members(buffer, &replica->members);
    td__wire_end(buffer, start);
}

bool td__replica_split_address(const char *address, char host[TD__REPLICA_ADDRESS], int *port)
{
    *port = 0;
    if (strlen(address) >= TD__REPLICA_ADDRESS)
        return false;
    if (!strncmp(address, "unix:", 5)) {
        memcpy(host, address, strlen(address) + 1);
        return address[5] != '\0';
    }
    return td__split_host_port(address, host, TD__REPLICA_ADDRESS, port) && *port > 0;
}

/* ---- What standbys are told ------------------------------------------------------------------ */

static void tell_standbys(struct td__engine *engine, uint64_t client, uint64_t number, uint8_t op,
                          const void *body, size_t size)
{
    struct td__replica *replica = engine->replica;
    struct td__standby *standby;
    replica->sequence++;
    LIST_FOREACH (standby, &replica->standbys, link) {
        struct td__session *session = standby->session;
        size_t start = td__wire_begin(&session->out, 0, TD__REPLICA_CHANGE);
        td__buffer_put_u64(&session->out, replica->sequence);
        td__buffer_put_u64(&session->out, client);
        td__buffer_put_u64(&session->out, number);
        td__buffer_put_u8(&session->out, op);
        td__buffer_put(&session->out, body, size);
        td__wire_end(&session->out, start);
        session->on_output(session);
    }
}

void td__replica_changed(struct td__session *session, uint64_t number,
                         const struct td__wire_request *request, td_status status,
                         const uint8_t *body, size_t size)
{
    struct td__known_client *known = session->known;
    uint64_t id = known ? known->id : 0;
    if (status && td__wire_is_silent(request->op)) {
        struct td__buffer note = {0};
        const char *text = td__error_text();
        size_t length = strnlen(text, TD__REPLICA_NOTE - 1);
        td__buffer_put_u8(&note, (uint8_t)status);
        td__buffer_put_string(&note, text, length);
        if (known)
            td__replica_note(known, number, (uint8_t)status, text, length);
        if (!note.failed)
            tell_standbys(session->engine, id, number, TD__ENTRY_NOTE, note.data, note.size);
        td__buffer_free(&note);
    } else if (!status && request->had_effect) {
        if (known)
            td__replica_remember(known, number, request->op,
                                 request->op == TD__WIRE_ADD ? request->number : 1);
        tell_standbys(session->engine, id, number, request->op, body, size);
    } else if (known && number > known->done) {
        known->done = number;
    }
}

/* The members are the primary and the standbys that have a whole copy, by number. */
static void list_members(struct td__replica *replica)
{
    struct td__replica_list *list = &replica->members;
    struct td__standby *standby;
    list->count = 1;
    list->at[0].number = replica->number;
    memcpy(list->at[0].address, replica->address, sizeof replica->address);
    LIST_FOREACH (standby, &replica->standbys, link) {
        if (!standby->member || list->count == TD__REPLICA_MOST)
            continue;
        int place = list->count++;
        for (; place > 0 && list->at[place - 1].number > standby->number; place--)
            list->at[place] = list->at[place - 1];
        list->at[place].number = standby->number;
        memcpy(list->at[place].address, standby->address, sizeof standby->address);
    }
}

static void change_members(struct td__engine *engine)
{
    struct td__replica *replica = engine->replica;
    struct td__buffer body = {0};
    list_members(replica);
    replica->copy_version++;
    td__buffer_put_u64(&body, replica->copy_version);
    td__replica_put_members(&body, &replica->members);
    tell_standbys(engine, 0, 0, TD__ENTRY_MEMBERS, body.data, body.failed ? 0 : body.size);
    replica->members_sequence = replica->sequence;
    td__buffer_free(&body);
}

static void drop_standby(struct td__engine *engine, struct td__standby *standby, const char *why)
{
    struct td__session *session = standby->session;
    bool member = standby->member;
    if (why)
        td_log(TD_LOG_INFO,
               "store server: standby %u (%s) is dropped: %s; the store goes on without it, and it "
               "may attach again",
               standby->number, standby->address, why);
    LIST_REMOVE(standby, link);
    session->standby = NULL;
    session->end = TD__SESSION_ENDS_NOW;
    session->on_output(session);
    free(standby);
    if (member && engine->replica->role == TD__REPLICA_PRIMARY)
        change_members(engine);
}

uint64_t td__replica_confirmed(const struct td__engine *engine)
{
    const struct td__replica *replica = engine->replica;
    const struct td__standby *standby;
    uint64_t confirmed = replica->sequence;
    if (replica->role != TD__REPLICA_PRIMARY)
        return UINT64_MAX; /* it answers nothing more */
    LIST_FOREACH (standby, &replica->standbys, link) {
        if (standby->member && standby->acked < confirmed)
            confirmed = standby->acked;
    }
    return confirmed;
}

bool td__replica_is_clogged(const struct td__engine *engine)
{
    const struct td__standby *standby;
    LIST_FOREACH (standby, &engine->replica->standbys, link) {
        if (standby->member &&
            standby->session->in_flight + standby->session->out.size > TD__REPLICA_BACKLOG)
            return true;
    }
    return false;
}

/* ---- The beginning of a standby -------------------------------------------------------------- */

/* The whole store, as it is between two requests. */
static void put_snapshot(const struct td__engine *engine, struct td__buffer *out)
{
    const struct td__replica *replica = engine->replica;
    size_t start = td__wire_begin(out, 0, TD__REPLICA_SNAPSHOT);
    td__buffer_put_u64(out, replica->term);
    td__buffer_put_u64(out, replica->copy_version);
    td__buffer_put_u64(out, replica->sequence);
    td__wire_end(out, start);
    const struct td__map *map = &engine->kv.map;
    for (struct td__map_node *node = td__map_next(map, NULL); node;
         node = td__map_next(map, node)) {
        struct td__span key = {node->key, node->key_size};
        struct td__blob *value = td__kv_find(&engine->kv, key);
        start = td__wire_begin(out, 0, TD__REPLICA_KEY);
        td__buffer_put_string(out, key.data, key.size);
        td__buffer_put_string(out, value->data, value->size);
        td__wire_end(out, start);
    }
    map = &replica->clients;
    for (struct td__map_node *node = td__map_next(map, NULL); node; node = td__map_next(map, node))
        td__replica_put_client(out, TD__CONTAINER(node, struct td__known_client, node));
    start = td__wire_begin(out, 0, TD__REPLICA_SNAPSHOT_END);
    td__wire_end(out, start);
}

void td__replica_refuse(struct td__session *session)
{
    td__replica_put_state(session->engine, session, &session->out);
    session->end = TD__SESSION_ENDS_SENT;
    session->on_output(session);
}

static bool attach(struct td__session *session, struct td__reader *reader)
{
    struct td__engine *engine = session->engine;
    uint64_t term = td__reader_u64(reader);
    struct td__replica_member named = {.number = td__reader_u32(reader)};
    if (!read_text(reader, named.address, sizeof named.address) || !td__reader_done(reader) ||
        session->standby || session->client_id || td__replica_begin(engine))
        return false;
    struct td__replica *replica = engine->replica;
    td__replica_see_term(engine, term);
    int count = 0;
    struct td__standby *standby, *earlier = NULL;
    LIST_FOREACH (standby, &replica->standbys, link) {
        count++;
        if (standby->number == named.number)
            earlier = standby;
    }
    if (replica->role != TD__REPLICA_PRIMARY || named.number == replica->number ||
        (!earlier && count + 1 >= TD__REPLICA_MOST)) {
        td__replica_refuse(session);
        return true;
    }
    if (earlier)
        drop_standby(engine, earlier, "it has attached anew");
    standby = calloc(1, sizeof *standby);
    if (!standby)
        return false;
    standby->session = session;
    standby->number = named.number;
    memcpy(standby->address, named.address, sizeof standby->address);
    standby->awaited = replica->sequence;
    standby->awaited_since = td__now_ns();
    session->standby = standby;
    put_snapshot(engine, &session->out);
    session->on_output(session);
    LIST_INSERT_HEAD(&replica->standbys, standby, link);
    return true;
}

static bool take_ack(struct td__session *session, uint64_t sequence)
{
    struct td__standby *standby = session->standby;
    const struct td__replica *replica = session->engine->replica;
    if (!standby || sequence > replica->sequence || sequence < standby->acked)
        return !standby && session->end; /* of one that was just dropped */
    standby->acked = sequence;
    if (!standby->member && replica->role == TD__REPLICA_PRIMARY) {
        standby->member = true;
        change_members(session->engine);
    }
    return true;
}

/* ---- Clients --------------------------------------------------------------------------------- */

static void greet(struct td__session *session, uint64_t id, uint64_t first)
{
    session->client_id = id;
    session->changes = first - 1;
    LIST_INSERT_HEAD(&session->engine->greeted, session, greeted_link);
}

/* Moves what the session has of its client to what all servers remember. */
static bool adopt(struct td__engine *engine, struct td__session *session)
{
    struct td__known_client *known = td__replica_know(&engine->replica->clients,
                                                      session->client_id);
    if (!known)
        return false;
    if (session->changes > known->done)
        known->done = session->changes;
    known->session = session;
    session->known = known;
    session->was_known = true;
    if (session->will_key.data) {
        td_bytes_free(&known->will_key);
        td_bytes_free(&known->will_value);
        known->will_key = session->will_key;
        known->will_value = session->will_value;
        session->will_key = session->will_value = (td_bytes){0};
    }
    return true;
}

static bool come_back(struct td__session *session, uint64_t id, uint64_t first)
{
    struct td__engine *engine = session->engine;
    struct td__known_client *known = td__replica_find(&engine->replica->clients, id);
    session->was_known = known;
    if (!known && !(known = td__replica_know(&engine->replica->clients, id)))
        return false;
    if (!session->was_known)
        known->done = first - 1;
    if (known->session) { /* nothing more of its earlier connection counts */
        known->session->known = NULL;
        known->session->end = TD__SESSION_ENDS_NOW;
        known->session->on_output(known->session);
    }
    known->session = session;
    session->known = known;
    greet(session, id, first);
    tell_standbys(engine, id, known->done, TD__ENTRY_HELLO, NULL, 0);
    return true;
}

static bool hello(struct td__session *session, struct td__reader *reader)
{
    struct td__engine *engine = session->engine;
    uint64_t id = td__reader_u64(reader), first = td__reader_u64(reader);
    uint64_t term = td__reader_u64(reader);
    bool wants_state = td__reader_u8(reader);
    if (!td__reader_done(reader) || !first || session->client_id || session->standby ||
        session->changes)
        return false;
    if (term > 1 && td__replica_begin(engine))
        return false;
    if (engine->replica)
        td__replica_see_term(engine, term);
    if (engine->replica && engine->replica->role != TD__REPLICA_PRIMARY) {
        td__replica_refuse(session);
        return true;
    }
    if (id && engine->replica && !come_back(session, id, first))
        return false;
    if (id && !engine->replica)
        greet(session, id, first);
    if (wants_state || engine->replica) {
        td__replica_put_state(engine, session, &session->out);
        session->on_output(session);
    }
    return true;
}

/* Of a client that is not remembered. */
static void carry_out_own_will(struct td__session *session)
{
    struct td__span key = {session->will_key.data, session->will_key.size};
    struct td__span value = {session->will_value.data, session->will_value.size};
    struct td__buffer body = {0};
    td__buffer_put_u32(&body, 1);
    td__buffer_put_string(&body, key.data, key.size);
    td__buffer_put_string(&body, value.data, value.size);
    if (!body.failed && !td__engine_set(session->engine, key, value) && session->engine->replica)
        tell_standbys(session->engine, 0, 0, TD__WIRE_SET, body.data, body.size);
    td__buffer_free(&body);
}

static void carry_out_will(struct td__engine *engine, struct td__known_client *known)
{
    if (known->gone || !known->will_key.data)
        return;
    known->gone = true;
    td__engine_set(engine, (struct td__span){known->will_key.data, known->will_key.size},
                   (struct td__span){known->will_value.data, known->will_value.size});
    tell_standbys(engine, known->id, 0, TD__ENTRY_GONE, NULL, 0);
}

void td__replica_session_end(struct td__session *session)
{
    struct td__engine *engine = session->engine;
    struct td__known_client *known = session->known;
    bool leads = !engine->replica || engine->replica->role == TD__REPLICA_PRIMARY;
    if (session->client_id)
        LIST_REMOVE(session, greeted_link);
    if (session->will_key.data && !session->leaving && leads)
        carry_out_own_will(session);
    if (session->standby)
        drop_standby(engine, session->standby,
                     session->leaving || !leads ? NULL : "its connection has ended");
    if (!known)
        return;
    session->known = NULL;
    known->session = NULL;
    known->absent_since = td__now_ns();
    if (!leads)
        return;
    if (session->leaving) {
        tell_standbys(engine, known->id, 0, TD__ENTRY_FORGET, NULL, 0);
        td__replica_forget(&engine->replica->clients, known);
    } else {
        carry_out_will(engine, known);
    }
}

bool td__replica_execute(struct td__session *session, const struct td__wire_header *header,
                         const uint8_t *body)
{
    struct td__reader reader = td__reader_of(body, header->body_size);
    if (header->code == TD__WIRE_HELLO)
        return hello(session, &reader);
    if (header->code == TD__WIRE_ATTACH)
        return attach(session, &reader);
    uint64_t number = td__reader_u64(&reader);
    if (!td__reader_done(&reader))
        return false;
    if (header->code == TD__WIRE_ACK)
        return take_ack(session, number);
    if (td__replica_begin(session->engine))
        return false;
    td__replica_see_term(session->engine, number);
    return true;
}

/* ---- Terms and time -------------------------------------------------------------------------- */

td_status td__replica_begin(struct td__engine *engine)
{
    if (engine->replica)
        return TD_OK;
    struct td__replica *replica = calloc(1, sizeof *replica);
    if (!replica)
        return td__fail_nomem("store server");
    replica->role = TD__REPLICA_PRIMARY;
    replica->term = replica->copy_term = replica->copy_version = 1;
    list_members(replica);
    engine->replica = replica;
    struct td__session *session;
    LIST_FOREACH (session, &engine->greeted, greeted_link) {
        if (adopt(engine, session))
            continue;
        LIST_FOREACH (session, &engine->greeted, greeted_link)
            session->known = NULL;
        td__replica_free(engine);
        return td__fail_nomem("store server");
    }
    return TD_OK;
}

void td__replica_free(struct td__engine *engine)
{
    struct td__replica *replica = engine->replica;
    if (!replica)
        return;
    td__replica_forget_all(&replica->clients);
    td__replica_forget_all(&replica->coming.clients);
    td__kv_free(&replica->coming.kv);
    free(replica);
    engine->replica = NULL;
}

void td__replica_see_term(struct td__engine *engine, uint64_t term)
{
    struct td__replica *replica = engine->replica;
    if (term <= replica->term)
        return;
    if (replica->role == TD__REPLICA_PRIMARY) {
        td_log(TD_LOG_INFO,
               "store server: this one is the primary of term %llu, but there is one of term %llu: "
               "it is deposed, and answers nothing more",
               (unsigned long long)replica->term, (unsigned long long)term);
        replica->role = TD__REPLICA_DEPOSED;
        replica->whole = false;
        struct td__session *session; /* they end; what is remembered may be replaced before */
        LIST_FOREACH (session, &engine->greeted, greeted_link) {
            if (session->known)
                session->known->session = NULL;
            session->known = NULL;
        }
    }
    replica->term = term;
}

td_status td__replica_promote(struct td__engine *engine, uint64_t term)
{
    struct td__replica *replica = engine->replica;
    unsigned long long seen = replica->term, copy = replica->copy_term;
    bool fresh = !replica->term && !replica->copy_term; /* the first server of a store */
    if (replica->role == TD__REPLICA_PRIMARY)
        return td_fail(TD_ERR_STATE, "store server: it is the primary already, of term %llu", seen);
    if (replica->role == TD__REPLICA_ENDED)
        return td_fail(TD_ERR_STATE, "store server: the store was closed in term %llu", seen);
    if (!fresh && copy < seen)
        return td_fail(TD_ERR_STATE,
                       "store server: its copy is of term %llu, but there has been a primary of "
                       "term %llu since: promote a server that was attached to that one",
                       copy, seen);
    if (!fresh && !replica->whole)
        return td_fail(TD_ERR_STATE, "store server: it has no whole copy of the store");
    if (term <= replica->term)
        return td_fail(TD_ERR_STATE,
                       "store server: term %llu is not higher than %llu, which it has seen",
                       (unsigned long long)term, seen);
    replica->role = TD__REPLICA_PRIMARY;
    replica->base_term = replica->copy_term;
    replica->base_version = replica->copy_version;
    replica->term = replica->copy_term = term;
    replica->copy_version = 1;
    list_members(replica);
    replica->members_sequence = replica->sequence;
    int64_t now = td__now_ns();
    for (struct td__map_node *node = td__map_next(&replica->clients, NULL); node;
         node = td__map_next(&replica->clients, node))
        TD__CONTAINER(node, struct td__known_client, node)->absent_since = now;
    return TD_OK;
}

/* A standby is dropped when it was late at two looks in a row: when this process itself was stopped for a while, what has
 * come from the standby meanwhile is read in between. */
static void look_at_standby(struct td__engine *engine, struct td__standby *standby, int64_t now,
                            int64_t limit_ns)
{
    size_t in_flight = standby->session->in_flight + standby->session->out.size;
    bool moves = !standby->member && in_flight < standby->was_in_flight;
    standby->was_in_flight = in_flight;
    if (moves || (standby->member && standby->acked >= standby->awaited)) {
        standby->awaited = engine->replica->sequence;
        standby->awaited_since = now;
        standby->late = false;
        return;
    }
    bool late = now - standby->awaited_since > limit_ns;
    char why[80];
    snprintf(why, sizeof why, "it has not answered for %.3g s",
             (double)(now - standby->awaited_since) / 1e9);
    if (late && standby->late)
        drop_standby(engine, standby, why);
    else
        standby->late = late;
}

void td__replica_keep(struct td__engine *engine, const uint32_t *numbers, int count)
{
    for (struct td__standby *at = LIST_FIRST(&engine->replica->standbys), *next; at; at = next) {
        bool listed = false;
        next = LIST_NEXT(at, link);
        for (int i = 0; i < count; i++)
            listed = listed || numbers[i] == at->number;
        if (!listed)
            drop_standby(engine, at, "its node is lost");
    }
}

void td__replica_tick(struct td__engine *engine, int64_t now, int64_t limit_ns)
{
    struct td__replica *replica = engine->replica;
    if (replica->role != TD__REPLICA_PRIMARY)
        return;
    for (struct td__standby *at = LIST_FIRST(&replica->standbys), *next; at; at = next) {
        next = LIST_NEXT(at, link);
        look_at_standby(engine, at, now, limit_ns);
    }
    if (!LIST_EMPTY(&replica->standbys))
        tell_standbys(engine, 0, 0, TD__ENTRY_BEAT, NULL, 0);
    struct td__map *clients = &replica->clients;
    for (struct td__map_node *node = td__map_next(clients, NULL), *next; node; node = next) {
        next = td__map_next(clients, node);
        struct td__known_client *known = TD__CONTAINER(node, struct td__known_client, node);
        if (known->session || now - known->absent_since <= limit_ns)
            continue;
        carry_out_will(engine, known);
        tell_standbys(engine, known->id, 0, TD__ENTRY_FORGET, NULL, 0);
        td__replica_forget(clients, known);
    }
}
