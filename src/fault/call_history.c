/* Comparing calls by queries; see call_history.h.
 *
 * Each rank queries the next one first, so that the neighbour of a rank that differs finds it at once; then the
 * others in turn, at growing intervals. A rank that finds a difference fails, and notifies the others as after
 * any failure. */
#include "fault/call_history.h"

#include "base/fail.h"
#include "fault/peer_query.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ANSWERED = 32, /* calls in an answer */
    KEPT = 32,     /* histories of destroyed groups */
    FEW = 64,      /* in a group up to this size, a rank queries all others before it leaves */
    REASON_BYTES = 1024,
    QUERY_MS = 250,
};

#define FIRST_NS ((int64_t)50000000) /* until the first query of a wait */
#define SLOWEST_NS ((int64_t)1000000000)
#define PAUSE_NS ((int64_t)2000000) /* between two queries of a rank that is behind */

struct td__call_history *td__call_history_create(void)
{
    struct td__call_history *history = calloc(1, sizeof *history);
    if (history)
        pthread_mutex_init(&history->lock, NULL);
    return history;
}

static void destroy(struct td__call_history *history)
{
    pthread_mutex_destroy(&history->lock);
    free(history->reason);
    free(history);
}

void td__call_history_retire(struct td__call_history *history, td_group *group)
{
    struct td__root *root = group->root;
    history->key = group->key;
    history->broken = (uint32_t)atomic_load(&group->broken);
    history->reason = history->broken && group->reason ? strdup(group->reason) : NULL;
    pthread_mutex_lock(&root->lock);
    struct td__call_history **end = &root->histories;
    history->older = root->histories;
    root->histories = history;
    for (int kept = 0; *end && kept < KEPT; kept++)
        end = &(*end)->older;
    struct td__call_history *oldest = *end;
    *end = NULL;
    pthread_mutex_unlock(&root->lock);
    if (oldest)
        destroy(oldest);
}

void td__call_history_forget(struct td__root *root)
{
    while (root->histories) {
        struct td__call_history *next = root->histories->older;
        destroy(root->histories);
        root->histories = next;
    }
}

static struct td__call_header *entry_of(struct td__call_history *history, uint64_t sequence)
{
    return &history->calls[sequence % TD__CALL_HISTORY_CALLS];
}

static uint64_t mix(uint64_t past, uint64_t more)
{
    past = (past ^ more) * 0x9e3779b97f4a7c15u;
    return past ^ past >> 32;
}

static void add(struct td__call_history *history, const struct td__call_header *call,
                uint64_t sequence)
{
    pthread_mutex_lock(&history->lock);
    *entry_of(history, sequence) = *call;
    history->last = sequence > history->last ? sequence : history->last;
    pthread_mutex_unlock(&history->lock);
}

void td__call_history_note(struct td__call_history *history, struct td__operation *operation)
{
    operation->past = history->past;
    struct td__call_header call = td__header_of(operation, operation->call.count, 0, 0);
    uint64_t what = call.kind | (uint64_t)call.dtype << 8 | (uint64_t)call.op << 16 |
                    (uint64_t)call.root << 32;
    history->past = (uint32_t)mix(mix(mix(history->past, what), call.count), call.detail);
    add(history, &call, operation->call.sequence);
}

void td__call_history_submit(struct td__call_history *history,
                             const struct td__operation *operation)
{
    struct td__call_header call = td__header_of(operation, operation->call.count, 0, 0);
    history->submits = true;
    add(history, &call, operation->call.sequence);
}

void td__call_history_end(struct td__call_history *history, const struct td__operation *operation,
                          bool synchronised)
{
    pthread_mutex_lock(&history->lock);
    if (operation->call.sequence > history->done)
        history->done = operation->call.sequence;
    if (synchronised)
        history->verified = operation->call.sequence;
    if (operation->call.input_counts)
        history->uneven = operation->call.sequence;
    pthread_mutex_unlock(&history->lock);
}

/* ---- Answering ------------------------------------------------------------------------------- */

