/* The server's side of the store; see store_engine.h.
 *
 * A GET or WAIT whose keys are not all there is parked at the first one that is missing. When that
 * key appears, the waiter is looked at again: it is answered, or moves on to the next missing key.
 * So a set costs one look-up when there is no waiter for its key, and a waiter is in one list only:
 *
 *     engine->waiting: "a" -> waiter <-> waiter      (parked_link)
 *     session->waiters: waiter <-> waiter            (own_link) */
#include "store/store_engine.h"

#include "base/fail.h"
#include "store/store_ops.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_WAITS = 16384 }; /* of one session */

/* The waiters parked at one key. */
struct wait_key {
    struct td__map_node node;
    LIST_HEAD(, td__waiter) waiters;
    char key[];
};

struct td__waiter {
    struct td__session *session;
    uint32_t id;
    uint8_t op;
    size_t at;               /* the key it is parked at */
    struct wait_key *parked; /* NULL: passed over, until its session is not full any more */
    LIST_ENTRY(td__waiter) parked_link, own_link;
    size_t count;
    struct td__span keys[]; /* followed by their bytes */
};

/* ---- Answers --------------------------------------------------------------------------------- */

static void end_answer(struct td__session *session, size_t start)
{
    td__wire_end(&session->out, start);
    session->on_output(session);
}

static void answer_text(struct td__session *session, uint32_t id, td_status status,
                        struct td__span text)
{
    size_t start = td__wire_begin(&session->out, id, (uint8_t)status);
    td__buffer_put_string(&session->out, text.data, text.size);
    end_answer(session, start);
}

static void answer_failure(struct td__session *session, uint32_t id, td_status status)
{
    const char *text = td__error_text();
    answer_text(session, id, status, (struct td__span){text, strlen(text)});
}

static void answer_u8(struct td__session *session, uint32_t id, uint8_t value)
{
    size_t start = td__wire_begin(&session->out, id, TD_OK);
    td__buffer_put_u8(&session->out, value);
    end_answer(session, start);
}

static void answer_i64(struct td__session *session, uint32_t id, int64_t value)
{
    size_t start = td__wire_begin(&session->out, id, TD_OK);
    td__buffer_put_u64(&session->out, (uint64_t)value);
    end_answer(session, start);
}

