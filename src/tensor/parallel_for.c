/* The thread pool of td__parallel_for(), and the number of threads.
 *
 * There is one loop at a time. The thread that sets `busy` owns the pool. Other threads run their loops alone, piece by
 * piece, until the pool is free for what is left: no thread waits for another's loop, and a long loop (a step of an
 * optimizer beside a pass) does not stay alone for a short one. Nested loops run in their thread.
 *
 * A loop is divided into pieces, a few for each thread. A thread starts with the pieces of its own slice, so
 * that it accesses the same memory in every loop over the same tensor; then it steals pieces of other
 * slices. So the caller never waits for a thread to wake up, only for pieces that were started.
 *
 * The word `state` has the number of the loop, whether helpers may join, and how many are in it:
 *
 *     number of the loop << 17 | open << 16 | helpers
 *
 * A helper joins only while the loop is open. The owner closes it when no piece is left, and returns when
 * there are no helpers; then no thread reads `job` until the next loop is opened. */
#include "tensor/parallel_for.h"

#include "base/fail.h"
#include "base/thread.h"

#include <tandem/tensor.h>

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MOST_THREADS = 256, /* more are not used */
    PIECES = 8,         /* for each thread */
    SPIN_NS = 200000,   /* before going to sleep */
    ALONE = 8,          /* grains, before the pool is asked for again */
};

#define HELPERS UINT64_C(0xffff)
#define OPEN UINT64_C(0x10000)
#define NUMBER UINT64_C(0x20000) /* the number's lowest bit */

/* ---- The number of threads ------------------------------------------------------------------- */

static atomic_int num_threads; /* 0: not determined yet */

static int count_cores(void)
{
    cpu_set_t set;
    int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                            : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return cores > 0 ? cores : 1;
}

static int default_threads(void)
{
    const char *text = getenv("OMP_NUM_THREADS");
    if (text) {
        char *end;
        long number = strtol(text, &end, 10); /* of a list, as in "4,2", the first number */
        if (end != text && number > 0 && number <= INT_MAX)
            return (int)number;
    }
    return count_cores();
}

int td_get_num_threads(void)
{
    int number = atomic_load_explicit(&num_threads, memory_order_relaxed);
    if (number > 0)
        return number;
    int found = default_threads();
    return atomic_compare_exchange_strong(&num_threads, &number, found) ? found : number;
}

td_status td_set_num_threads(int number)
{
    if (number < 1)
        return td_fail(TD_ERR_INVALID, "td_set_num_threads: %d threads; it must be at least 1",
                       number);
    atomic_store(&num_threads, number);
    return TD_OK;
}

/* ---- The pool --------------------------------------------------------------------------------- */

struct slice {
    _Alignas(64) atomic_llong next; /* piece */
    int64_t end;
};

/* The current loop. Its owner writes it while no helper is in it. */
struct job {
    td__range_fn *fn;
    void *arg;
    int64_t first, count, piece; /* in indices; pieces are those of `count`, from `first` on */
    int threads;                 /* as many slices */
    struct slice slices[MOST_THREADS];
};

static struct {
    atomic_bool busy;
    _Atomic uint64_t state;
    struct job job;

    pthread_mutex_t lock;
    pthread_cond_t opened; /* for helpers that sleep */
    pthread_cond_t left;   /* for an owner that sleeps */
    atomic_int sleepers;
    atomic_bool owner_sleeps;
    atomic_bool stopping;
    atomic_bool
        may_spin; /* false with more threads than processors: the awaited thread needs this one's */
    int cores;
    atomic_int thread_count;
    pthread_t threads[MOST_THREADS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .opened = PTHREAD_COND_INITIALIZER,
          .left = PTHREAD_COND_INITIALIZER};

static _Thread_local bool in_loop; /* of the pool */

/* A forked child has only the thread that called fork(), and the lock may have been held. */
static void reset_in_child(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.opened, NULL);
    pthread_cond_init(&pool.left, NULL);
    atomic_store(&pool.state, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.owner_sleeps, false);
    atomic_store(&pool.busy, false);
    pool.thread_count = 0;
    in_loop = false;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, reset_in_child);
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins for a moment until (state & mask) differs from `value`. */
static bool spin_while(uint64_t mask, uint64_t value)
{
    if (!atomic_load_explicit(&pool.may_spin, memory_order_relaxed))
        return (atomic_load(&pool.state) & mask) != value;
    for (int64_t until = td__now_ns() + SPIN_NS;;) {
        for (int i = 0; i < 32; i++, relax())
            if ((atomic_load_explicit(&pool.state, memory_order_acquire) & mask) != value)
                return true;
        if (td__now_ns() >= until)
            return false;
    }
}

static void run_pieces(struct job *job, int first)
{
    in_loop = true;
    for (int i = 0; i < job->threads; i++) {
        struct slice *slice = &job->slices[(first + i) % job->threads];
        for (;;) {
            int64_t at = atomic_fetch_add_explicit(&slice->next, 1, memory_order_relaxed);
            if (at >= slice->end)
                break;
            int64_t begin = at * job->piece, rest = job->count - begin;
            begin += job->first;
            job->fn(job->arg, begin, begin + (rest < job->piece ? rest : job->piece));
        }
    }
    in_loop = false;
}

/* ---- Helpers ---------------------------------------------------------------------------------- */

/* Whether a loop other than number `seen` is open. */
static bool is_new(uint64_t state, uint64_t seen)
{
    return (state & OPEN) && state / NUMBER != seen;
}

