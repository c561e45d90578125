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
static void find_calls(const struct td__flight_page *page, struct td__postmortem_rank *rank)
{
    for (int i = 0; i < page->count; i++) {
        const struct td__flight_call *call = &page->calls[i];
        if (holds_up(call) && !rank->has_current) {
            rank->current = *call;
            rank->current_key = page->keys[call->group];
            strcpy(rank->current_group, page->groups[call->group]);
            rank->has_current = true;
        } else if (is_under_way(call)) {
            rank->under_way++;
        } else if (!rank->has_last || call->ended_ns >= rank->last.ended_ns) {
            rank->last = *call;
            strcpy(rank->last_group, page->groups[call->group]);
            rank->has_last = true;
        }
    }
}

/* Whether the last call is of a group that was made after the failure, as by td_group_shrink(). */
static bool has_gone_on(const struct td__flight_page *page, const struct td__postmortem_rank *rank)
{
    if (!rank->failure || !rank->has_last || rank->last.state != TD__FLIGHT_DONE)
        return false;
    for (int i = 0; i < page->count; i++)
        if (page->calls[i].group == rank->last.group &&
            page->calls[i].queued_ns <= rank->failure_ns)
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
    if (rank->ended && rank->wait_status == 0)
        return TD__STORY_ENDED;
    if (rank->ended)
        return rank->failure == TD_ERR_PEER && !rank->outlived ? TD__STORY_SUFFERED
                                                               : TD__STORY_FAILED;
    return rank->phase == TD__FLIGHT_JOINED && rank->has_current ? TD__STORY_CALLING
                                                                 : of_phase[rank->phase];
}

static void summarise(const struct td__flight_page *page, int64_t moment_ns,
                      struct td__postmortem_rank *rank)
{
    bool launched = page->started_pid != 0;
    rank->rank = launched ? page->started_rank : page->rank;
    rank->pid = launched ? page->started_pid : page->pid;
    rank->here = page->here;
    rank->ended = page->ended_ns != 0;
    rank->ended_ns = page->ended_ns;
    rank->wait_status = page->wait_status;
    rank->phase = page->phase;
    rank->phase_ns = page->phase_ns;
    rank->failure = page->failure;
    rank->failure_ns = page->failure_ns;
    rank->total = page->total;
    strcpy(rank->host, page->host);
    strcpy(rank->ending, page->ending);
    strcpy(rank->sentence, page->sentence);
    find_calls(page, rank);
    rank->outlived = has_gone_on(page, rank);
    if (page->count && moment_ns > page->calls[0].queued_ns)
        rank->rate = page->count / ((double)(moment_ns - page->calls[0].queued_ns) / 1e9);
    rank->state = state_of(rank);
}

/* ---- All of them ----------------------------------------------------------------------------- */

/* When a rank failed. */
static int64_t trouble_ns(const struct td__postmortem_rank *rank)
{
    return rank->failure && rank->failure_ns && !rank->outlived ? rank->failure_ns : rank->ended_ns;
}

static int earliest(const struct td__postmortem *postmortem, enum td__postmortem_state state)
{
    int found = -1;
    for (int i = 0; i < postmortem->count; i++)
        if (postmortem->ranks[i].state == state &&
            (found < 0 ||
             trouble_ns(&postmortem->ranks[i]) < trouble_ns(&postmortem->ranks[found])))
            found = i;
    return found;
}

/* Pages without a launcher do not say how a process ended: the failure that the program got has to do, and
 * whether the process still runs. */
static void judge_by_pages(struct td__postmortem *postmortem)
{
    for (int i = 0; i < postmortem->count; i++) {
        struct td__postmortem_rank *rank = &postmortem->ranks[i];
        bool inside = rank->phase > TD__FLIGHT_ABSENT && rank->phase < TD__FLIGHT_LEFT;
        if (inside && !rank->ended && rank->here && rank->pid && !td__process_state(rank->pid)) {
            rank->ended = true;
            rank->wait_status = -1;
            strcpy(rank->ending, "ended without leaving");
            rank->state = state_of(rank);
        }
        bool failed = rank->failure && !rank->outlived && !rank->ended &&
                      rank->state != TD__STORY_LEFT;
        if (failed)
            rank->state = rank->failure == TD_ERR_PEER ? TD__STORY_SUFFERED : TD__STORY_FAILED;
    }
}

static void find_cause(struct td__postmortem *postmortem, int first_slot)
{
    int first = -1;
    for (int i = 0; i < postmortem->count; i++)
        if (first_slot >= 0 && postmortem->ranks[i].slot == first_slot)
            first = i;
    if (first < 0 || postmortem->ranks[first].state != TD__STORY_FAILED) {
        int other = earliest(postmortem, TD__STORY_FAILED);
        first = other >= 0 ? other : first;
    }
    if (first >= 0 && postmortem->ranks[first].state == TD__STORY_FAILED)
        postmortem->ranks[first].state = TD__STORY_CAUSE;
    else
        first = -1;
    postmortem->cause = first;
}

static int compare_ranks(const void *a, const void *b)
{
    const struct td__postmortem_rank *x = a, *y = b;
    return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1)
                              : (x->slot > y->slot) - (x->slot < y->slot);
}

