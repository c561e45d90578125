/* Fault injection, round after round; chaos.h has the overview.
 *
 *     chaos                            a short run, for CTest
 *     chaos --long                     1,000 rounds of each kind
 *     chaos --rounds 200 --seed 7      as many as one likes
 *     chaos --only rpc                 only rounds over remote calls; or: over collectives
 *     chaos --seed 7 --only rpc --round 12
 *                                      one round again
 *
 * A failed round is one paragraph with the command that repeats it. */
#include "chaos.h"

#include "base/fail.h"

#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { SHORT_ROUNDS = 60, SHORT_RPC_ROUNDS = 14, LONG_ROUNDS = 1000, MOST_TIMES = 200000 };

struct summary {
    int rounds, failed, skipped, injected;
    int by_fault[FAULTS], by_way[WAYS];
    long operations;
    int counts[FAULTS];
    int64_t *times[FAULTS]; /* of noticing, by fault */
    int64_t slowest_ns[FAULTS];
    int slowest[FAULTS]; /* its round */
    int64_t slowest_kill_ns[WAYS];
    int64_t leaving_ns[FAULTS];
};

static int compare_times(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static void add_times(struct summary *summary, const struct plan *plan,
                      const struct outcome *outcome)
{
    enum fault fault = plan->fault;
    if (!summary->times[fault])
        summary->times[fault] = calloc(MOST_TIMES, sizeof(int64_t));
    for (int i = 0; i < outcome->detections && summary->times[fault]; i++) {
        int64_t took = outcome->detection_ns[i];
        if (summary->counts[fault] < MOST_TIMES)
            summary->times[fault][summary->counts[fault]++] = took;
        if (took > summary->slowest_ns[fault]) {
            summary->slowest_ns[fault] = took;
            summary->slowest[fault] = plan->round;
        }
        if (fault == FAULT_KILL && took > summary->slowest_kill_ns[plan->way])
            summary->slowest_kill_ns[plan->way] = took;
    }
}

static void print_summary(const struct summary *summary, double seconds)
{
    printf("%d rounds in %.0f s, %d failed, %d skipped, %d victims, %ld results checked\n",
           summary->rounds, seconds, summary->failed, summary->skipped, summary->injected,
           summary->operations);
    for (int fault = 0; fault < FAULTS; fault++) {
        int count = summary->counts[fault];
        int64_t *times = summary->times[fault];
        if (!summary->by_fault[fault])
            continue;
        printf("  %-20s %4d rounds, left within %.1f s", fault_name((enum fault)fault),
               summary->by_fault[fault], (double)summary->leaving_ns[fault] / 1e9);
        if (count) {
            qsort(times, (size_t)count, sizeof *times, compare_times);
            printf(", noticed %d times: median %.0f ms, 99%% %.0f ms, slowest %.0f ms (round %d)",
                   count, (double)times[count / 2] / 1e6, (double)times[count * 99 / 100] / 1e6,
                   (double)summary->slowest_ns[fault] / 1e6, summary->slowest[fault]);
        }
        printf("\n");
    }
    for (int way = 0; way < WAYS; way++)
        if (summary->by_way[way])
            printf("  over %-15s %4d rounds, kills noticed within %.0f ms\n",
                   way_name((enum chaos_way)way), summary->by_way[way],
                   (double)summary->slowest_kill_ns[way] / 1e6);
}

static void show_progress(const struct summary *summary, int done, int rounds)
{
    char bar[41];
    int filled = rounds ? done * 40 / rounds : 0;
    if (!isatty(STDERR_FILENO))
        return;
    memset(bar, ' ', 40);
    memset(bar, '#', (size_t)filled);
    bar[40] = 0;
    fprintf(stderr, "\r[%s] %d of %d rounds, %d failed ", bar, done, rounds, summary->failed);
    if (done == rounds)
        fprintf(stderr, "\n");
}

enum only { ONLY_COLLECTIVES, ONLY_RPC, KINDS_OF_ROUNDS };

struct choices {
    uint64_t seed;
    int rounds, round, rank; /* -1 where not given */
    int only;                /* a kind of rounds; -1: all kinds */
    int way, fault;          /* only rounds of that kind; -1: of all kinds */
    bool stacks, spaces, again, verbose;
};

static const char *const kinds_of_rounds[] = {"collectives", "rpc", NULL};

/* False where the round is not one that was asked for. */
static bool run_round(const struct choices *choices, enum only kind, int round,
                      struct summary *summary, const char *no_spaces)
{
    static struct plan plan;
    static struct outcome outcome;
    char text[400];
    plan_make(choices->seed, round, network_is_own(), kind == ONLY_RPC, &plan);
    if ((choices->way >= 0 && (int)plan.way != choices->way) ||
        (choices->fault >= 0 && (int)plan.fault != choices->fault))
        return false;
    plan_describe(&plan, text, sizeof text);
    summary->rounds++;
    if (plan.way == WAY_SPACES && no_spaces) {
        summary->skipped++;
        printf("round %d is skipped, %s: %s\n", round, no_spaces, text);
        return true;
    }
    host_run(&plan, choices->stacks, &outcome);
    summary->by_fault[plan.fault]++;
    summary->by_way[plan.way]++;
    summary->injected += outcome.injected;
    summary->operations += outcome.operations;
    if (outcome.leaving_ns > summary->leaving_ns[plan.fault])
        summary->leaving_ns[plan.fault] = outcome.leaving_ns;
    add_times(summary, &plan, &outcome);
    if (choices->verbose)
        printf("round %d, %.2f s: %s\n", round, outcome.seconds, text);
    if (!outcome.failed || host_ended_by)
        return true;
    summary->failed++;
    printf("FAIL round %d: %s\n%srepeat it: chaos --seed %llu --only %s --round %d\n", round, text,
           outcome.text, (unsigned long long)choices->seed, kinds_of_rounds[kind], round);
    fflush(stdout);
    return true;
}

static void on_end(int signal_number)
{
    host_ended_by = signal_number;
}

/* Says where this process itself has crashed, for addr2line(1); then it ends as it would have. A sanitizer says
 * more than that. */
static void on_crash(int signal_number)
{
    static const char text[] = "chaos: the process that watches the ranks has crashed, at:\n";
    void *frames[64];
    ssize_t ignored = write(STDERR_FILENO, text, sizeof text - 1);
    (void)ignored;
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
    raise(signal_number);
}

static void report_crashes(void)
{
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    struct sigaction action = {.sa_handler = on_crash, .sa_flags = (int)SA_RESETHAND};
    void *frame;
    backtrace(&frame, 1); /* loads what it needs */
    for (size_t i = 0; i < sizeof signals / sizeof *signals && slowness() == 1; i++)
        sigaction(signals[i], &action, NULL);
}

/* Returns how many have failed. */
static int run_kind(const struct choices *choices, enum only kind, const char *no_spaces)
{
    static const int usual[] = {[ONLY_COLLECTIVES] = SHORT_ROUNDS, [ONLY_RPC] = SHORT_RPC_ROUNDS};
    struct summary summary = {0};
    int64_t start = td__now_ns();
    int round = choices->round >= 0 ? choices->round : 0;
    int rounds = choices->rounds >= 0 ? choices->rounds : usual[kind];
    rounds = choices->round >= 0 ? 1 : rounds;
    for (; summary.rounds < rounds && !host_ended_by; round++) {
        show_progress(&summary, summary.rounds, rounds);
        if (!run_round(choices, kind, round, &summary, no_spaces) && choices->round >= 0)
            break;
    }
    show_progress(&summary, summary.rounds, rounds);
    printf("%s: ", kinds_of_rounds[kind]);
    print_summary(&summary, (double)(td__now_ns() - start) / 1e9);
    for (int fault = 0; fault < FAULTS; fault++)
        free(summary.times[fault]);
    return summary.failed;
}

static int run_rounds(const struct choices *choices)
{
    const char *no_spaces = NULL;
    int failed = 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, on_end);
    signal(SIGTERM, on_end);
    report_crashes();
    setvbuf(stdout, NULL, _IOLBF, 0);
    network_begin(&no_spaces);
    for (int kind = 0; kind < KINDS_OF_ROUNDS && !host_ended_by; kind++)
        if (choices->only < 0 || choices->only == kind)
            failed += run_kind(choices, (enum only)kind, no_spaces);
    if (host_ended_by)
        return 128 + host_ended_by;
    return failed ? 1 : 0;
}

