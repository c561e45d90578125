/* Ranks on one host: announcing calls, waiting for them, and failing together; see shm_comm.h. */
#include "shm/shm_comm.h"

#include "base/arena.h"
#include "base/fail.h"
#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    /* How many calls a rank with a processor of its own makes before it publishes that processor again. */
    PROCESSOR_INTERVAL = 64,
    WRITERS_MS = 2000,
    POLL_NS = 50000,
    REASON_MS = 1000, /* how long the first rank that failed may take to write head->reason */
};

/* ---- Failing together ------------------------------------------------------------------------ */

/* The first failure counts for all members: it is written to the head, and all members are woken. */
static td_status break_comm(struct td__shm_comm *comm, td_status status)
{
    uint32_t whole = 0;
    if (atomic_compare_exchange_strong(&comm->head->broken, &whole, 1)) {
        snprintf(comm->head->reason, sizeof comm->head->reason, "%s", td__error_text());
        comm->head->status = status;
        comm->head->breaker = (uint32_t)comm->index;
        atomic_store(&comm->head->broken, 2);
        for (int i = 0; i < comm->size; i++)
            td__wait_event_signal(&comm->cells[i].event);
    }
    return status;
}

td_status td__shm_fail(struct td__shm_comm *comm, td_status status, const char *format, ...)
{
    char text[TD__REASON_TEXT];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return break_comm(comm, td_fail(status, "%s", text));
}

void td__shm_break(struct td__shm_comm *comm, td_status status)
{
    if (atomic_load(&comm->attached))
        break_comm(comm, status);
}

bool td__shm_failed_first(struct td__shm_comm *comm)
{
    return atomic_load(&comm->attached) && td__shm_is_broken(comm) &&
           comm->head->breaker == (uint32_t)comm->index;
}

static td_status broken(struct td__shm_comm *comm)
{
    char reason[sizeof comm->head->reason];
    td__deadline end = td__deadline_in_ms(REASON_MS);
    while (atomic_load(&comm->head->broken) != 2)
        if (td__deadline_passed(end))
            return td_fail(TD_ERR_PEER,
                           "a rank of this host failed, and ended before it wrote the reason");
        else
            td__sleep_ns(POLL_NS);
    memcpy(reason, comm->head->reason, sizeof reason);
    reason[sizeof reason - 1] = 0;
    uint32_t status = comm->head->status, breaker = comm->head->breaker;
    /* A failure of another rank's system or device, or that it was excluded, which its text alone would make look like
     * one of this rank. */
    if ((status == TD_ERR_SYSTEM || status == TD_ERR_STATE) && breaker != (uint32_t)comm->index &&
        breaker < (uint32_t)comm->size)
        return td_fail(TD_ERR_PEER, "%s has failed: %s",
                       td__endpoint_describe(comm->endpoint, comm->world_ranks[breaker]), reason);
    return td_fail(status > TD_OK && status <= TD_ERR_ABORTED ? (td_status)status : TD_ERR_PEER,
                   "%s", reason);
}

/* `writing` and `broken` are sequentially consistent: either the writer reads that the comm has failed, or the
 * rank that failed reads `writing`. Any value of `broken` but 0 counts, since a rank that fails second does not
 * wait for the first one to write its reason. */
td_status td__shm_write_begin(struct td__shm_comm *comm)
{
    atomic_store(&comm->cells[comm->index].writing, 1);
    if (!atomic_load(&comm->head->broken)) {
        td__view_access_begin();
        return TD_OK;
    }
    td__shm_write_end(comm);
    return broken(comm);
}

void td__shm_write_end(struct td__shm_comm *comm)
{
    td__view_access_end();
    atomic_store_explicit(&comm->cells[comm->index].writing, 0, memory_order_release);
}

void td__shm_await_writers(struct td__shm_comm *comm)
{
    if (!atomic_load(&comm->attached))
        return;
    td__deadline end = td__deadline_in_ms(WRITERS_MS);
    for (int i = 0; i < comm->size; i++)
        while (i != comm->index && atomic_load(&comm->cells[i].writing) &&
               td__endpoint_presence(comm->endpoint, comm->world_ranks[i]) == TD__PRESENT &&
               !td__deadline_passed(end))
            td__sleep_ns(POLL_NS);
}

