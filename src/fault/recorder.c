/* The recorder: calls become entries of the flight recorder's log; see recorder.h.
 *
 * The progress that other ranks query is in the group (struct td__trace), not in the log, since an entry is
 * overwritten after 256 others. */
#include "fault/recorder.h"

#include "base/fail.h"
#include "fault/group_state.h"
#include "os/flight_read.h"
#include "peer/wait_event.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

_Static_assert((int)TD__FLIGHT_BROADCAST == TD_OP_BROADCAST &&
                   (int)TD__FLIGHT_ALL_REDUCE == TD_OP_ALL_REDUCE &&
                   (int)TD__FLIGHT_ALL_TO_ALL == TD_OP_ALL_TO_ALL &&
                   (int)TD__FLIGHT_BARRIER == TD_OP_BARRIER && (int)TD__FLIGHT_RECV == TD_OP_RECV &&
                   TD_OP_KINDS == TD_OP_RECV + 1,
               "the kinds in pages are those of td_op_kind");

enum { QUICK_COUNT = 512 }; /* elements; so many are reduced or copied within a microsecond */

void td_set_call_label(const char *label)
{
    td__flight_set_label(label);
}

/* ---- Life ------------------------------------------------------------------------------------ */

void td__recorder_left(struct td__root *root, td_status status)
{
    if (root->flight && status)
        td__flight_fail(root->flight, 0, status, td__error_text());
    else if (root->flight)
        td__flight_set_phase(root->flight, TD__FLIGHT_LEFT);
}

void td__recorder_add_group(td_group *group)
{
    struct td__trace *trace = &group->trace;
    struct td__flight_log *log = group->root->flight;
    if (!log)
        return;
    trace->root = group->root;
    trace->key = group->key;
    trace->name_index = td__flight_name_group(log, group->key, group->name);
    trace->log = log;
    pthread_mutex_lock(&log->lock);
    trace->next = log->traces;
    log->traces = trace;
    pthread_mutex_unlock(&log->lock);
}

void td__recorder_remove_group(td_group *group)
{
    struct td__flight_log *log = group->trace.log;
    if (!log)
        return;
    pthread_mutex_lock(&log->lock);
    struct td__trace *first = log->traces;
    for (struct td__trace **link = &first; *link; link = &(*link)->next)
        if (*link == &group->trace) {
            *link = group->trace.next;
            break;
        }
    log->traces = first;
    pthread_mutex_unlock(&log->lock);
    td__flight_forget_group(log, group->trace.name_index);
    group->trace.log = NULL;
}

/* ---- Recording ------------------------------------------------------------------------------- */

static uint64_t elements(const td_group *group, const td_call *call)
{
    if (!call->input_counts)
        return call->count;
    uint64_t sum = 0;
    for (int i = 0; i < group->size; i++)
        sum += call->input_counts[i];
    return sum;
}

static inline uint64_t begin(td_group *group, const td_call *call, enum td__flight_state state,
                             unsigned flags)
{
    const struct td__trace *trace = &group->trace;
    bool message = call->kind >= TD_OP_SEND;
    int rank = message ? call->peer : call->root;
    rank = rank >= 0 ? group->ranks[rank] : -1;
    if (state == TD__FLIGHT_RUNNING)
        flags |= TD__FLIGHT_AT_ONCE;
    if (call->input_counts)
        flags |= TD__FLIGHT_UNEVEN;
    return td__flight_begin(trace->log, call->sequence, elements(group, call),
                            td__flight_what((enum td__flight_kind)call->kind, call->dtype,
                                            trace->name_index, flags, rank),
                            message ? call->tag : (int)call->op, state);
}

uint64_t td__record_queued(td_group *group, const td_call *call)
{
    return group->trace.log ? begin(group, call, TD__FLIGHT_QUEUED, TD__FLIGHT_POSTED) : 0;
}

uint64_t td__record_start(td_group *group, const td_call *call, uint64_t entry)
{
    struct td__trace *trace = &group->trace;
    if (!trace->log)
        return 0;
    if (entry)
        td__flight_run(trace->log, entry);
    else
        entry = begin(group, call, TD__FLIGHT_RUNNING, 0);
    trace->waits_here = trace->quick && call->count <= QUICK_COUNT && !call->device ? &td__waits
                                                                                    : NULL;
    trace->waits = trace->waits_here ? *trace->waits_here : 0;
    atomic_store_explicit(&trace->last, entry, memory_order_relaxed);
    atomic_store_explicit(&trace->started, call->sequence, memory_order_relaxed);
    return entry;
}

