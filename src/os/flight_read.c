/* Reading the flight recorder's pages; see flight_read.h.
 *
 * Times. A page has the same moment in ticks and in nanoseconds twice: from the start, and from some time
 * later. On the machine that wrote it, while that is still up, the reader's own time is the better second
 * moment, as it is further away. Elsewhere the page's own has to do, and its idea of the wall clock. */
#include "os/flight_read.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/flight.h"
#include "os/process.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAR = 1 << 30 };                   /* a number of ranks or processes beyond belief */
static const int64_t DISTANT = 1ll << 61; /* nanoseconds: the sum of two of them still fits */

void td__flight_now(struct td__flight_now *now)
{
    struct td__flight_log self = {.stamps = td__flight_has_stamps()};
    *now = (struct td__flight_now){.ns = td__now_ns(), .boot = td__boot_number()};
    if (self.stamps)
        now->ticks = td__flight_ticks(&self);
    now->wall = td__wall_ns() - td__now_ns();
}

/* ---- Copies ---------------------------------------------------------------------------------- */

static void copy_words(const _Atomic uint64_t *from, uint64_t *to, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = atomic_load_explicit(&from[i], memory_order_acquire);
}

/* Copies a log that others write to, entry by entry; one that changed meanwhile is left out. */
static void copy_log(const struct td__flight_bytes *log, void *copy)
{
    struct td__flight_bytes *to = copy;
    enum { WORDS = sizeof(struct td__flight_entry) / 8, LABEL = TD__FLIGHT_LABEL / 8 };
    copy_words((const _Atomic uint64_t *)log, copy, offsetof(struct td__flight_bytes, entries) / 8);
    /* Reading memory that was never written to would have the system allocate some. */
    int used = to->next ? TD__FLIGHT_ENTRIES : 0;
    if (!used)
        memset(to->entries, 0, sizeof *to - offsetof(struct td__flight_bytes, entries));
    for (int i = 0; i < used; i++) {
        const struct td__flight_entry *entry = &log->entries[i];
        uint64_t words[WORDS], label[LABEL];
        copy_words((const _Atomic uint64_t *)entry, words, WORDS);
        copy_words(log->labels[i], label, LABEL);
        if (td__flight_look(&entry->mark) >> 16 != words[0] >> 16)
            words[0] = 0;
        memcpy(&to->entries[i], words, sizeof words);
        memcpy(&to->labels[i], label, sizeof label);
    }
}

/* ---- Taking apart ---------------------------------------------------------------------------- */

static int within(int32_t value, int low, int high)
{
    return value < low || value > high ? low : value;
}

static int64_t credible(uint64_t ns)
{
    return ns > (uint64_t)DISTANT ? 0 : (int64_t)ns;
}

td_status td__flight_read_head(const void *bytes, size_t size, struct td__flight_book_info *info)
{
    struct td__flight_head head;
    if (size < TD__FLIGHT_HEAD)
        return td_fail(TD_ERR_INVALID, "these are %zu bytes, too few for a flight recorder's page",
                       size);
    memcpy(&head, bytes, sizeof head);
    if (head.magic != TD__FLIGHT_MAGIC)
        return td_fail(TD_ERR_INVALID, "this is no page of a flight recorder");
    if (head.version != TD__FLIGHT_VERSION || head.log_size != sizeof(struct td__flight_bytes))
        return td_fail(TD_ERR_INVALID,
                       "the flight recorder's page is of version %u, and this program reads "
                       "version %d",
                       (unsigned)head.version, TD__FLIGHT_VERSION);
    size_t whole = (size - TD__FLIGHT_HEAD) / sizeof(struct td__flight_bytes);
    size_t slots = head.slots < whole ? head.slots : whole;
    *info = (struct td__flight_book_info){
        .slots = (int)(slots < TD__FLIGHT_SLOTS ? slots : TD__FLIGHT_SLOTS),
        .pid = within(head.pid, 0, FAR),
        .nnodes = within(head.nnodes, 1, FAR),
        .node_rank = within(head.node_rank, 0, FAR),
        .world_size = within(head.world_size, 0, FAR),
        .attempt = within(head.attempt, 0, FAR),
        .max_restarts = within(head.max_restarts, 0, FAR),
        .started_ns = credible((uint64_t)head.started_ns),
    };
    td__flight_printable(head.host, sizeof head.host, info->host);
    td__flight_printable(head.run_id, sizeof head.run_id, info->run_id);
    td__flight_printable(head.command, sizeof head.command, info->command);
    return TD_OK;
}

/* How ticks of one page become nanoseconds of the wall clock. */
struct scale {
    uint64_t ticks; /* this moment … */
    int64_t wall;   /* … is that one */
    double ns_a_tick;
    int64_t latest; /* nothing can be later */
};