static int run_rank(const struct choices *choices)
{
    const char *fd = getenv("CHAOS_PAGE");
    struct plan plan;
    struct page *page = fd ? mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd),
                                  0)
                           : MAP_FAILED;
    if (page == MAP_FAILED) {
        fprintf(stderr, "chaos: --rank is for ranks that chaos starts itself\n");
        return 2;
    }
    close(atoi(fd));
    plan_make(choices->seed, choices->round, choices->spaces, choices->only == ONLY_RPC, &plan);
    return rank_main(&plan, choices->rank, page, choices->again);
}

static int usage(void)
{
    fprintf(stderr, "usage: chaos [--long | --rounds N] [--seed N] [--verbose] [--stacks]\n"
                    "             [--only collectives|rpc [--round N]]\n"
                    "             [--way shm|tcp|hosts|backend|networks]\n"
                    "             [--fault kill|early|late|pause|stop|leave|cut|abort]\n");
    return 2;
}

/* The place of a word in a list that ends with NULL; -1 where it is not there. */
static int find_word(const char *word, const char *const *list)
{
    for (int i = 0; list[i]; i++)
        if (!strcmp(list[i], word))
            return i;
    return -1;
}

int main(int argc, char **argv)
{
    static const char *const ways[] = {"shm", "tcp", "hosts", "backend", "networks", NULL};
    static const char *const faults[] = {"kill",  "early", "late",  "pause", "stop",
                                         "leave", "cut",   "abort", NULL};
    struct choices choices = {
        .seed = 1, .rounds = -1, .round = -1, .rank = -1, .only = -1, .way = -1, .fault = -1};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--long"))
            choices.rounds = LONG_ROUNDS;
        else if (!strcmp(argv[i], "--stacks"))
            choices.stacks = true;
        else if (!strcmp(argv[i], "--verbose"))
            choices.verbose = true;
        else if (!strcmp(argv[i], "--spaces") || !strcmp(argv[i], "--no-spaces"))
            choices.spaces = argv[i][2] == 's';
        else if (!strcmp(argv[i], "--again"))
            choices.again = true;
        else if (!value)
            return usage();
        else if (!strcmp(argv[i], "--seed"))
            choices.seed = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--rounds"))
            choices.rounds = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--round"))
            choices.round = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--rank"))
            choices.rank = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--only") &&
                 (choices.only = find_word(value, kinds_of_rounds)) >= 0)
            i++;
        else if (!strcmp(argv[i], "--way") && (choices.way = find_word(value, ways)) >= 0)
            i++;
        else if (!strcmp(argv[i], "--fault") && (choices.fault = find_word(value, faults)) >= 0)
            i++;
        else
            return usage();
    }
    if (choices.round >= 0 && choices.only < 0)
        return usage();
    return choices.rank >= 0 ? run_rank(&choices) : run_rounds(&choices);
}
