/* The postmortem of a job; see postmortem.h.
 *
 * Which rank failed first? The launcher knows in which order its workers ended, and the pages hold the
 * failures that calls returned. A rank that got TD_ERR_PEER suffered from another one: it is not the cause
 * as long as there is another candidate. */
#include "launch/postmortem.h"

#include "base/fail.h"
#include "os/process.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

/* ---- One rank -------------------------------------------------------------------------------- */

static bool is_under_way(const struct td__flight_call *call)
{
    return call->state == TD__FLIGHT_QUEUED || call->state == TD__FLIGHT_RUNNING;
}

static bool holds_up(const struct td__flight_call *call)
{
    return is_under_way(call) && (!call->posted || call->waited);
}

/* What a rank is in, and what it did last. Of several that it is in (in several threads), the oldest:
 * the others may follow from it. */
static void find_calls(struct td__postmortem_rank *rank)
{
    for (int i = 0; i < rank->page->count; i++) {
        const struct td__flight_call *call = &rank->page->calls[i];
        if (holds_up(call) && !rank->current)
            rank->current = call;
        else if (is_under_way(call))
            rank->under_way++;
        else if (!rank->last || call->ended_ns >= rank->last->ended_ns)
            rank->last = call;
    }
}

/* Whether the last call is of a group that was made after the failure, as by td_group_shrink(). */
static bool has_gone_on(const struct td__postmortem_rank *rank)
{
    const struct td__flight_page *page = rank->page;
    if (!page->failure || !rank->last || rank->last->state != TD__FLIGHT_DONE)
        return false;
    for (int i = 0; i < page->count; i++)
        if (page->calls[i].group == rank->last->group &&
            page->calls[i].queued_ns <= page->failure_ns)
            return false;
    return true;
}

static enum td__postmortem_state state_of(const struct td__postmortem_rank *rank)
{
    static const enum td__postmortem_state of_phase[] = {
        [TD__FLIGHT_ABSENT] = TD__STORY_NEVER, [TD__FLIGHT_JOINING] = TD__STORY_JOINING,
        [TD__FLIGHT_JOINED] = TD__STORY_IDLE,  [TD__FLIGHT_LEAVING] = TD__STORY_LEAVING,
        [TD__FLIGHT_LEFT] = TD__STORY_LEFT,
    };
    const struct td__flight_page *page = rank->page;
    if (rank->ended && page->wait_status == 0)
        return TD__STORY_ENDED;
    if (rank->ended)
        return page->failure == TD_ERR_PEER && !rank->outlived ? TD__STORY_SUFFERED
                                                               : TD__STORY_FAILED;
    return page->phase == TD__FLIGHT_JOINED && rank->current ? TD__STORY_CALLING
                                                             : of_phase[page->phase];
}

static void summarise(struct td__postmortem_rank *rank, int64_t moment_ns)
{
    const struct td__flight_page *page = rank->page;
    rank->ended = page->ended_ns != 0;
    find_calls(rank);
    rank->outlived = has_gone_on(rank);
    if (page->count && moment_ns > page->calls[0].queued_ns)
        rank->rate = page->count / ((double)(moment_ns - page->calls[0].queued_ns) / 1e9);
    rank->state = state_of(rank);
}

/* ---- All of them ----------------------------------------------------------------------------- */

/* When a rank failed. */
static int64_t trouble_ns(const struct td__postmortem_rank *rank)
{
    const struct td__flight_page *page = rank->page;
    return page->failure && page->failure_ns && !rank->outlived ? page->failure_ns : page->ended_ns;
}

static struct td__postmortem_rank *first_failed(const struct td__postmortem *postmortem)
{
    struct td__postmortem_rank *first = NULL;
    for (int i = 0; i < postmortem->count; i++) {
        struct td__postmortem_rank *rank = &postmortem->ranks[i];
        if (rank->state == TD__STORY_FAILED && (!first || trouble_ns(rank) < trouble_ns(first)))
            first = rank;
    }
    return first;
}

/* Pages without a launcher do not say how a process ended: the failure that the program got has to do, and
 * whether the process still runs. */
static void judge_by_pages(struct td__postmortem *postmortem)
{
    for (int i = 0; i < postmortem->count; i++) {
        struct td__postmortem_rank *rank = &postmortem->ranks[i];
        struct td__flight_page *page = rank->page;
        bool inside = page->phase > TD__FLIGHT_ABSENT && page->phase < TD__FLIGHT_LEFT;
        if (inside && !rank->ended && page->here && page->pid && !td__process_state(page->pid)) {
            rank->ended = true;
            page->wait_status = -1;
            strcpy(page->ending, "ended without leaving");
            rank->state = state_of(rank);
        } else if (page->failure && !rank->outlived && !rank->ended &&
                   rank->state != TD__STORY_LEFT) {
            rank->state = page->failure == TD_ERR_PEER ? TD__STORY_SUFFERED : TD__STORY_FAILED;
        }
    }
}