/* A rank that is behind answers with the last calls that it has made. */
static void put_calls(struct td__call_history *history, uint64_t sequence, bool left,
                      struct td__buffer *answer)
{
    uint8_t bytes[TD__HEADER_BYTES];
    pthread_mutex_lock(&history->lock);
    td__buffer_put_u64(answer, history->last);
    td__buffer_put_u64(answer, history->done);
    td__buffer_put_u8(answer, left);
    uint64_t end = sequence < history->last ? sequence : history->last;
    for (uint64_t s = end > ANSWERED ? end - ANSWERED + 1 : 1; s <= end; s++) {
        const struct td__call_header *call = entry_of(history, s);
        if (!call->type || call->sequence != (uint32_t)s)
            continue;
        td__header_write(call, bytes);
        td__buffer_put(answer, bytes, sizeof bytes);
    }
    pthread_mutex_unlock(&history->lock);
}

static struct td__call_history *find_retired(struct td__root *root, uint64_t key)
{
    struct td__call_history *history = root->histories;
    while (history && history->key != key)
        history = history->older;
    return history;
}

void td__call_history_answer(struct td__root *root, int rank, uint64_t key, uint64_t sequence,
                             struct td__buffer *answer)
{
    (void)rank;
    pthread_mutex_lock(&root->lock);
    td_group *group = td__root_find(root, key);
    struct td__call_history *history = group ? group->history : find_retired(root, key);
    if (history) {
        uint32_t broken = group ? (uint32_t)atomic_load(&group->broken) : history->broken;
        /* group->reason does not change once `broken` is set. */
        const char *reason = !broken ? NULL : group ? group->reason : history->reason;
        reason = reason ? reason : "";
        td__buffer_put_u32(answer, broken);
        td__buffer_put_string(answer, reason, strnlen(reason, REASON_BYTES));
        put_calls(history, sequence, !group, answer);
    }
    pthread_mutex_unlock(&root->lock);
}

/* ---- Querying -------------------------------------------------------------------------------- */

static td_status fail_like(uint32_t status, const char *reason)
{
    bool spreads = status == TD_ERR_MISMATCH || status == TD_ERR_PEER || status == TD_ERR_TIMEOUT ||
                   status == TD_ERR_ABORTED;
    return spreads ? td_fail((td_status)status, "%s", reason) : TD_OK;
}

static td_status compare(struct td__call_history *history, td_group *group, int rank,
                         const struct td__operation *operation,
                         const struct td__call_header *theirs)
{
    char me[256];
    pthread_mutex_lock(&history->lock);
    struct td__call_header mine = *entry_of(history, theirs->sequence);
    pthread_mutex_unlock(&history->lock);
    if (!mine.type || mine.sequence != theirs->sequence || td__header_same_call(&mine, theirs))
        return TD_OK;
    struct td__endpoint *endpoint = group->root->endpoint;
    struct td__operation called = *operation;
    called.call.kind = (td_op_kind)mine.kind;
    called.call.sequence = mine.sequence;
    snprintf(me, sizeof me, "%s", td__endpoint_describe(endpoint, group->root->rank));
    return td__header_mismatch(&called, &mine, me, theirs, td__endpoint_describe(endpoint, rank));
}

/* The answer of a rank. */
struct answer_state {
    bool answered;       /* it has the group, or its history */
    bool unreachable;    /* its endpoint does not answer any more */
    bool left;           /* it has destroyed the group */
    uint64_t last, done; /* its last call, and the last that succeeded */
};

