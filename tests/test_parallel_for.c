/* The pool of threads: every index once, from any thread, and no hang. */
#include "runner.h"
#include "thread_sanitizer.h"

#include "tensor/parallel_for.h"

#include <tandem/tensor.h>

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { INDICES = 1000 };

struct visits {
    int64_t grain;
    atomic_int times[INDICES];
    atomic_int calls, unaligned;
};

static void visit(void *arg, int64_t begin, int64_t end)
{
    struct visits *visits = arg;
    atomic_fetch_add(&visits->calls, 1);
    if (begin % visits->grain || end <= begin)
        atomic_fetch_add(&visits->unaligned, 1);
    for (int64_t i = begin; i < end; i++)
        atomic_fetch_add(&visits->times[i], 1);
}

static void check_loop(int64_t count, int64_t grain)
{
    struct visits visits = {.grain = grain};
    td__parallel_for(count, grain, visit, &visits);
    CHECK_EQ(visits.unaligned, 0);
    for (int i = 0; i < INDICES; i++)
        CHECK_EQ(visits.times[i], i < count);
}

TEST(every_index_comes_once)
{
    static const int64_t counts[] = {0, 1, 2, 3, 7, 8, 9, 64, 255, INDICES};
    static const int64_t grains[] = {1, 2, 3, 8, 100, 5000};
    for (int threads = 1; threads <= 7; threads++) {
        CHECK_OK(td_set_num_threads(threads));
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (size_t g = 0; g < sizeof grains / sizeof *grains; g++)
                for (int again = 0; again < 20; again++)
                    check_loop(counts[c], grains[g]);
    }
}

TEST(one_grain_or_one_thread_is_one_call)
{
    struct visits visits = {.grain = 100};
    CHECK_OK(td_set_num_threads(4));
    td__parallel_for(100, 100, visit, &visits);
    CHECK_EQ(visits.calls, 1);
    CHECK_OK(td_set_num_threads(1));
    td__parallel_for(INDICES, 100, visit, &visits);
    CHECK_EQ(visits.calls, 2);
}

TEST(absurd_numbers_of_threads_are_allowed)
{
    CHECK_OK(td_set_num_threads(1000000));
    check_loop(INDICES, 1);
    check_loop(INDICES, 500);
}

/* ---- Threads beside and inside --------------------------------------------------------------- */

static void visit_inside(void *arg, int64_t begin, int64_t end)
{
    (void)arg;
    for (int64_t i = begin; i < end; i++)
        check_loop(100, 1);
}

TEST(loops_inside_of_loops)
{
    CHECK_OK(td_set_num_threads(3));
    td__parallel_for(50, 1, visit_inside, NULL);
}

static void *loop_often(void *arg)
{
    (void)arg;
    for (int i = 0; i < 300; i++)
        check_loop(INDICES, 10);
    return NULL;
}

TEST(several_threads_of_the_program_at_once, .deadline_s = 60)
{
    CHECK_OK(td_set_num_threads(3));
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, loop_often, NULL), 0);
    for (int i = 0; i < 20; i++)
        CHECK_OK(td_set_num_threads(1 + i % 5));
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

/* ---- Forks, signals, sleep, the end ------------------------------------------------------------ */

static void loop_in_child(void *arg)
{
    (void)arg;
    check_loop(INDICES, 1);
}

static atomic_bool stopped, has_ended;

static void *loop_until_stopped(void *arg)
{
    while (!atomic_load(&stopped))
        loop_often(arg);
    atomic_store(&has_ended, true);
    return NULL;
}

TEST(a_forked_child_has_its_own_pool, .deadline_s = 60)
{
    if (UNDER_TSAN)
        td_test_skip("ThreadSanitizer ends a fork that starts threads");
    CHECK_OK(td_set_num_threads(3));
    check_loop(INDICES, 1);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, loop_until_stopped, NULL), 0);
    pthread_detach(thread);
    for (int i = 0; i < 10; i++) {
        struct td_test_child child = td_test_fork(loop_in_child, NULL);
        CHECK_EQ(child.status, 0);
        free(child.output);
    }
    atomic_store(&stopped, true);
    while (!atomic_load(&has_ended))
        usleep(1000);
    check_loop(INDICES, 1);
}