struct td__postmortem_rank *td__postmortem_rank_of(const struct td__postmortem *postmortem,
                                                   int slot)
{
    for (int i = 0; i < postmortem->count; i++)
        if (postmortem->ranks[i].slot == slot)
            return &postmortem->ranks[i];
    return NULL;
}

static void find_cause(struct td__postmortem *postmortem, int first_slot)
{
    struct td__postmortem_rank *cause = td__postmortem_rank_of(postmortem, first_slot);
    if (!cause || cause->state != TD__STORY_FAILED)
        cause = first_failed(postmortem);
    if (cause)
        cause->state = TD__STORY_CAUSE;
    postmortem->cause = cause;
}

static int compare_ranks(const void *a, const void *b)
{
    const struct td__postmortem_rank *x = a, *y = b;
    int by_rank = (x->page->rank > y->page->rank) - (x->page->rank < y->page->rank);
    return by_rank ? by_rank : (x->slot > y->slot) - (x->slot < y->slot);
}

/* Reads one log, in as much memory as its calls take; NULL without memory. */
static struct td__flight_page *read_page(const struct td__postmortem_book *book, int slot,
                                         const struct td__flight_now *now)
{
    struct td__flight_page *page = malloc(sizeof *page), *cut;
    if (!page)
        return NULL;
    td__flight_read_log(book->bytes, book->size, slot, now, page);
    if (page->started_pid) {
        page->rank = page->started_rank;
        page->pid = page->started_pid;
    } else {
        page->spare = -1;
    }
    cut = realloc(page, offsetof(struct td__flight_page, calls[page->count]));
    return cut ? cut : page;
}

static int compare_spares(const void *a, const void *b)
{
    const struct td__flight_page *x = *(struct td__flight_page *const *)a;
    const struct td__flight_page *y = *(struct td__flight_page *const *)b;
    return x->spare < y->spare ? -1 : x->spare > y->spare;
}

static td_status read_ranks(struct td__postmortem *postmortem, const struct td__flight_now *now,
                            bool live)
{
    int count = 0;
    for (int b = 0; b < postmortem->book_count; b++)
        count += postmortem->books[b].info.slots;
    postmortem->ranks = calloc((size_t)count + 1, sizeof *postmortem->ranks);
    postmortem->spares = calloc((size_t)count + 1, sizeof *postmortem->spares);
    for (int b = 0; postmortem->ranks && postmortem->spares && b < postmortem->book_count; b++)
        for (int slot = 0; slot < postmortem->books[b].info.slots; slot++) {
            struct td__flight_page *page = read_page(&postmortem->books[b], slot, now);
            if (!page)
                return td__fail_nomem("postmortem");
            if (!live && page->seen_ns > postmortem->moment_ns)
                postmortem->moment_ns = page->seen_ns; /* the files end here */
            if (page->spare >= 0)
                postmortem->spares[postmortem->spare_count++] = page;
            else
                postmortem->ranks[postmortem->count++] = (struct td__postmortem_rank){.slot = slot,
                                                                                      .page = page};
        }
    if (!postmortem->ranks || !postmortem->spares)
        return td__fail_nomem("postmortem");
    for (int i = 0; i < postmortem->count; i++)
        summarise(&postmortem->ranks[i], postmortem->moment_ns);
    qsort(postmortem->ranks, (size_t)postmortem->count, sizeof *postmortem->ranks, compare_ranks);
    qsort(postmortem->spares, (size_t)postmortem->spare_count, sizeof *postmortem->spares,
          compare_spares);
    return TD_OK;
}

td_status td__postmortem_take(struct td__postmortem_book *books, int count,
                              const struct td__flight_now *now, bool live, int first_slot,
                              struct td__postmortem *postmortem)
{
    struct td__flight_now present;
    *postmortem = (struct td__postmortem){.books = books, .book_count = count};
    if (!now) {
        td__flight_now(&present);
        now = &present;
    }
    if (live)
        postmortem->moment_ns = td__flight_wall_ns(now);
    td_status status = read_ranks(postmortem, now, live);
    if (status) {
        td__postmortem_free(postmortem);
        return status;
    }
    if (!live)
        judge_by_pages(postmortem);
    find_cause(postmortem, first_slot);
    return TD_OK;
}