/* Waits for a loop and joins it: its state, or 0 when the pool ends. */
static uint64_t enter_loop(uint64_t seen)
{
    for (;;) {
        uint64_t state = atomic_load(&pool.state);
        if (atomic_load(&pool.stopping))
            return 0;
        if (is_new(state, seen)) {
            if (atomic_compare_exchange_weak(&pool.state, &state, state + 1))
                return state + 1;
            continue;
        }
        if (spin_while(~HELPERS, state & ~HELPERS))
            continue;
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_add(&pool.sleepers, 1);
        while (!is_new(atomic_load(&pool.state), seen) && !atomic_load(&pool.stopping))
            pthread_cond_wait(&pool.opened, &pool.lock);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.lock);
    }
}

static void leave_loop(void)
{
    uint64_t state = atomic_fetch_sub(&pool.state, 1) - 1;
    if ((state & (OPEN | HELPERS)) == 0 && atomic_load(&pool.owner_sleeps)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_signal(&pool.left);
        pthread_mutex_unlock(&pool.lock);
    }
}

static void *help(void *arg)
{
    (void)arg;
    uint64_t seen = 0, state;
    while ((state = enter_loop(seen))) {
        /* More helpers than the loop has slices: after the number of threads was lowered. */
        int first = (int)(state & HELPERS);
        if (first < pool.job.threads)
            run_pieces(&pool.job, first);
        seen = state / NUMBER;
        leave_loop();
    }
    return NULL;
}

/* ---- The owner -------------------------------------------------------------------------------- */

/* If a thread cannot be started, the pool works with fewer. */
static void start_helpers(int wanted)
{
    pthread_mutex_lock(&pool.lock);
    if (!pool.cores)
        pool.cores = count_cores();
    while (pool.thread_count < wanted && !atomic_load(&pool.stopping)) {
        if (td__thread_start(&pool.threads[pool.thread_count], "td-pool", help, NULL))
            break;
        pool.thread_count++;
    }
    pthread_mutex_unlock(&pool.lock);
}

static void open_loop(int threads)
{
    uint64_t state = atomic_load(&pool.state);
    atomic_store(&pool.state, (state / NUMBER + 1) * NUMBER | OPEN);
    int sleepers = atomic_load(&pool.sleepers);
    if (sleepers == 0)
        return;
    pthread_mutex_lock(&pool.lock);
    if (sleepers < threads)
        pthread_cond_broadcast(&pool.opened);
    else
        for (int i = 1; i < threads; i++)
            pthread_cond_signal(&pool.opened);
    pthread_mutex_unlock(&pool.lock);
}

static void close_loop(void)
{
    uint64_t state = atomic_fetch_and(&pool.state, ~OPEN);
    if ((state & HELPERS) == 0)
        return;
    while ((state = atomic_load(&pool.state)) & HELPERS)
        if (!spin_while(~UINT64_C(0), state))
            break;
    if ((state & HELPERS) == 0)
        return;
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.owner_sleeps, true);
    while (atomic_load(&pool.state) & HELPERS)
        pthread_cond_wait(&pool.left, &pool.lock);
    atomic_store(&pool.owner_sleeps, false);
    pthread_mutex_unlock(&pool.lock);
}

static void set_up_job(int64_t first, int64_t count, int64_t grain, int threads, td__range_fn *fn,
                       void *arg)
{
    struct job *job = &pool.job;
    job->first = first;
    int64_t grains = (count - 1) / grain + 1, most = (int64_t)threads * PIECES;
    int64_t grains_each = (grains - 1) / most + 1;
    int64_t pieces = (grains - 1) / grains_each + 1;
    job->fn = fn;
    job->arg = arg;
    job->count = count;
    job->piece = grains_each * grain;
    job->threads = threads < pieces ? threads : (int)pieces;
    for (int i = 0; i < job->threads; i++) {
        atomic_store_explicit(&job->slices[i].next, pieces * i / job->threads,
                              memory_order_relaxed);
        job->slices[i].end = pieces * (i + 1) / job->threads;
    }
}

static bool take_pool(void)
{
    return !atomic_exchange_explicit(&pool.busy, true, memory_order_acquire);
}

void td__parallel_for(int64_t count, int64_t grain, td__range_fn *fn, void *arg)
{
    if (count <= 0)
        return;
    int threads = count > grain ? td_get_num_threads() : 1;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (threads == 1 || in_loop) {
        fn(arg, 0, count);
        return;
    }
    int64_t first = 0, alone = grain < INT64_MAX / ALONE ? grain * ALONE : grain;
    while (!take_pool()) {
        int64_t rest = count - first, piece = rest < alone ? rest : alone;
        fn(arg, first, first + piece);
        first += piece;
        if (first == count)
            return;
    }
    set_up_job(first, count - first, grain, threads, fn, arg);
    if (pool.thread_count < pool.job.threads - 1)
        start_helpers(pool.job.threads - 1);
    atomic_store_explicit(&pool.may_spin, threads <= pool.cores, memory_order_relaxed);
    open_loop(pool.job.threads);
    run_pieces(&pool.job, 0);
    close_loop();
    atomic_store_explicit(&pool.busy, false, memory_order_release);
}

__attribute__((destructor)) static void stop_helpers(void)
{
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.stopping, true);
    pthread_cond_broadcast(&pool.opened);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < pool.thread_count; i++)
        pthread_join(pool.threads[i], NULL);
    pool.thread_count = 0;
}
