/* Comparing calls by asking; see ledger.h.
 *
 * Each begins with the rank after it, so that whoever stands beside one that differs finds it at once; then
 * the others in turn, less and less often. Who finds a difference fails, and tells the others as
 * of any failure. */
#include "group/ledger.h"

#include "base/fail.h"
#include "group/inquiry.h"
#include "group/root.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TOLD = 8, /* calls in an answer */
    REASON_BYTES = 1024,
    ASK_MS = 250,
};

#define PATIENCE_NS ((int64_t)40000000) /* after the first look, which comes after 50 ms or more */
#define SLOWEST_NS ((int64_t)1000000000)

struct td__ledger *td__ledger_create(void)
{
    struct td__ledger *ledger = calloc(1, sizeof *ledger);
    if (ledger)
        pthread_mutex_init(&ledger->lock, NULL);
    return ledger;
}

void td__ledger_destroy(struct td__ledger *ledger)
{
    if (!ledger)
        return;
    pthread_mutex_destroy(&ledger->lock);
    free(ledger);
}

static struct td__header *entry_of(struct td__ledger *ledger, uint64_t sequence)
{
    return &ledger->calls[sequence % TD__LEDGER_CALLS];
}

static uint64_t mix(uint64_t past, uint64_t more)
{
    past = (past ^ more) * 0x9e3779b97f4a7c15u;
    return past ^ past >> 32;
}

void td__ledger_note(struct td__ledger *ledger, struct td__operation *operation)
{
    operation->past = ledger->past;
    struct td__header call = td__header_of(operation, operation->count, 0, 0);
    uint64_t what = call.kind | (uint64_t)call.dtype << 8 | (uint64_t)call.op << 16 |
                    (uint64_t)call.root << 32;
    ledger->past = (uint32_t)mix(mix(mix(ledger->past, what), call.count), call.detail);
    pthread_mutex_lock(&ledger->lock);
    *entry_of(ledger, operation->sequence) = call;
    ledger->last = operation->sequence;
    pthread_mutex_unlock(&ledger->lock);
}

/* ---- Answering ------------------------------------------------------------------------------- */

/* Somebody who is behind tells what it has: the last that it called. */
static void put_calls(struct td__ledger *ledger, uint64_t sequence, struct td__buffer *answer)
{
    uint8_t bytes[TD__HEADER_BYTES];
    pthread_mutex_lock(&ledger->lock);
    uint64_t end = sequence < ledger->last ? sequence : ledger->last;
    for (uint64_t s = end > TOLD ? end - TOLD + 1 : 1; s <= end; s++) {
        const struct td__header *call = entry_of(ledger, s);
        if (!call->type || call->sequence != (uint32_t)s)
            continue;
        td__header_write(call, bytes);
        td__buffer_put(answer, bytes, sizeof bytes);
    }
    pthread_mutex_unlock(&ledger->lock);
}

void td__ledger_answer(struct td__root *root, uint64_t key, uint64_t sequence,
                       struct td__buffer *answer)
{
    pthread_mutex_lock(&root->lock);
    td_group *group = td__root_find(root, key);
    struct td__ledger *ledger = group ? td__native_ledger(group) : NULL;
    if (ledger) {
        int broken = atomic_load(&group->broken);
        const char *reason = broken && group->reason ? group->reason : "";
        td__buffer_put_u32(answer, (uint32_t)broken);
        td__buffer_put_string(answer, reason, strnlen(reason, REASON_BYTES));
        put_calls(ledger, sequence, answer);
    }
    pthread_mutex_unlock(&root->lock);
}

/* ---- Asking ---------------------------------------------------------------------------------- */

static td_status fail_like(uint32_t status, struct td__span reason)
{
    char text[REASON_BYTES + 1];
    if (status != TD_ERR_MISMATCH && status != TD_ERR_PEER && status != TD_ERR_TIMEOUT &&
        status != TD_ERR_ABORTED)
        return TD_OK;
    for (size_t i = 0; i < reason.size; i++)
        text[i] = (unsigned char)reason.data[i] < ' ' ? ' ' : (char)reason.data[i];
    text[reason.size] = 0;
    return td__fail((td_status)status, "%s", text);
}

static td_status compare(struct td__ledger *ledger, td_group *group, int rank,
                         const struct td__operation *operation, const struct td__header *theirs)
{
    char me[256];
    pthread_mutex_lock(&ledger->lock);
    struct td__header mine = *entry_of(ledger, theirs->sequence);
    pthread_mutex_unlock(&ledger->lock);
    if (!mine.type || mine.sequence != theirs->sequence || td__header_same_call(&mine, theirs))
        return TD_OK;
    struct td__endpoint *endpoint = group->root->endpoint;
    struct td__operation called = *operation;
    called.kind = (enum td__collective)mine.kind;
    called.sequence = mine.sequence;
    snprintf(me, sizeof me, "%s", td__endpoint_describe(endpoint, group->root->rank));
    return td__header_mismatch(&called, &mine, me, theirs, td__endpoint_describe(endpoint, rank));
}

/* One that does not answer is none of this file's concern. */
td_status td__ledger_ask(struct td__ledger *ledger, td_group *group, int rank,
                         const struct td__operation *operation)
{
    struct td__buffer answer = {0};
    struct td__header theirs;
    td_status status = TD_OK;
    td__deadline end = td__deadline_earlier(operation->deadline, td__deadline_in_ms(ASK_MS));
    if (!td__endpoint_ask(group->root->endpoint, rank, TD__TOPIC_CALLS, group->key,
                          operation->sequence, end, &answer) &&
        answer.size) {
        struct td__reader reader = td__reader_of(answer.data, answer.size);
        uint32_t broken = td__reader_u32(&reader);
        struct td__span reason = td__reader_string(&reader, REASON_BYTES);
        while (!status && reader.end - reader.at >= TD__HEADER_BYTES) {
            if (td__header_read(reader.at, &theirs))
                status = compare(ledger, group, rank, operation, &theirs);
            reader.at += TD__HEADER_BYTES;
        }
        if (!status && broken && !reader.failed)
            status = fail_like(broken, reason);
    }
    td__buffer_free(&answer);
    return status;
}

td_status td__ledger_look(struct td__ledger *ledger, td_group *group,
                          const struct td__operation *operation)
{
    int64_t now = td__now_ns();
    if (ledger->sequence != operation->sequence) {
        ledger->sequence = operation->sequence;
        ledger->since = now;
        ledger->next = now + PATIENCE_NS;
        ledger->asked = 0;
    }
    if (now < ledger->next)
        return TD_OK;
    int64_t pause = (now - ledger->since) / 8;
    ledger->next = now + (pause < SLOWEST_NS ? pause : SLOWEST_NS);
    int rank = group->ranks[(group->rank + 1 + ledger->asked++ % (group->size - 1)) % group->size];
    if (td__endpoint_presence(group->root->endpoint, rank) != TD__PRESENT)
        return TD_OK;
    return td__ledger_ask(ledger, group, rank, operation);
}