/* Records only the first failure of a group: further calls fail because of it. */
static void keep_failure(td_group *group, uint64_t entry, td_status status)
{
    struct td__trace *trace = &group->trace;
    if (trace->broken)
        return;
    trace->broken = status != TD_ERR_INVALID && status != TD_ERR_UNSUPPORTED;
    td__flight_fail(trace->log, entry, status, td__error_text());
}

void td__record_end(td_group *group, uint64_t entry, td_status status)
{
    struct td__trace *trace = &group->trace;
    if (!entry)
        return;
    if (status) {
        keep_failure(group, entry, status);
        td__flight_end(trace->log, entry, false);
        return;
    }
    atomic_store_explicit(&trace->done, atomic_load_explicit(&trace->started, memory_order_relaxed),
                          memory_order_relaxed);
    if (trace->waits_here && trace->waits == *trace->waits_here)
        td__flight_end_quick(trace->log, entry);
    else
        td__flight_end(trace->log, entry, true);
}

static void raise_to(_Atomic uint64_t *value, uint64_t to)
{
    uint64_t now = atomic_load_explicit(value, memory_order_relaxed);
    while (now < to && !atomic_compare_exchange_weak(value, &now, to))
        ;
}

uint64_t td__record_submit(td_group *group, const td_call *call)
{
    struct td__trace *trace = &group->trace;
    if (!trace->log)
        return 0;
    uint64_t entry = begin(group, call, TD__FLIGHT_RUNNING, TD__FLIGHT_POSTED);
    raise_to(&trace->last, entry);
    raise_to(&trace->started, call->sequence);
    return entry;
}

void td__record_submit_end(td_group *group, uint64_t entry, uint64_t sequence, td_status status)
{
    struct td__trace *trace = &group->trace;
    if (!entry)
        return;
    if (status)
        keep_failure(group, entry, status);
    else
        raise_to(&trace->done, sequence);
    td__flight_end(trace->log, entry, status == TD_OK);
}

uint64_t td__record_message(td_group *group, const td_call *call, bool posted)
{
    bool own = call->tag == TD__TAG_ARRIVAL || call->tag == TD__TAG_VERDICT;
    return group->trace.log && !own
               ? begin(group, call, TD__FLIGHT_RUNNING, posted ? TD__FLIGHT_POSTED : 0)
               : 0;
}

void td__record_message_end(td_group *group, uint64_t entry, td_status status)
{
    if (!entry)
        return;
    if (status)
        td__flight_fail(group->trace.log, entry, status, td__error_text());
    td__flight_end(group->trace.log, entry, status == TD_OK);
}

void td__record_waited(td_group *group, uint64_t entry)
{
    if (entry)
        td__flight_wait(group->trace.log, entry);
}