/* Of the threads of this process named td-pool, how many there are, or how many take SIGUSR1. */
static int pool_threads(bool that_take_signals)
{
    int found = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *entry; (entry = readdir(tasks));) {
        char path[300], line[200];
        unsigned long long blocked = 0;
        bool in_pool = false;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *status = fopen(path, "r");
        while (status && fgets(line, sizeof line, status)) {
            in_pool |= !strcmp(line, "Name:\ttd-pool\n");
            sscanf(line, "SigBlk: %llx", &blocked);
        }
        if (status)
            fclose(status);
        found += in_pool && (!that_take_signals || !(blocked & 1ull << (SIGUSR1 - 1)));
    }
    closedir(tasks);
    return found;
}

TEST(threads_start_when_needed_and_take_no_signals)
{
    CHECK_OK(td_set_num_threads(3));
    check_loop(100, 100);
    CHECK_EQ(pool_threads(false), 0);
    check_loop(INDICES, 1);
    CHECK_EQ(pool_threads(false), 2);
    CHECK_EQ(pool_threads(true), 0);
}

static double cpu_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

TEST(idle_threads_sleep)
{
    CHECK_OK(td_set_num_threads(3));
    check_loop(INDICES, 1);
    double before = cpu_seconds();
    usleep(500000);
    CHECK(cpu_seconds() - before < 0.1); /* two that stay awake would take up to 1 */
}

static void visit_and_sleep(void *arg, int64_t begin, int64_t end)
{
    usleep(1000);
    visit(arg, begin, end);
}

TEST(an_owner_waits_for_slow_helpers)
{
    CHECK_OK(td_set_num_threads(2));
    for (int i = 0; i < 20; i++) {
        struct visits visits = {.grain = 1};
        td__parallel_for(9, 1, visit_and_sleep, &visits);
        for (int k = 0; k < 9; k++)
            CHECK_EQ(visits.times[k], 1);
    }
}

/* ---- A pool that becomes free ---------------------------------------------------------------------- */

static atomic_bool pool_is_held, may_let_go;
static pthread_t second_caller;
static atomic_int helped; /* calls of the second loop by other threads than its own */

static void hold_pool(void *arg, int64_t begin, int64_t end)
{
    (void)arg, (void)begin, (void)end;
    atomic_store(&pool_is_held, true);
    while (!atomic_load(&may_let_go))
        usleep(100);
}

static void *hold_loop(void *arg)
{
    td__parallel_for(2, 1, hold_pool, arg);
    return NULL;
}

static void visit_second(void *arg, int64_t begin, int64_t end)
{
    if (!pthread_equal(pthread_self(), second_caller))
        atomic_fetch_add(&helped, 1);
    if (begin > 0) /* the first piece was done alone */
        atomic_store(&may_let_go, true);
    usleep(200);
    for (int i = 0; end - begin > 10 && !atomic_load(&helped) && i < 10000; i++)
        usleep(1000); /* in the pool, whose pieces are longer: until another thread has one */
    visit(arg, begin, end);
}

/* A loop that begins while another thread's has the pool gets helpers when that is over. */
TEST(a_loop_gets_the_pool_when_it_is_free)
{
    CHECK_OK(td_set_num_threads(3));
    second_caller = pthread_self();
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, hold_loop, NULL), 0);
    while (!atomic_load(&pool_is_held))
        usleep(100);
    struct visits visits = {.grain = 1};
    td__parallel_for(INDICES, 1, visit_second, &visits);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    for (int k = 0; k < INDICES; k++)
        CHECK_EQ(visits.times[k], 1);
    CHECK(atomic_load(&helped) > 0);
}

static void *loop_for_ever(void *arg)
{
    for (;;)
        loop_often(arg);
    return NULL;
}

static void exit_meanwhile(void *arg)
{
    (void)arg;
    CHECK_OK(td_set_num_threads(3));
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, loop_for_ever, NULL), 0);
    usleep(20000);
    exit(0);
}

TEST(exit_ends_a_process_whose_threads_compute, .deadline_s = 60)
{
    for (int i = 0; i < 3; i++) {
        struct td_test_child child = td_test_fork(exit_meanwhile, NULL);
        CHECK_EQ(child.status, 0);
        free(child.output);
    }
}