static td_status read_ranks(struct td__postmortem *postmortem, bool live)
{
    struct td__flight_page *page = malloc(sizeof *page);
    int count = 0;
    for (int b = 0; b < postmortem->book_count; b++)
        count += postmortem->books[b].info.slots;
    postmortem->ranks = calloc((size_t)count + 1, sizeof *postmortem->ranks);
    if (!page || !postmortem->ranks) {
        free(page);
        return td__fail_nomem("postmortem");
    }
    for (int pass = live; pass < 2; pass++) {
        postmortem->count = 0;
        for (int b = 0; b < postmortem->book_count; b++)
            for (int slot = 0; slot < postmortem->books[b].info.slots; slot++) {
                struct td__postmortem_book *book = &postmortem->books[b];
                struct td__postmortem_rank *rank = &postmortem->ranks[postmortem->count++];
                td__flight_read_log(book->bytes, book->size, slot, &postmortem->now, page);
                if (!live && page->seen_ns > postmortem->moment_ns)
                    postmortem->moment_ns = page->seen_ns; /* the files end here */
                *rank = (struct td__postmortem_rank){.slot = slot, .book = b};
                summarise(page, postmortem->moment_ns, rank);
            }
    }
    free(page);
    qsort(postmortem->ranks, (size_t)postmortem->count, sizeof *postmortem->ranks, compare_ranks);
    return TD_OK;
}

td_status td__postmortem_take(struct td__postmortem_book *books, int count,
                              const struct td__flight_now *now, bool live, int first_slot,
                              struct td__postmortem *postmortem)
{
    *postmortem = (struct td__postmortem){.books = books, .book_count = count, .cause = -1};
    if (now)
        postmortem->now = *now;
    else
        td__flight_now(&postmortem->now);
    if (live)
        postmortem->moment_ns = td__flight_wall_ns(&postmortem->now);
    td_status status = read_ranks(postmortem, live);
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
    free(postmortem->ranks);
    *postmortem = (struct td__postmortem){0};
}

bool td__postmortem_has_any(const struct td__postmortem *postmortem)
{
    for (int i = 0; i < postmortem->count; i++)
        if (postmortem->ranks[i].phase != TD__FLIGHT_ABSENT)
            return true;
    return false;
}

/* ---- Ranks that are missing -------------------------------------------------------------------------- */

static bool waits_in_collective(const struct td__postmortem_rank *rank)
{
    return rank->state == TD__STORY_CALLING && rank->current.sequence && rank->current_key &&
           rank->current.group < TD__FLIGHT_GROUPS - 1 && rank->current.kind < TD__FLIGHT_SEND;
}

static bool same_collective(const struct td__postmortem_rank *a,
                            const struct td__postmortem_rank *b)
{
    return waits_in_collective(a) && waits_in_collective(b) && a->current_key == b->current_key &&
           a->current.sequence == b->current.sequence;
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
        if (!waits_in_collective(&postmortem->ranks[i]))
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

static bool mark_collective(const struct td__postmortem *postmortem, struct td__postmortem_gap *gap)
{
    struct td__flight_page *page = malloc(sizeof *page);
    const struct td__postmortem_rank *there = &postmortem->ranks[gap->there];
    bool found = false;
    for (int i = 0; page && i < postmortem->count; i++) {
        const struct td__postmortem_rank *rank = &postmortem->ranks[i];
        const struct td__postmortem_book *book = &postmortem->books[rank->book];
        td__flight_read_log(book->bytes, book->size, rank->slot, &postmortem->now, page);
        gap->waiting[i] = same_collective(rank, there);
        gap->missing[i] = is_behind(page, there->current_key, there->current.sequence);
        found = found || gap->missing[i];
    }
    free(page);
    return found;
}

static bool mark_joining(const struct td__postmortem *postmortem, struct td__postmortem_gap *gap)
{
    bool found = false;
    for (int i = 0; i < postmortem->count; i++) {
        gap->waiting[i] = postmortem->ranks[i].state == TD__STORY_JOINING;
        gap->missing[i] = postmortem->ranks[i].phase == TD__FLIGHT_ABSENT;
        found = found || gap->missing[i];
    }
    return found;
}

static int find_joining(const struct td__postmortem *postmortem)
{
    for (int i = 0; i < postmortem->count; i++)
        if (postmortem->ranks[i].state == TD__STORY_JOINING)
            return i;
    return -1;
}

bool td__postmortem_find_gap(const struct td__postmortem *postmortem,
                             struct td__postmortem_gap *gap)
{
    int joining = find_joining(postmortem), waited = find_most_waited(postmortem);
    gap->there = waited >= 0 ? waited : joining;
    if (gap->there < 0)
        return false;
    gap->waiting = calloc((size_t)postmortem->count + 1, sizeof *gap->waiting);
    gap->missing = calloc((size_t)postmortem->count + 1, sizeof *gap->missing);
    bool found = gap->waiting && gap->missing &&
                 (waited >= 0 ? mark_collective(postmortem, gap) : mark_joining(postmortem, gap));
    if (!found) {
        free(gap->waiting);
        free(gap->missing);
    }
    return found;
}