/* The values of `keys`, all of which exist; none for WAIT and SYNC. */
static void answer_values(struct td__session *session, uint32_t id, const struct td__span *keys,
                          size_t count)
{
    size_t start = td__wire_begin(&session->out, id, TD_OK);
    for (size_t i = 0; i < count; i++) {
        struct td__blob *blob = td__kv_find(&session->engine->kv, keys[i]);
        td__buffer_put_string(&session->out, blob->data, blob->size);
        if (session->out.size - start > TD__WIRE_MAX_BODY) {
            session->out.size = start;
            td_fail(TD_ERR_INVALID, "the values asked for at once are more than %zu bytes",
                    TD__WIRE_MAX_BODY);
            answer_failure(session, id, TD_ERR_INVALID);
            return;
        }
    }
    end_answer(session, start);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static struct wait_key *wait_key_for(struct td__engine *engine, struct td__span key)
{
    struct td__map_node *node = td__map_find(&engine->waiting, key.data, key.size);
    if (node)
        return TD__CONTAINER(node, struct wait_key, node);
    struct wait_key *wait = malloc(sizeof *wait + key.size);
    if (!wait)
        return NULL;
    memcpy(wait->key, key.data, key.size);
    wait->node = (struct td__map_node){.key = wait->key, .key_size = key.size};
    LIST_INIT(&wait->waiters);
    if (!td__map_insert(&engine->waiting, &wait->node)) {
        free(wait);
        return NULL;
    }
    return wait;
}

static bool park(struct td__waiter *waiter, size_t at)
{
    struct wait_key *wait = wait_key_for(waiter->session->engine, waiter->keys[at]);
    if (!wait)
        return false;
    waiter->at = at;
    waiter->parked = wait;
    LIST_INSERT_HEAD(&wait->waiters, waiter, parked_link);
    return true;
}

static void unpark(struct td__waiter *waiter)
{
    struct wait_key *wait = waiter->parked;
    LIST_REMOVE(waiter, parked_link);
    if (LIST_EMPTY(&wait->waiters)) {
        td__map_remove(&waiter->session->engine->waiting, &wait->node);
        free(wait);
    }
}

static void drop_waiter(struct td__waiter *waiter)
{
    LIST_REMOVE(waiter, own_link);
    waiter->session->waiter_count--;
    free(waiter);
}

static void answer_waiter(struct td__waiter *waiter)
{
    answer_values(waiter->session, waiter->id, waiter->keys,
                  waiter->op == TD__WIRE_GET ? waiter->count : 0);
}

bool td__session_is_full(const struct td__session *session)
{
    if (session->standby)
        return false; /* only ACKs come from it */
    return session->in_flight + session->out.size > TD__SESSION_OUT_LIMIT ||
           (session->engine->replica && td__replica_is_clogged(session->engine));
}

/* A waiter that is parked nowhere: it is answered, passed over, or parked at a missing key. */
static void look_again(struct td__waiter *waiter)
{
    struct td__session *session = waiter->session;
    long missing = td__kv_first_missing(&session->engine->kv, waiter->keys, waiter->count,
                                        waiter->at);
    if (missing < 0 && td__session_is_full(session)) {
        waiter->parked = NULL;
        session->owes_answers = true;
    } else if (missing < 0) {
        answer_waiter(waiter);
        drop_waiter(waiter);
    } else if (!park(waiter, (size_t)missing)) {
        td__fail_nomem("store");
        answer_failure(session, waiter->id, TD_ERR_NOMEM);
        drop_waiter(waiter);
    }
}

void td__session_resume(struct td__session *session)
{
    if (!session->owes_answers)
        return;
    session->owes_answers = false;
    for (struct td__waiter *waiter = LIST_FIRST(&session->waiters), *next; waiter; waiter = next) {
        next = LIST_NEXT(waiter, own_link);
        if (!waiter->parked)
            look_again(waiter);
    }
}

/* A copy of the request's keys, on the session's list. */
static struct td__waiter *make_waiter(struct td__session *session,
                                      const struct td__wire_request *request)
{
    size_t bytes = 0;
    for (size_t i = 0; i < request->count; i++)
        bytes += request->keys[i].size;
    struct td__waiter *waiter = malloc(sizeof *waiter + request->count * sizeof *waiter->keys +
                                       bytes);
    if (!waiter)
        return NULL;
    *waiter = (struct td__waiter){
        .session = session, .id = request->id, .op = request->op, .count = request->count};
    char *at = (char *)(waiter->keys + request->count);
    for (size_t i = 0; i < request->count; i++) {
        waiter->keys[i] = (struct td__span){at, request->keys[i].size};
        memcpy(at, request->keys[i].data, request->keys[i].size);
        at += request->keys[i].size;
    }
    LIST_INSERT_HEAD(&session->waiters, waiter, own_link);
    session->waiter_count++;
    return waiter;
}

static bool wait_for(struct td__session *session, const struct td__wire_request *request)
{
    long missing = td__kv_first_missing(&session->engine->kv, request->keys, request->count, 0);
    if (missing < 0) {
        answer_values(session, request->id, request->keys,
                      request->op == TD__WIRE_GET ? request->count : 0);
        return true;
    }
    if (session->waiter_count >= MAX_WAITS)
        return false;
    struct td__waiter *waiter = make_waiter(session, request);
    if (!waiter)
        return false;
    if (!park(waiter, (size_t)missing)) {
        drop_waiter(waiter);
        return false;
    }
    return true;
}

/* `key` has a value now: looks again at all waiters that are parked there. */
static void wake(struct td__engine *engine, struct td__span key)
{
    struct td__map_node *node = engine->waiting.size
                                    ? td__map_find(&engine->waiting, key.data, key.size)
                                    : NULL;
    if (!node)
        return;
    /* The list is taken down as a whole: waiters that move on may come to other keys, never back
     * to this one, which exists. */
    struct wait_key *wait = TD__CONTAINER(node, struct wait_key, node);
    struct td__waiter *waiter = LIST_FIRST(&wait->waiters), *next;
    td__map_remove(&engine->waiting, node);
    for (; waiter; waiter = next) {
        next = LIST_NEXT(waiter, parked_link);
        look_again(waiter);
    }
    free(wait);
}

static void cancel(struct td__session *session, uint32_t id)
{
    struct td__waiter *waiter = LIST_FIRST(&session->waiters);
    while (waiter && waiter->id != id)
        waiter = LIST_NEXT(waiter, own_link);
    if (!waiter)
        return;
    /* One that was passed over may have its keys: only the way to it was full. */
    long missing = (long)waiter->at;
    if (waiter->parked)
        unpark(waiter);
    else
        missing = td__kv_first_missing(&session->engine->kv, waiter->keys, waiter->count, 0);
    if (missing < 0)
        answer_waiter(waiter);
    else
        answer_text(session, id, TD_ERR_TIMEOUT, waiter->keys[missing]);
    drop_waiter(waiter);
}

void td__session_fail_waits(struct td__session *session, td_status status, const char *text)
{
    for (struct td__waiter *waiter = LIST_FIRST(&session->waiters), *next; waiter; waiter = next) {
        next = LIST_NEXT(waiter, own_link);
        if (!waiter->parked) /* its keys are there */
            continue;
        unpark(waiter);
        answer_text(session, waiter->id, status, (struct td__span){text, strlen(text)});
        drop_waiter(waiter);
    }
}

/* ---- Requests -------------------------------------------------------------------------------- */

static td_status set_all(struct td__engine *engine, const struct td__wire_request *request)
{
    for (size_t i = 0; i < request->count; i++)
        TD_TRY(td__kv_set(&engine->kv, request->keys[i], request->values[i]));
    for (size_t i = 0; i < request->count; i++)
        wake(engine, request->keys[i]);
    return TD_OK;
}

td_status td__engine_set(struct td__engine *engine, struct td__span key, struct td__span value)
{
    TD_TRY(td__kv_set(&engine->kv, key, value));
    wake(engine, key);
    return TD_OK;
}

td_status td__engine_apply(struct td__engine *engine, struct td__wire_request *request,
                           struct td__span *result)
{
    struct td__kv *kv = &engine->kv;
    struct td__span key = *request->keys;
    request->had_effect = true;
    switch (request->op) {
    case TD__WIRE_SET:
        return set_all(engine, request);
    case TD__WIRE_DELETE:
        request->had_effect = td__kv_delete(kv, key);
        return TD_OK;
    case TD__WIRE_APPEND:
        TD_TRY(td__kv_append(kv, key, *request->values));
        break;
    case TD__WIRE_ADD:
        TD_TRY(td__kv_add(kv, key, request->number, &request->number));
        break;
    case TD__WIRE_COMPARE_SET:
        TD_TRY(td__kv_compare_set(kv, key, request->values[0], request->values[1], result,
                                  &request->had_effect));
        break;
    }
    if (request->had_effect)
        wake(engine, key);
    return TD_OK;
}

static td_status make_will(struct td__session *session, struct td__wire_request *request)
{
    struct td__known_client *known = session->known;
    td_bytes key, value;
    TD_TRY(td_bytes_copy(request->keys->data, request->keys->size, &key));
    td_status status = td_bytes_copy(request->values->data, request->values->size, &value);
    if (status) {
        td_bytes_free(&key);
        return status;
    }
    td_bytes *own_key = known ? &known->will_key : &session->will_key;
    td_bytes *own_value = known ? &known->will_value : &session->will_value;
    td_bytes_free(own_key);
    td_bytes_free(own_value);
    *own_key = key;
    *own_value = value;
    request->had_effect = true;
    return TD_OK;
}

static void answer_change(struct td__session *session, const struct td__wire_request *request,
                          struct td__span result)
{
    if (request->op == TD__WIRE_ADD)
        answer_i64(session, request->id, request->number);
    else if (request->op == TD__WIRE_COMPARE_SET)
        answer_text(session, request->id, TD_OK, result);
    else if (request->op == TD__WIRE_DELETE)
        answer_u8(session, request->id, request->had_effect);
}

/* Answers a change that was carried out before, and is sent again by a client that has lost its server. False when it
 * had no effect then: it may be carried out. */
static bool answer_again(struct td__session *session, uint64_t number,
                         struct td__wire_request *request)
{
    const struct td__known_client *known = session->known;
    int64_t value;
    if (number > known->done)
        return false;
    if (td__wire_is_silent(request->op)) {
        if (known->failed == number)
            answer_text(session, 0, known->failed_status,
                        (struct td__span){known->failed_text, strlen(known->failed_text)});
        return true;
    }
    if (!td__replica_recall(known, number, &value))
        return false;
    request->number = value;
    request->had_effect = true;
    answer_change(session, request,
                  request->op == TD__WIRE_COMPARE_SET ? request->values[1] : (struct td__span){0});
    return true;
}

static void change(struct td__session *session, struct td__wire_request *request,
                   const uint8_t *body, size_t size)
{
    struct td__engine *engine = session->engine;
    uint64_t number = ++session->changes;
    struct td__span result = {0};
    if (session->known && answer_again(session, number, request))
        return;
    td_status status = request->op == TD__WIRE_WILL ? make_will(session, request)
                                                    : td__engine_apply(engine, request, &result);
    if (status)
        answer_failure(session, td__wire_is_silent(request->op) ? 0 : request->id, status);
    else
        answer_change(session, request, result);
    if (engine->replica)
        td__replica_changed(session, number, request, status, body, size);
}

/* A request that changes nothing and does not wait. */
static void answer(struct td__session *session, const struct td__wire_request *request)
{
    struct td__engine *engine = session->engine;
    switch (request->op) {
    case TD__WIRE_CHECK:
        answer_u8(session, request->id,
                  td__kv_first_missing(&engine->kv, request->keys, request->count, 0) < 0);
        break;
    case TD__WIRE_NUM_KEYS:
        answer_i64(session, request->id, td__kv_count(&engine->kv, *request->keys));
        break;
    case TD__WIRE_CANCEL:
        cancel(session, (uint32_t)request->number);
        break;
    case TD__WIRE_SYNC:
        answer_values(session, request->id, NULL, 0);
        break;
    case TD__WIRE_BYE:
        session->leaving = true;
        break;
    }
}

bool td__engine_execute(struct td__session *session, const struct td__wire_header *header,
                        const uint8_t *body)
{
    struct td__engine *engine = session->engine;
    struct td__wire_request request;
    if (session->end)
        return true; /* nothing of it counts any more */
    if (header->code >= TD__WIRE_HELLO && header->code <= TD__WIRE_DEPOSED)
        return td__replica_execute(session, header, body) && !session->out.failed;
    if (td__wire_parse(header, body, &request))
        return false;
    bool fine = true;
    if (engine->replica && engine->replica->role != TD__REPLICA_PRIMARY)
        td__replica_refuse(session);
    else if (td__wire_is_change(request.op))
        change(session, &request, body, header->body_size);
    else if (request.op == TD__WIRE_GET || request.op == TD__WIRE_WAIT)
        fine = wait_for(session, &request);
    else
        answer(session, &request);
    td__wire_request_free(&request);
    return fine && !session->out.failed;
}

void td__session_end(struct td__session *session)
{
    while (!LIST_EMPTY(&session->waiters)) {
        struct td__waiter *waiter = LIST_FIRST(&session->waiters);
        if (waiter->parked)
            unpark(waiter);
        drop_waiter(waiter);
    }
    td__replica_session_end(session);
    td_bytes_free(&session->will_key);
    td_bytes_free(&session->will_value);
    td__buffer_free(&session->out);
}

void td__engine_free(struct td__engine *engine)
{
    td__replica_free(engine);
    td__kv_free(&engine->kv);
    td__map_free(&engine->waiting);
}
