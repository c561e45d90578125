/* One rank: starts, runs its lanes, leaves. Where it is the victim and injects the fault itself, a thread does it
 * after the delay of the plan, whatever the rank is doing then. */
#include "chaos_rpc.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STRIKE_MS = 5000, TIMEOUT_MS = 8000, EARLY_MS = 3000, DESTROY_S = 5, CUT_OFF_S = 10 };

/* ---- The page -------------------------------------------------------------------------------- */

void page_ring(struct page *page)
{
    atomic_fetch_add(&page->events, 1);
    syscall(SYS_futex, &page->events, FUTEX_WAKE, MAX_RANKS * 2, NULL, NULL, 0);
}

void page_wait(struct page *page, uint32_t events, int64_t ns)
{
    struct timespec timeout = td__timespec(ns);
    syscall(SYS_futex, &page->events, FUTEX_WAIT, events, &timeout, NULL, 0);
}

static void set_state(struct rank *rank, enum state state)
{
    atomic_store(&rank->report->state, (int)state);
    page_ring(rank->page);
}

void rank_report(struct rank *rank, const char *format, ...)
{
    va_list args;
    if (atomic_flag_test_and_set(&rank->report->complained))
        return;
    va_start(args, format);
    vsnprintf(rank->report->complaint, COMPLAINT, format, args);
    va_end(args);
}

/* The victim waits until all others have begun: what happens before that is FAULT_EARLY's. */
static void await_beginning(struct rank *rank)
{
    for (bool begun = false; !begun;) {
        uint32_t events = atomic_load(&rank->page->events);
        begun = true;
        for (int r = 0; r < rank->plan->size; r++)
            begun &= atomic_load(&rank->page->ranks[r].state) >= (int)STATE_RUNS;
        if (!begun)
            page_wait(rank->page, events, 100000000);
    }
}

/* Waits until all ranks that are to live have arrived here. */
static void await_others(struct rank *rank, enum state state)
{
    const struct plan *plan = rank->plan;
    bool lives = plan->fault == FAULT_PAUSE || plan->fault == FAULT_LATE ||
                 plan->fault == FAULT_ABORT || plan->after == AFTER_GROW;
    for (;;) {
        uint32_t events = atomic_load(&rank->page->events);
        bool there = true;
        for (int r = 0; r < plan->size; r++)
            there &= (r == plan->victim && !lives) || r == plan->second ||
                     atomic_load(&rank->page->ranks[r].state) >= (int)state;
        if (there)
            return;
        page_wait(rank->page, events, 100000000);
    }
}

/* ---- The victim ------------------------------------------------------------------------------ */

static _Noreturn void end_self(enum end end)
{
    switch (end) {
    case END_SEGV:
        raise(SIGSEGV);
        break;
    case END_ABORT:
        abort();
    case END_EXIT:
        exit(3);
    case END_SILENT:
        _exit(0);
    default:
        break;
    }
    for (;;)
        kill(getpid(), SIGKILL);
}

struct injection {
    struct rank *rank;
    _Atomic int64_t *when;
    int64_t delay_ns;
};

static atomic_bool injected; /* the group is aborted */

static void *inject_later(void *arg)
{
    struct injection *injection = arg;
    struct rank *rank = injection->rank;
    const struct plan *plan = rank->plan;
    if (injection->delay_ns)
        td__sleep_ns(injection->delay_ns);
    atomic_store(injection->when, td__now_ns());
    page_ring(rank->page);
    if (plan->fault != FAULT_ABORT)
        end_self(plan->end);
    if (td_group_abort(rank->groups[plan->aborted_group]))
        rank_report(rank, "aborting group %d failed: %s", plan->aborted_group, td_last_error());
    atomic_store(&injected, true);
    return NULL;
}

static pthread_t inject_thread;
static bool inject_begun;

void inject_self(struct rank *rank, _Atomic int64_t *when, int64_t delay_ns)
{
    static struct injection injection;
    injection = (struct injection){rank, when, delay_ns};
    if (!delay_ns || pthread_create(&inject_thread, NULL, inject_later, &injection))
        inject_later(&injection);
    else
        inject_begun = true;
}

static bool is_victim(const struct rank *rank)
{
    return rank->rank == rank->plan->victim;
}