struct td__postmortem_book *td__postmortem_book_copy(const struct td__flight_book *book)
{
    struct td__postmortem_book *copy = calloc(1, sizeof *copy);
    if (!copy)
        return NULL;
    copy->bytes = td__flight_book_copy(book);
    copy->size = book->size;
    if (copy->bytes && !td__flight_read_head(copy->bytes, copy->size, &copy->info))
        return copy;
    td__postmortem_books_free(copy, 1);
    return NULL;
}

void td__postmortem_books_free(struct td__postmortem_book *books, int count)
{
    for (int i = 0; i < count; i++)
        free(books[i].bytes);
    free(books);
}

td_status td__postmortem_of_book(const struct td__flight_book *book, int first_slot,
                                 struct td__postmortem *postmortem)
{
    struct td__postmortem_book *copy = td__postmortem_book_copy(book);
    if (!copy)
        return td__fail_nomem("postmortem");
    return td__postmortem_take(copy, 1, NULL, true, first_slot, postmortem);
}

void td__postmortem_free(struct td__postmortem *postmortem)
{
    td__postmortem_books_free(postmortem->books, postmortem->book_count);
    for (int i = 0; i < postmortem->count; i++)
        free(postmortem->ranks[i].page);
    for (int i = 0; i < postmortem->spare_count; i++)
        free(postmortem->spares[i]);
    free(postmortem->ranks);
    free(postmortem->spares);
    *postmortem = (struct td__postmortem){0};
}

bool td__postmortem_has_any(const struct td__postmortem *postmortem)
{
    for (int i = 0; i < postmortem->count; i++)
        if (postmortem->ranks[i].page->phase != TD__FLIGHT_ABSENT)
            return true;
    return false;
}

/* ---- Ranks that are missing -------------------------------------------------------------------------- */

/* The key of the group in whose collective a rank waits; 0 for none. */
static uint64_t waited_group(const struct td__postmortem_rank *rank)
{
    const struct td__flight_call *call = rank->current;
    return rank->state == TD__STORY_CALLING && call->sequence &&
                   call->group < TD__FLIGHT_GROUPS - 1 && call->kind < TD__FLIGHT_SEND
               ? rank->page->keys[call->group]
               : 0;
}

static bool same_collective(const struct td__postmortem_rank *a,
                            const struct td__postmortem_rank *b)
{
    return waited_group(a) && waited_group(a) == waited_group(b) &&
           a->current->sequence == b->current->sequence;
}

/* Whether the rank of this page is a member of the group and has not reached that call. */
static bool is_behind(const struct td__flight_page *page, uint64_t key, uint64_t sequence)
{
    int slot = 0;
    while (slot < TD__FLIGHT_GROUPS && page->keys[slot] != key)
        slot++;
    for (int i = 0; i < page->count; i++) {
        const struct td__flight_call *call = &page->calls[i];
        if (call->group == slot && call->kind < TD__FLIGHT_SEND && call->sequence >= sequence &&
            call->state != TD__FLIGHT_QUEUED)
            return false;
    }
    return slot < TD__FLIGHT_GROUPS && page->phase >= TD__FLIGHT_JOINED;
}

/* A rank that waits in the collective in which most do; -1 for none. */
static int find_most_waited(const struct td__postmortem *postmortem)
{
    enum { KINDS = 32 };
    int firsts[KINDS], counts[KINDS] = {0}, kinds = 0, best = -1;
    for (int i = 0; i < postmortem->count; i++) {
        int kind = 0;
        if (!waited_group(&postmortem->ranks[i]))
            continue;
        while (kind < kinds &&
               !same_collective(&postmortem->ranks[firsts[kind]], &postmortem->ranks[i]))
            kind++;
        if (kind == KINDS)
            continue;
        if (kind == kinds)
            firsts[kinds++] = i;
        counts[kind]++;
        if (best < 0 || counts[kind] > counts[best])
            best = kind;
    }
    return best < 0 ? -1 : firsts[best];
}

int td__postmortem_find_gap(const struct td__postmortem *postmortem, bool *waiting, bool *missing)
{
    int waited = find_most_waited(postmortem), joining = -1;
    const struct td__postmortem_rank *there = waited >= 0 ? &postmortem->ranks[waited] : NULL;
    bool found = false;
    for (int i = 0; i < postmortem->count; i++) {
        const struct td__postmortem_rank *rank = &postmortem->ranks[i];
        joining = rank->state == TD__STORY_JOINING ? i : joining;
        waiting[i] = there ? same_collective(rank, there) : rank->state == TD__STORY_JOINING;
        missing[i] = there ? is_behind(rank->page, waited_group(there), there->current->sequence)
                           : rank->page->phase == TD__FLIGHT_ABSENT;
        found = found || missing[i];
    }
    return !found ? -1 : there ? waited : joining;
}