static struct scale find_scale(const struct td__flight_bytes *log, const struct td__flight_now *now)
{
    bool here = log->boot == now->boot;
    bool stamps = log->clock == 1;
    int64_t first = credible(log->ns[0]), second = credible(log->ns[1]);
    int64_t offset = here ? now->wall : credible(log->wall);
    uint64_t ticks = log->ticks[0], later = log->ticks[1];
    if (here && (!stamps || now->ticks > ticks)) {
        later = stamps ? now->ticks : (uint64_t)now->ns;
        second = now->ns;
    }
    double rate = 0;
    if (later > ticks && second > first)
        rate = (double)(second - first) / (double)(later - ticks);
    return (struct scale){ticks, first + offset, stamps ? rate : 1, second + offset};
}

/* A moment of a page; 0 for none. */
static int64_t moment(const struct scale *scale, uint64_t ticks)
{
    if (!ticks)
        return 0;
    double since = (double)(int64_t)(ticks - scale->ticks) * scale->ns_a_tick;
    if (!(since > -1e18) || since > 1e18)
        return scale->wall;
    int64_t when = scale->wall + (int64_t)since;
    if (when > scale->latest)
        when = scale->latest;
    return when > 0 ? when : 1;
}

static bool read_call(const struct td__flight_bytes *log, int index, const struct scale *scale,
                      struct td__flight_call *call)
{
    const struct td__flight_entry *entry = &log->entries[index];
    uint64_t mark = entry->mark, state = mark & 0xff;
    if (state == TD__FLIGHT_EMPTY || state > TD__FLIGHT_FAILED)
        return false;
    uint64_t what = entry->what, kind = what & 0xff, flags = what >> 24 & 0xff;
    td_dtype dtype = (td_dtype)(what >> 8 & 0xff);
    if (kind >= TD__FLIGHT_KINDS || !td_dtype_size(dtype))
        return false;
    uint64_t ended = mark & TD__FLIGHT_QUICK ? entry->queued : entry->ended;
    *call = (struct td__flight_call){
        .number = mark >> 16,
        .sequence = entry->sequence,
        .count = entry->count,
        .queued_ns = moment(scale, entry->queued),
        .started_ns = flags & TD__FLIGHT_AT_ONCE   ? moment(scale, entry->queued)
                      : state == TD__FLIGHT_QUEUED ? 0
                                                   : moment(scale, entry->started),
        .ended_ns = state >= TD__FLIGHT_DONE ? moment(scale, ended) : 0,
        .kind = (enum td__flight_kind)kind,
        .state = (enum td__flight_state)state,
        .posted = flags & TD__FLIGHT_POSTED,
        .uneven = flags & TD__FLIGHT_UNEVEN,
        .waited = mark & TD__FLIGHT_WAITED,
        .dtype = dtype,
        .rank = within((int32_t)(what >> 32), -1, FAR),
        .detail = (int32_t)entry->detail,
        .group = (int)(what >> 16 & 0xff) % TD__FLIGHT_GROUPS,
    };
    if (flags & TD__FLIGHT_LABELLED)
        td__flight_printable((const void *)log->labels[index], TD__FLIGHT_LABEL, call->label);
    return true;
}

/* Numbers of several threads are not quite in the order of time. */
static int compare_calls(const void *a, const void *b)
{
    const struct td__flight_call *x = a, *y = b;
    if (x->queued_ns != y->queued_ns)
        return x->queued_ns < y->queued_ns ? -1 : 1;
    return x->number < y->number ? -1 : x->number > y->number;
}

static int64_t later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static void read_calls(const struct td__flight_bytes *log, const struct scale *scale,
                       struct td__flight_page *page)
{
    int used = log->next < TD__FLIGHT_ENTRIES ? (int)log->next : TD__FLIGHT_ENTRIES;
    for (int i = 0; i < used; i++) {
        struct td__flight_call *call = &page->calls[page->count];
        if (!read_call(log, i, scale, call))
            continue;
        page->count++;
        page->seen_ns = later(page->seen_ns, later(call->queued_ns, call->ended_ns));
    }
    qsort(page->calls, (size_t)page->count, sizeof *page->calls, compare_calls);
}

static void read_copy(const struct td__flight_bytes *log, const struct td__flight_now *now,
                      struct td__flight_page *page)
{
    struct scale scale = find_scale(log, now);
    memset(page, 0,
           offsetof(struct td__flight_page, calls)); /* which are set as far as they count */
    page->phase = log->phase <= TD__FLIGHT_LEFT ? (enum td__flight_phase)log->phase
                                                : TD__FLIGHT_ABSENT;
    page->phase_ns = moment(&scale, log->phase_at);
    page->rank = within(log->rank, 0, FAR);
    page->size = within(log->size, 0, FAR);
    page->pid = within((int32_t)log->owner, 0, FAR);
    page->here = log->boot == now->boot;
    page->failure = (td_status)(log->failure < 100 ? log->failure : 0);
    page->failure_ns = moment(&scale, log->failure_at);
    page->failure_number = log->failure_entry;
    page->total = log->passed < log->next ? log->next - log->passed : log->next;
    page->started_rank = within(log->started_rank, 0, FAR);
    page->started_pid = within(log->started_pid, 0, FAR);
    page->spare = log->started_rank < 0 ? within(-1 - log->started_rank, 0, FAR) : -1;
    page->waits = log->waits == 1;
    page->started_ns = credible(log->started_at);
    page->ended_ns = credible(log->ended_at);
    page->wait_status = log->wait_status;
    page->seen_ns = later(moment(&scale, log->ticks[1]), later(page->phase_ns, page->failure_ns));
    td__flight_printable((const void *)log->host, TD__FLIGHT_HOST, page->host);
    td__flight_printable((const void *)log->sentence, TD__FLIGHT_SENTENCE, page->sentence);
    td__flight_printable((const void *)log->ending, TD__FLIGHT_ENDING, page->ending);
    for (int i = 0; i < TD__FLIGHT_GROUPS; i++) {
        page->keys[i] = log->groups[i].key;
        td__flight_printable((const void *)log->groups[i].name, TD__FLIGHT_NAME, page->groups[i]);
    }
    read_calls(log, &scale, page);
}