td_status td__shm_state(struct td__shm_comm *comm)
{
    return atomic_load(&comm->attached) && td__shm_is_broken(comm) ? broken(comm) : TD_OK;
}

/* Lists the members that have not reached `progress` in `text`. Returns their number. */
static int list_missing(const struct td__shm_comm *comm, uint64_t progress, char *text, size_t room)
{
    int count = 0;
    text[0] = 0;
    for (int i = 0; i < comm->size; i++)
        if (atomic_load(&td__shm_announcement_of(comm, i, progress >> TD__PHASE_BITS)->progress) <
            progress)
            td__text_add(text, room, "%s%d", count++ ? ", " : "", comm->world_ranks[i]);
    return count;
}

/* A member has not reached `progress`; 0: all members have called, but not all pieces are done. The text names
 * the members that have not called, if there are any: the others may be waiting for them. */
static td_status fail_timeout(struct td__shm_comm *comm, const struct td__operation *operation,
                              uint64_t progress)
{
    char missing[256];
    uint64_t first = td__shm_progress(progress >> TD__PHASE_BITS, 1);
    bool called = progress > first && !list_missing(comm, first, missing, sizeof missing);
    int count = list_missing(comm, called || !progress ? progress : first, missing, sizeof missing);
    if (!count)
        td_fail(TD_ERR_TIMEOUT, "%s: not done in time; all ranks have called it",
                td__operation_describe(operation));
    else
        td_fail(TD_ERR_TIMEOUT, "%s: not done in time; rank%s %s %s not %s",
                td__operation_describe(operation), count > 1 ? "s" : "", missing,
                count > 1 ? "have" : "has", called ? "finished its part" : "called it");
    /* Before break_comm(): the last error, with this addition, goes to all members. */
    if (comm->explain)
        comm->explain(comm->callback_arg, operation);
    return break_comm(comm, TD_ERR_TIMEOUT);
}

/* A member that has ended without leaving, or -1. */
static int find_ended(const struct td__shm_comm *comm)
{
    for (int i = 0; i < comm->size; i++) {
        enum td__presence presence = td__endpoint_presence(comm->endpoint, comm->world_ranks[i]);
        if (presence == TD__ENDED || presence == TD__CUT_OFF)
            return i;
    }
    return -1;
}

/* The member `index` has left in the middle of a call, or has ended. */
static td_status fail_lost(struct td__shm_comm *comm, const struct td__operation *operation,
                           int index)
{
    TD_TRY(td__shm_state(comm));
    td_status cause = comm->find_cause ? comm->find_cause(comm->callback_arg, operation) : TD_OK;
    if (cause)
        return break_comm(comm, cause);
    const char *exit_reason = td__endpoint_exit_reason(comm->endpoint, comm->world_ranks[index]);
    return td__shm_fail(comm, TD_ERR_PEER, "%s: %s %s", td__operation_describe(operation),
                        td__endpoint_describe(comm->endpoint, comm->world_ranks[index]),
                        exit_reason && !atomic_load(&comm->cells[index].leaving)
                            ? exit_reason
                            : "has left the group");
}

/* ---- Announcing and waiting ------------------------------------------------------------------
 *
 * If every rank has a processor, the cost of a call is the number of cache line transfers between processors.
 * An announcement needs one. But if another processor has a copy of the line, from the previous use or because
 * it polls the line, the writer must invalidate that copy first. So a rank claims the line of its next
 * announcement before it waits; and it pauses before it first polls the others' announcements, which are mostly
 * written at the same time, and between two polls, since polling delays its own stores. On processors that are
 * far apart (0.33 µs for a round trip) an exchange takes 0.2 µs instead of 0.5. */

int td__shm_find_lost(struct td__shm_comm *comm, int index)
{
    for (int i = 0; i < comm->size; i++)
        if ((index < 0 || i == index) &&
            (atomic_load(&comm->cells[i].leaving) ||
             td__endpoint_presence(comm->endpoint, comm->world_ranks[i]) != TD__PRESENT))
            return i;
    return -1;
}