void rank_at(struct rank *rank, int lane, int index)
{
    enum fault fault = rank->plan->fault;
    if (!is_victim(rank) || lane || index != rank->plan->stop_at[0] || fault == FAULT_EARLY ||
        fault == FAULT_LATE || fault == FAULT_LEAVE || rank->plan->serves)
        return;
    if (rank->plan->by_host) {
        atomic_store(&rank->page->reached, true);
        page_ring(rank->page);
    } else {
        inject_self(rank, &rank->page->fault_ns, rank->plan->delay_ns);
    }
}

void rank_serves(struct rank *rank, bool last)
{
    static atomic_int served;
    static atomic_flag done = ATOMIC_FLAG_INIT;
    if (!is_victim(rank) || !rank->plan->serves || !atomic_load(&rank->begun))
        return;
    if ((last || atomic_fetch_add(&served, 1) + 1 == rank->plan->serves) &&
        !atomic_flag_test_and_set(&done))
        inject_self(rank, &rank->page->fault_ns, rank->plan->delay_ns);
}

static void await_injection(struct rank *rank)
{
    while (rank->plan->fault != FAULT_CUT || !atomic_load(&rank->page->injected))
        td__sleep_ns(1000000);
}

/* ---- Beginning ------------------------------------------------------------------------------- */

/* A world that was not made: because of the victim, which is named. */
static void judge_init(struct rank *rank, td_status status, int64_t since)
{
    const char *message = td_last_error();
    int64_t took = td__now_ns() - since;
    if (rank->plan->fault != FAULT_EARLY || !atomic_load(&rank->page->fault_ns))
        rank_report(rank, "the world was not made: %s: %s", td_status_name(status), message);
    else if (status != TD_ERR_PEER && status != TD_ERR_TIMEOUT)
        rank_report(rank, "another status was due: %s: %s", td_status_name(status), message);
    else if (!names_rank(message, rank->plan->victim) &&
             !(rank->plan->store == STORE_RANK_0 && rank->plan->victim == 0))
        rank_report(rank, "the victim is not named: %s: %s", td_status_name(status), message);
    else if (took > (EARLY_MS + 4000) * (int64_t)1000000 * slowness())
        rank_report(rank, "it was noticed after %.2f s: %s", (double)took / 1e9, message);
}

td_status rank_begin(struct rank *rank)
{
    char url[300];
    const struct plan *plan = rank->plan;
    const char *directory = getenv("CHAOS_DIRECTORY");
    td_init_options options = {
        .backend = plan->way == WAY_BACKEND ? "tcp" : NULL,
        .timeout_ms = (plan->fault == FAULT_EARLY ? EARLY_MS : TIMEOUT_MS) * slowness(),
    };
    if (plan->store == STORE_FILE) {
        snprintf(url, sizeof url, "file://%s/store?rank=%d&world_size=%d", directory, rank->rank,
                 plan->size);
        options.init_method = url;
    }
    int64_t since = td__now_ns();
    td_status status = plan->rpc ? rpc_begin(rank, &options) : td_init_process_group(&options);
    atomic_store(&rank->report->end_of_init, (int)status);
    if (status)
        judge_init(rank, status, since);
    return status;
}

static void make_groups(struct rank *rank)
{
    const struct plan *plan = rank->plan;
    for (int g = 0; g < plan->groups; g++) {
        const struct members *members = &plan->group[g];
        bool brief = plan->fault == FAULT_STOP && plan_has(members, plan->victim);
        if (g && td_new_group(members->ranks, members->size, NULL, &rank->groups[g]))
            rank_report(rank, "group %d was not made: %s", g, td_last_error());
        if (!plan_has(members, rank->rank))
            continue;
        if (td_get_world_size(rank->groups[g]) != members->size)
            rank_report(rank, "group %d has %d ranks", g, td_get_world_size(rank->groups[g]));
        td_group_set_timeout(rank->groups[g], (brief ? plan->short_ms : TIMEOUT_MS) * slowness());
    }
}

/* ---- Running and leaving --------------------------------------------------------------------- */

struct lane {
    struct rank *rank;
    int lane;
};

static void *run_one(void *arg)
{
    struct lane *lane = arg;
    struct rank *rank = lane->rank;
    const struct plan *plan = rank->plan;
    bool leaves = is_victim(rank) && plan->fault == FAULT_LEAVE;
    bool doomed = is_victim(rank) && plan->fault != FAULT_PAUSE && plan->fault != FAULT_LATE &&
                  plan->fault != FAULT_ABORT;
    int count = leaves ? plan->stop_at[lane->lane] : plan->count[lane->lane];
    if (plan->rpc)
        rpc_run_lane(rank, lane->lane, count);
    else
        run_lane(rank, lane->lane, count);
    if (doomed && !leaves)
        await_injection(rank);
    if (is_victim(rank) && plan->fault == FAULT_ABORT) /* the abort takes a moment */
        while (!atomic_load(&rank->page->fault_ns))
            td__sleep_ns(1000000);
    if (!leaves && plan->rpc)
        rpc_run_last(rank, lane->lane);
    else if (!leaves)
        run_last(rank, lane->lane);
    return NULL;
}