void td__flight_read_log(const void *bytes, size_t size, int slot, const struct td__flight_now *now,
                         struct td__flight_page *page)
{
    struct td__flight_bytes copy;
    if (slot < 0 || slot >= TD__FLIGHT_SLOTS || size < td__flight_book_size(slot + 1)) {
        *page = (struct td__flight_page){0};
        return;
    }
    memcpy((void *)&copy, td__flight_log_at(bytes, slot), sizeof copy);
    read_copy(&copy, now, page);
}

void td__flight_log_read(const struct td__flight_log *log, const struct td__flight_now *now,
                         struct td__flight_page *page)
{
    struct td__flight_bytes copy;
    copy_log(log->bytes, &copy);
    read_copy(&copy, now, page);
}

void *td__flight_book_copy(const struct td__flight_book *book)
{
    char *copy = aligned_alloc(4096, book->size);
    if (!copy)
        return NULL;
    memcpy(copy, book->map, TD__FLIGHT_HEAD);
    for (int slot = 0; slot < book->slots; slot++)
        copy_log(td__flight_log_at(book->map, slot), td__flight_log_at(copy, slot));
    return copy;
}

/* ---- Words ----------------------------------------------------------------------------------- */

const char *td__flight_kind_name(enum td__flight_kind kind)
{
    static const char *const names[] = {
        [TD__FLIGHT_BROADCAST] = "broadcast",
        [TD__FLIGHT_REDUCE] = "reduce",
        [TD__FLIGHT_ALL_REDUCE] = "all_reduce",
        [TD__FLIGHT_SCATTER] = "scatter",
        [TD__FLIGHT_GATHER] = "gather",
        [TD__FLIGHT_ALL_GATHER] = "all_gather",
        [TD__FLIGHT_REDUCE_SCATTER] = "reduce_scatter",
        [TD__FLIGHT_ALL_TO_ALL] = "all_to_all",
        [TD__FLIGHT_BARRIER] = "barrier",
        [TD__FLIGHT_SEND] = "send",
        [TD__FLIGHT_RECV] = "recv",
        [TD__FLIGHT_MONITORED_BARRIER] = "monitored_barrier",
    };
    return kind < TD__FLIGHT_KINDS ? names[kind] : "operation";
}

const char *td__flight_state_name(enum td__flight_state state)
{
    static const char *const names[] = {
        [TD__FLIGHT_EMPTY] = "empty",     [TD__FLIGHT_QUEUED] = "queued",
        [TD__FLIGHT_RUNNING] = "running", [TD__FLIGHT_DONE] = "done",
        [TD__FLIGHT_FAILED] = "failed",
    };
    return state <= TD__FLIGHT_FAILED ? names[state] : "unknown";
}

void td__flight_describe(const struct td__flight_call *call, char text[TD__FLIGHT_TEXT])
{
    bool message = call->kind == TD__FLIGHT_SEND || call->kind == TD__FLIGHT_RECV;
    bool barrier = call->kind == TD__FLIGHT_BARRIER || call->kind == TD__FLIGHT_MONITORED_BARRIER;
    bool received = call->kind == TD__FLIGHT_RECV;
    snprintf(text, TD__FLIGHT_TEXT, "%s", td__flight_kind_name(call->kind));
    if (call->sequence)
        td__text_add(text, TD__FLIGHT_TEXT, " #%" PRIu64, call->sequence);
    if (!barrier)
        td__text_add(text, TD__FLIGHT_TEXT, " of %s%" PRIu64 " %s", received ? "up to " : "",
                     call->count, td_dtype_name(call->dtype));
    if (call->uneven)
        td__text_add(text, TD__FLIGHT_TEXT, " in uneven parts");
    if (message && call->rank >= 0)
        td__text_add(text, TD__FLIGHT_TEXT, " %s rank %d", received ? "from" : "to", call->rank);
    else if (message)
        td__text_add(text, TD__FLIGHT_TEXT, " from any rank");
    else if (call->rank >= 0)
        td__text_add(text, TD__FLIGHT_TEXT, ", root %d", call->rank);
    if (message && call->detail > 0)
        td__text_add(text, TD__FLIGHT_TEXT, ", tag %d", call->detail);
}