/* td__shm_find_lost() for a waiting thread. If `index` is not lost, returns any member that has ended without
 * leaving: `index` may be waiting for that one. */
static int find_loss(struct td__shm_comm *comm, int index)
{
    unsigned losses = td__endpoint_losses(comm->endpoint);
    int lost = td__shm_find_lost(comm, index);
    if (lost >= 0 || losses == comm->losses)
        return lost;
    lost = find_ended(comm);
    if (lost < 0)
        comm->losses = losses;
    return lost;
}

/* AWAITS_ALL: this rank, or the rank that it waits for, waits for all members. YIELD_FIRST: members on this
 * processor that wait for the same rank get the processor before this one spins. */
enum { AWAITS_ALL = 1, YIELD_FIRST = 2 };

/* In an oversubscribed comm: whether a member that this rank waits for may need this processor. */
static bool may_need_processor(const struct td__shm_comm *comm, int index, unsigned how)
{
    int here = td__wait_event_processor(&comm->cells[comm->index].event);
    if (index < 0 || td__wait_event_processor(&comm->cells[index].event) == here)
        return true;
    for (int i = 0; how & AWAITS_ALL && i < comm->size; i++)
        if (i != comm->index && td__wait_event_processor(&comm->cells[i].event) == here &&
            atomic_load_explicit(&td__shm_announcement(comm, i)->progress, memory_order_relaxed) <
                td__shm_progress(comm->call, 1))
            return true;
    return false;
}

/* Whether *word, the progress of `index`, is `value` or more; with index -1, whether it is `value`. */
static bool is_reached(const _Atomic uint64_t *word, uint64_t value, int index)
{
    uint64_t now = atomic_load_explicit(word, memory_order_acquire);
    return index < 0 ? now == value : now >= value;
}

/* One step of waiting for `index`; -1: for any member. */
static td_status wait_step(struct td__shm_comm *comm, const struct td__operation *operation,
                           struct td__waiting *waiting, uint64_t value, int index, unsigned how)
{
    if (td__shm_is_broken(comm))
        return broken(comm);
    waiting->elsewhere = comm->oversubscribed && !waiting->spins &&
                         !may_need_processor(comm, index, how);
    if (!td__waiting_step(waiting))
        return fail_timeout(comm, operation, index < 0 ? 0 : value);
    if (td__waiting_yields(waiting))
        td__shm_spread(comm, waiting->now);
    if (!waiting->announced || !comm->check)
        return TD_OK;
    waiting->wake_at = TD__NEVER;
    td_status status = comm->check(comm->callback_arg, operation, waiting->sleeps,
                                   &waiting->wake_at);
    return status ? break_comm(comm, status) : TD_OK;
}

/* Waits until is_reached(word, value, index). */
static td_status await_word(struct td__shm_comm *comm, const struct td__operation *operation,
                            const _Atomic uint64_t *word, uint64_t value, int index, unsigned how)
{
    /* If every rank has a processor, most waits end within nanoseconds. */
    unsigned polls = td__first_polls(comm->oversubscribed);
    do
        if (is_reached(word, value, index))
            return TD_OK;
    while (td__poll_again(&polls));
    if (!comm->deadline)
        comm->deadline = td__operation_deadline(operation);
    struct td__waiting waiting;
    td_status status = TD_OK;
    td__waiting_begin(&waiting, &comm->cells[comm->index].event, comm->oversubscribed,
                      comm->deadline);
    waiting.sleepers = &comm->head->sleepers;
    /* The rank to wait for has yielded: members on this processor that have waited longer get it first. */
    waiting.spun = how & YIELD_FIRST && td__wait_event_is_idle(&comm->cells[index].event);
    while (!status && !is_reached(word, value, index)) {
        status = wait_step(comm, operation, &waiting, value, index, how);
        int lost = !status && waiting.announced ? find_loss(comm, index) : -1;
        if (lost >= 0 && !is_reached(word, value, index))
            status = fail_lost(comm, operation, lost);
    }
    td__waiting_end(&waiting);
    return status;
}