void rank_await_abort(const struct rank *rank)
{
    td__deadline end = td__deadline_in_ms(STRIKE_MS);
    while (is_victim(rank) && !atomic_load(&injected) && !td__deadline_passed(end))
        td__sleep_ns(1000000);
}

static void run_lanes(struct rank *rank)
{
    struct lane lanes[LANES] = {{rank, 0}, {rank, 1}};
    pthread_t thread;
    bool second = rank->plan->count[1] && !pthread_create(&thread, NULL, run_one, &lanes[1]);
    run_one(&lanes[0]);
    if (second)
        pthread_join(thread, NULL);
    if (inject_begun) /* only an abort returns */
        pthread_join(inject_thread, NULL);
    inject_begun = false;
}

static void leave(struct rank *rank, const struct holdings *before)
{
    char left[300];
    int64_t since = td__now_ns(), limit = rank->plan->fault == FAULT_CUT ? CUT_OFF_S : DESTROY_S;
    set_state(rank, STATE_LEAVES);
    td_status status = rank->plan->rpc ? rpc_leave(rank) : td_destroy_process_group();
    int64_t took = td__now_ns() - since;
    atomic_store(&rank->report->destroy_ns, took);
    if (status)
        rank_report(rank, "leaving failed: %s: %s", td_status_name(status), td_last_error());
    else if (took > limit * 1000000000 * slowness() && rank->plan->store != STORE_RANK_0)
        rank_report(rank, "leaving took %.2f s", (double)took / 1e9);
    left_compare(before, left, sizeof left);
    if (*left && !(is_victim(rank) && rank->plan->fault == FAULT_LATE)) /* it has one thread more */
        rank_report(rank, "after leaving there are still %s", left);
}

/* The order matters to others: a rank that leaves before they have noticed the victim's end might be taken for
 * it. */
static void part(struct rank *rank, const struct holdings *before)
{
    const struct plan *plan = rank->plan;
    if (is_victim(rank) && plan->fault == FAULT_LEAVE) {
        atomic_store(&rank->page->fault_ns, td__now_ns());
        page_ring(rank->page);
        leave(rank, before);
        if (plan->delay_ns & 1)
            await_others(rank, STATE_FINISHED);
        return;
    }
    set_state(rank, STATE_FINISHED);
    if (!plan->early)
        await_others(rank, STATE_FINISHED);
    if (plan->rpc && !plan->early)
        rpc_check_empty(rank);
    if (is_victim(rank) && plan->fault == FAULT_LATE)
        inject_self(rank, &rank->page->fault_ns, plan->delay_ns / 4);
    leave(rank, before);
    if (is_victim(rank) && plan->fault == FAULT_LATE)
        await_injection(rank);
}

int rank_main(const struct plan *plan, int number, struct page *page, bool again)
{
    struct rank rank = {.plan = plan,
                        .page = page,
                        .report = &page->ranks[number],
                        .rank = number,
                        .fault = again ? FAULT_PAUSE : plan->fault,
                        .victim = plan->victim,
                        .fault_ns = &page->fault_ns};
    struct holdings before = left_holdings();
    char left[300];
    set_state(&rank, STATE_INIT);
    if (is_victim(&rank) && plan->fault == FAULT_EARLY)
        inject_self(&rank, &page->fault_ns, plan->delay_ns * 3);
    if (rank_begin(&rank)) {
        left_compare(&before, left, sizeof left);
        if (*left)
            rank_report(&rank, "after a world that was not made there are still %s", left);
        set_state(&rank, STATE_DONE);
        return 0;
    }
    set_state(&rank, STATE_RUNS);
    if (again) {
        come_back(&rank);
    } else {
        if (!plan->rpc)
            make_groups(&rank);
        if (is_victim(&rank) && plan->fault != FAULT_EARLY)
            await_beginning(&rank);
        atomic_store(&rank.begun, true);
        run_lanes(&rank);
        if (plan->after && !is_victim(&rank))
            recover(&rank);
    }
    part(&rank, &before);
    set_state(&rank, STATE_DONE);
    return 0;
}