/* No answer is not a failure here; the failure detector handles it. */
static td_status query(struct td__call_history *history, td_group *group, int rank,
                       const struct td__operation *operation, struct answer_state *state)
{
    struct td__buffer answer = {0};
    struct td__call_header theirs;
    td__deadline end = td__deadline_earlier(operation->deadline, td__deadline_in_ms(QUERY_MS));
    td_status status = td__endpoint_query(group->root->endpoint, rank, TD__TOPIC_CALLS, group->key,
                                          operation->call.sequence, end, &answer);
    *state = (struct answer_state){.unreachable = status == TD_ERR_PEER,
                                   .answered = !status && answer.size};
    status = TD_OK;
    if (state->answered) {
        struct td__reader reader = td__reader_of(answer.data, answer.size);
        uint32_t broken = td__reader_u32(&reader);
        char reason[REASON_BYTES + 1];
        td__read_text(&reader, reason, sizeof reason);
        state->last = td__reader_u64(&reader);
        state->done = td__reader_u64(&reader);
        state->left = td__reader_u8(&reader);
        while (!status && reader.end - reader.at >= TD__HEADER_BYTES) {
            if (td__header_read(reader.at, &theirs))
                status = compare(history, group, rank, operation, &theirs);
            reader.at += TD__HEADER_BYTES;
        }
        if (!status && broken && !reader.failed)
            status = fail_like(broken, reason);
    }
    td__buffer_free(&answer);
    return status;
}

td_status td__call_history_query(struct td__call_history *history, td_group *group, int rank,
                                 const struct td__operation *operation)
{
    struct answer_state state;
    return query(history, group, rank, operation, &state);
}

td_status td__call_history_compare(struct td__call_history *history, td_group *group, int rank,
                                   const struct td__operation *operation)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    struct answer_state state = {0};
    if (td__endpoint_presence(endpoint, rank) == TD__PRESENT)
        TD_TRY(query(history, group, rank, operation, &state));
    if (state.answered ? !state.left || state.last >= operation->call.sequence
                       : td__endpoint_presence(endpoint, rank) == TD__PRESENT)
        return TD_OK;
    struct td__operation called = *operation;
    pthread_mutex_lock(&history->lock);
    called.call.kind = (td_op_kind)entry_of(history, operation->call.sequence)->kind;
    pthread_mutex_unlock(&history->lock);
    return td_fail(TD_ERR_PEER, "%s: %s has left", td__operation_describe(&called),
                   td__endpoint_describe(endpoint, rank));
}

/* ---- Before leaving -------------------------------------------------------------------------- */

/* Whether a further query of the rank is pointless. */
static bool is_settled(const struct td__call_history *history, const struct answer_state *state)
{
    if (state->unreachable || state->left)
        return true;
    return state->answered && state->last >= history->last &&
           (history->uneven <= history->verified || state->done >= history->uneven);
}

/* In a large group each rank queries those at distances 1, 2, 4, …: one that finds a difference notifies the
 * others. */
static int next_distance(const td_group *group, int distance)
{
    return group->size <= FEW ? distance + 1 : 2 * distance;
}

td_status td__call_history_verify(struct td__call_history *history, td_group *group,
                                  const struct td__operation *operation)
{
    struct td__endpoint *endpoint = group->root->endpoint;
    struct answer_state state;
    if (history->verified >= history->last && !history->submits)
        return TD_OK;
    for (int distance = 1; distance < group->size; distance = next_distance(group, distance))
        for (;;) {
            int rank = group->ranks[(group->rank + distance) % group->size];
            if (td__endpoint_presence(endpoint, rank) != TD__PRESENT)
                break;
            TD_TRY(query(history, group, rank, operation, &state));
            if (is_settled(history, &state) || td__deadline_passed(operation->deadline))
                break;
            td__sleep_ns(PAUSE_NS);
        }
    return TD_OK;
}

td_status td__call_history_check(struct td__call_history *history, td_group *group,
                                 const struct td__operation *operation, td__deadline *next)
{
    int64_t now = td__now_ns();
    if (history->sequence != operation->call.sequence) {
        history->sequence = operation->call.sequence;
        history->since = now;
        history->next = now + FIRST_NS;
        history->queries = 0;
    }
    bool due = now >= history->next;
    if (due) {
        int64_t pause = now - history->since;
        history->next = now + (pause < SLOWEST_NS ? pause : SLOWEST_NS);
    }
    *next = td__deadline_earlier(*next, history->next);
    if (!due)
        return TD_OK;
    int rank =
        group->ranks[(group->rank + 1 + history->queries++ % (group->size - 1)) % group->size];
    if (td__endpoint_presence(group->root->endpoint, rank) != TD__PRESENT)
        return TD_OK;
    return td__call_history_query(history, group, rank, operation);
}