/* Waits until `index` has reached `phase` of `call`; up to phase 1 it compares the calls, too. */
static td_status await_member(struct td__shm_comm *comm, const struct td__operation *operation,
                              int index, uint64_t call, unsigned phase, unsigned how)
{
    TD_TRY(await_word(comm, operation, &td__shm_announcement_of(comm, index, call)->progress,
                      td__shm_progress(call, phase), index, how));
    return phase <= 1 ? td__shm_compare(comm, operation, index, call) : TD_OK;
}

/* Begins a call that may be `depth` calls ahead of the slowest member. At that limit it waits until the slowest
 * member is depth / 2 behind, so that not every call waits. */
td_status td__shm_begin(struct td__shm_comm *comm, const struct td__operation *operation,
                        uint64_t depth)
{
    uint64_t call = ++comm->call;
    comm->deadline = operation->deadline;
    if (comm->oversubscribed || call % PROCESSOR_INTERVAL == 0)
        td__wait_event_set_processor(&comm->cells[comm->index].event);
    if (call >= comm->agreed + depth) {
        uint64_t agreed = call - depth / 2;
        for (int i = 0; i < comm->size; i++)
            if (i != comm->index)
                TD_TRY(await_member(comm, operation, i, agreed, 0, AWAITS_ALL));
        comm->agreed = agreed;
    }
    td__shm_record_call(comm, operation);
    if (depth == TD__SHM_DEPTH && operation->reduction.op == TD_PREMUL_SUM)
        td__shm_slot(comm, comm->index)->args.factor = operation->reduction.factor;
    return TD_OK;
}

/* Wakes the members that sleep. The caller has made the change before that they may be waiting for. */
static void wake_sleepers(struct td__shm_comm *comm)
{
    td__wait_event_fence();
    if (!atomic_load_explicit(&comm->head->sleepers, memory_order_relaxed))
        return;
    for (int i = 0; i < comm->size; i++)
        if (i != comm->index &&
            atomic_load_explicit(&comm->cells[i].event.sleeping, memory_order_relaxed))
            td__wait_event_wake(&comm->cells[i].event);
}

void td__shm_reach(struct td__shm_comm *comm, unsigned phase)
{
    atomic_store_explicit(&td__shm_announcement(comm, comm->index)->progress,
                          td__shm_progress(comm->call, phase), memory_order_release);
    /* Claims the line of the next announcement by a store. No member reads the old fingerprint any more, and
     * the new one only after the progress beside it. */
    td__shm_announcement_of(comm, comm->index, comm->call + 1)->fingerprint = 0;
    wake_sleepers(comm);
}

/* Adds to a counter that starts from 0 in each call: its upper half is the call. */
static uint64_t count_up(_Atomic uint64_t *word, uint64_t call, uint32_t more)
{
    uint64_t before = atomic_load_explicit(word, memory_order_relaxed), after;
    do
        after = (before >> 32 == (uint32_t)call ? before : call << 32) + more;
    while (!atomic_compare_exchange_weak_explicit(word, &before, after, memory_order_acq_rel,
                                                  memory_order_relaxed));
    return after;
}

int td__shm_claim(struct td__shm_comm *comm, int owner)
{
    return (int)((uint32_t)count_up(&comm->cells[owner].claims, comm->call, 1) - 1);
}

td_status td__shm_complete(struct td__shm_comm *comm, const struct td__operation *operation,
                           uint32_t done, uint32_t total)
{
    _Atomic uint64_t *word = &comm->head->done[comm->call % TD__SHM_DEPTH];
    uint64_t all = comm->call << 32 | total;
    if (done && count_up(word, comm->call, done) == all)
        wake_sleepers(comm);
    return await_word(comm, operation, word, all, -1, AWAITS_ALL);
}

static inline void pause_before_poll(const struct td__shm_comm *comm)
{
    for (unsigned i = 0; i < comm->pauses; i++)
        td__pause_processor();
}