uint64_t td__record_monitored_barrier(td_group *group, uint64_t number)
{
    const struct td__trace *trace = &group->trace;
    if (!trace->log)
        return 0;
    uint64_t what = td__flight_what(TD__FLIGHT_MONITORED_BARRIER, TD_U8, trace->name_index,
                                    TD__FLIGHT_AT_ONCE, -1);
    return td__flight_begin(trace->log, number, 0, what, 0, TD__FLIGHT_RUNNING);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static bool is_running(const struct td__flight_call *call)
{
    return call->state == TD__FLIGHT_QUEUED || call->state == TD__FLIGHT_RUNNING;
}

/* Whether a thread of the program waits in the call. */
static bool blocks_thread(const struct td__flight_call *call)
{
    return is_running(call) && (!call->posted || call->waited);
}

static const struct td__flight_call *find_call(const struct td__flight_page *page, uint64_t number)
{
    for (int i = 0; i < page->count; i++)
        if (page->calls[i].number == number)
            return &page->calls[i];
    return NULL;
}

static struct td__trace *find_trace(const struct td__root *root, uint64_t key)
{
    struct td__trace *trace = root->flight->traces;
    while (trace && (trace->key != key || trace->root != root))
        trace = trace->next;
    return trace;
}

static int64_t age_ms(const struct td__flight_now *now, int64_t since_ns)
{
    int64_t age = (td__flight_wall_ns(now) - since_ns) / 1000000;
    return since_ns && age > 0 ? age : 0;
}

static void describe_now(const struct td__flight_page *page, char text[160])
{
    char call[TD__FLIGHT_TEXT];
    for (int i = 0; i < page->count; i++)
        if (blocks_thread(&page->calls[i])) {
            td__flight_describe(&page->calls[i], call);
            snprintf(text, 160, "%.90s on group \"%.55s\"", call,
                     page->groups[page->calls[i].group]);
            return;
        }
}

/* A copy of the log; NULL if there is no memory for it. */
static struct td__flight_page *read_log(const struct td__flight_log *log,
                                        struct td__flight_now *now)
{
    struct td__flight_page *page = malloc(sizeof *page);
    td__flight_now(now);
    if (page)
        td__flight_log_read(log, now, page);
    return page;
}

void td__recorder_last(struct td__root *root, uint64_t group_key, struct td__flight_last *last)
{
    struct td__flight_log *log = root->flight;
    struct td__flight_now now;
    uint64_t number = 0;
    *last = (struct td__flight_last){0};
    if (!log)
        return;
    pthread_mutex_lock(&log->lock);
    struct td__trace *trace = find_trace(root, group_key);
    if (trace) {
        last->started = atomic_load(&trace->started);
        last->done = atomic_load(&trace->done);
        number = atomic_load(&trace->last);
    }
    pthread_mutex_unlock(&log->lock);
    struct td__flight_page *page = read_log(log, &now);
    const struct td__flight_call *call = page && number ? find_call(page, number) : NULL;
    if (call) {
        td__flight_describe(call, last->text);
        last->running = is_running(call);
        last->age_ms = age_ms(&now, call->ended_ns ? call->ended_ns : call->started_ns);
        last->blocking = call->kind <= TD__FLIGHT_BARRIER && blocks_thread(call) ? call->sequence
                                                                                 : 0;
        last->kind = (td_op_kind)call->kind;
    } else if (last->started) {
        snprintf(last->text, sizeof last->text, "collective #%" PRIu64, last->started);
    }
    if (page)
        describe_now(page, last->now);
    free(page);
}

/* The key of a call's group; 0 if it is not of this root, since several roots share a log. The last name index
 * stands for several groups, and does not identify one. */
static uint64_t key_of(const struct td__root *root, const struct td__flight_call *call)
{
    struct td__flight_log *log = root->flight;
    uint64_t key = 0;
    pthread_mutex_lock(&log->lock);
    for (struct td__trace *trace = log->traces; trace; trace = trace->next)
        if (trace->root == root && trace->name_index == call->group &&
            (call->group < TD__FLIGHT_GROUPS - 1 || atomic_load(&trace->last) == call->number))
            key = trace->key;
    pthread_mutex_unlock(&log->lock);
    return key;
}

bool td__recorder_oldest_running(struct td__root *root, uint64_t *group_key, uint64_t *sequence,
                                 int64_t *age, char text[160])
{
    const struct td__flight_call *oldest = NULL;
    struct td__flight_now now;
    struct td__flight_page *page = root->flight ? read_log(root->flight, &now) : NULL;
    for (int i = 0; page && i < page->count; i++) {
        const struct td__flight_call *call = &page->calls[i];
        bool counts = call->kind == TD__FLIGHT_SEND || call->kind == TD__FLIGHT_RECV
                          ? blocks_thread(call)
                          : call->state == TD__FLIGHT_RUNNING;
        if (counts && (!oldest || call->started_ns < oldest->started_ns) &&
            (call->group == TD__FLIGHT_GROUPS - 1 || key_of(root, call)))
            oldest = call;
    }
    if (oldest) {
        *group_key = key_of(root, oldest);
        /* The number of a monitored barrier is no sequence number of a collective. */
        *sequence = oldest->kind == TD__FLIGHT_MONITORED_BARRIER ? 0 : oldest->sequence;
        *age = age_ms(&now, oldest->started_ns);
        td__flight_describe(oldest, text);
    }
    bool found = oldest != NULL;
    free(page);
    return found;
}