td_status td__shm_await(struct td__shm_comm *comm, const struct td__operation *operation, int index,
                        unsigned phase)
{
    pause_before_poll(comm);
    return await_member(comm, operation, index, comm->call, phase, 0);
}

td_status td__shm_await_all(struct td__shm_comm *comm, const struct td__operation *operation,
                            unsigned phase)
{
    pause_before_poll(comm);
    for (int i = 1; i < comm->size; i++)
        TD_TRY(await_member(comm, operation, (comm->index + i) % comm->size, comm->call, phase,
                            AWAITS_ALL));
    comm->agreed = comm->call;
    return TD_OK;
}

td_status td__shm_await_release(struct td__shm_comm *comm, const struct td__operation *operation)
{
    if (comm->index == 0) {
        TD_TRY(td__shm_await_all(comm, operation, 1));
        td__shm_reach(comm, 2);
        return TD_OK;
    }
    TD_TRY(await_member(comm, operation, 0, comm->call, 1, AWAITS_ALL));
    TD_TRY(await_member(comm, operation, 0, comm->call, 2, AWAITS_ALL | YIELD_FIRST));
    comm->agreed = comm->call;
    return TD_OK;
}

struct td__reduction td__shm_reduction(struct td__shm_comm *comm,
                                       const struct td__operation *operation)
{
    struct td__reduction reduction = operation->reduction;
    if (!reduction.user && reduction.op == TD_PREMUL_SUM) {
        for (int i = 0; i < comm->size; i++)
            comm->factors[i] = td__shm_slot(comm, i)->args.factor;
        reduction.factors = comm->factors;
    }
    return reduction;
}

size_t td__part(size_t count, int parts, int index)
{
    size_t unit = count / (size_t)parts >= 4096 ? 1024 : 64;
    size_t units = count / unit, each = units / (size_t)parts, more = units % (size_t)parts;
    if (index == parts)
        return count;
    return unit * (each * (size_t)index + ((size_t)index < more ? (size_t)index : more));
}

size_t td__shm_largest_part(const struct td__shm_comm *comm, const struct td__operation *operation)
{
    size_t largest = 0;
    if (!operation->call.input_counts)
        return operation->call.count;
    if (!td__shm_exchanges_counts(operation))
        return td__largest_count(operation->call.input_counts, comm->size);
    for (int i = 0; i < comm->size; i++) {
        size_t one = td__largest_count(td__shm_counts(comm, i), comm->size);
        largest = one > largest ? one : largest;
    }
    return largest;
}

struct td__shm_span td__shm_span(const struct td__shm_comm *comm,
                                 const struct td__operation *operation, int from, int to)
{
    size_t element = td__operation_element(operation), count = operation->call.count;
    size_t input = 0, output = 0;
    int root = operation->call.root;
    switch (operation->call.kind) {
    case TD_OP_SCATTER:
        input = count * (size_t)to;
        __attribute__((fallthrough));
    case TD_OP_BROADCAST:
        count = from == root ? count : 0;
        break;
    case TD_OP_GATHER:
        output = count * (size_t)from;
        count = to == root ? count : 0;
        break;
    case TD_OP_ALL_GATHER:
        output = td__operation_part_start(operation, from);
        count = td__operation_part(operation, from);
        break;
    case TD_OP_REDUCE_SCATTER:
        input = td__operation_part_start(operation, to);
        count = td__operation_part(operation, to);
        break;
    default: /* all_to_all */
        input = count * (size_t)to;
        output = count * (size_t)from;
        if (operation->call.input_counts) {
            input = td__sum_counts(td__shm_counts(comm, from), to);
            output = td__sum_counts(td__shm_counts(comm, to) + comm->size, from);
            count = td__shm_counts(comm, from)[to];
        }
        break;
    }
    return (struct td__shm_span){count * element, input * element, output * element};
}

td_status td__shm_publish(struct td__shm_comm *comm, const struct td__operation *operation)
{
    if (td__shm_is_broken(comm))
        return broken(comm);
    TD_TRY(td__shm_begin(comm, operation, TD__SHM_INLINE_DEPTH));
    td__shm_reach(comm, 1);
    return TD_OK;
}
