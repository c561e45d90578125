/* The test runner; runner.h says what it does.
 *
 *     the runner ── fork ──> a host for the test ── fork, exec ──> rank 0, rank 1, …
 *     makes and removes      runs its store, captures             td_test_run_rank() in checks.c
 *     its directory          the ranks' output, ends
 *                            them, and prints the outcome
 *
 * The host is a process of its own, so that a store that crashes takes one test with it and no more.
 * Nothing outlives the runner: each process is killed by the kernel when its parent dies, and what
 * hides from that (a daemon of a rank's own) becomes a child of the host, or else of the runner,
 * since both are subreapers, and neither goes on to the next test while it has a child. */
#include "runner_leftovers.h"
#include "runner_page.h"

#include "base/auth.h"
#include "base/clock.h"
#include "base/fail.h"

#include <tandem/launch.h>
#include <tandem/store.h>

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)
#define HOME_BESIDE ".home" /* after the name of a test's directory: a home with nothing in it */

enum {
    DEFAULT_DEADLINE_S = 20,
    LONGER = 30,
    AFTER_FAILURE_S = 2,  /* that the other ranks have to end after the first failure */
    LEFT_BEHIND_S = 2,    /* that the children of ended ranks have to end */
    HOST_EXTRA_S = 30,    /* beyond the test's deadline: the host itself must hang */
    OUTPUT_LIMIT = 65536, /* what is kept of a rank's output: its end */
};

static struct td_test *tests;
static sigset_t first_mask; /* before the runner blocked what it waits for */

void td_test_register(struct td_test *test)
{
    struct td_test **end = &tests;
    while (*end)
        end = &(*end)->next;
    *end = test;
    if (test->ranks < 0 || test->ranks > TD_TEST_MAX_RANKS) {
        fprintf(stderr, "test %s: between 1 and %d ranks\n", test->name, TD_TEST_MAX_RANKS);
        abort();
    }
}

/* The mask is blocked in the runner and in the hosts, and the ranks get the first one again. */
static sigset_t awaited_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    return set;
}

/* SIGCHLD must have a handler, or it would be ignored instead of ending ppoll(). */
static void on_child(int signal_number)
{
    (void)signal_number;
}

static double deadline_of(const struct td_test *test)
{
    double seconds = test->deadline_s > 0 ? test->deadline_s : DEFAULT_DEADLINE_S;
    return seconds * td_test_slowness() * (td_test_is_long() ? LONGER : 1);
}

static int ranks_of(const struct td_test *test)
{
    return test->ranks ? test->ranks : 1;
}

/* ---- The host of one test -------------------------------------------------------------------- */

struct rank {
    pid_t pid;
    int output_fd;
    char *output;
    size_t output_size;
    bool cut;       /* the beginning of its output was dropped */
    int64_t end_ns; /* 0 while it runs */
    int status;     /* of waitpid() */
    enum { BY_ITSELF, AT_DEADLINE, AFTER_ANOTHER } end;
};

struct job {
    const struct td_test *test;
    int rank_count;
    int64_t start_ns;
    struct td_test_page *page;
    int page_fd;
    td_store *store;
    struct rank ranks[TD_TEST_MAX_RANKS];
    char left_behind[512];
    char error[2048]; /* what went wrong outside the ranks */
};

/* A test depends on nothing that a launcher or a person has set outside. */
static void clean_environment(void)
{
    static const char *const prefixes[] = {"TANDEM_", "TORCHELASTIC_", "SLURM_",     "OMPI_",
                                           "PMI",     "MASTER_",       "LOCAL_",     "GROUP_",
                                           "ROLE_",   "RANK=",         "WORLD_SIZE="};
    for (char **variable = environ; *variable;) {
        bool drop = false;
        for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
            drop |= !strncmp(*variable, prefixes[i], strlen(prefixes[i]));
        if (!drop) {
            variable++;
            continue;
        }
        char name[256];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*variable, "="), *variable);
        unsetenv(name); /* moves the following ones up */
    }
    const char *set = getenv("TD_TEST_SET");
    char *words = strdup(set ? set : ""), *rest = words;
    for (char *word; words && (word = strsep(&rest, " "));)
        if (*word)
            putenv(strdup(word));
    free(words);
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* Hosts a fresh store, and puts where it is into the environment of the ranks. */
static bool open_store(struct job *job)
{
    char secret[65], where[64];
    if (td__secret_make(secret))
        return false;
    td_tcp_store_options options = {.host_server = true, .secret = secret};
    if (td_tcp_store_open("127.0.0.1", 0, &options, &job->store))
        return false;
    int port = td_tcp_store_port(job->store);
    snprintf(where, sizeof where, "127.0.0.1:%d", port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", port);
    setenv("TANDEM_AGENT_STORE", where, 1);
    setenv("TANDEM_SECRET", secret, 1);
    set_number("WORLD_SIZE", job->rank_count);
    set_number("LOCAL_WORLD_SIZE", job->rank_count);
    return true;
}

static bool make_page(struct job *job)
{
    job->page_fd = memfd_create("test page", 0);
    if (job->page_fd < 0 || ftruncate(job->page_fd, sizeof *job->page))
        return false;
    job->page = mmap(NULL, sizeof *job->page, PROT_READ | PROT_WRITE, MAP_SHARED, job->page_fd, 0);
    set_number(TD_TEST_PAGE_VARIABLE, job->page_fd);
    return job->page != MAP_FAILED;
}

/* In the child, between fork and exec: the host may have threads, so only system calls. */
static void become_rank(pid_t host, int output, char *const *argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != host)
        _exit(TD_TEST_EXIT_FAILED);
    setpgid(0, 0);
    int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    close(nothing);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &first_mask, NULL);
    execv(td_test_program(), argv);
    _exit(TD_TEST_EXIT_FAILED);
}

static bool start_rank(struct job *job, int index)
{
    struct rank *rank = &job->ranks[index];
    int fds[2];
    if (pipe2(fds, O_CLOEXEC))
        return false;
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    if (job->test->ranks) {
        set_number("RANK", index);
        set_number("LOCAL_RANK", index);
    }
    char *const argv[] = {program_invocation_name, "--rank", (char *)job->test->name, NULL};
    pid_t host = getpid();
    fflush(stdout);
    rank->pid = fork();
    if (rank->pid == 0)
        become_rank(host, fds[1], argv);
    close(fds[1]);
    rank->output_fd = fds[0];
    if (rank->pid < 0)
        return false;
    setpgid(rank->pid,
            rank->pid); /* in both processes: whichever is first, kill() finds the group */
    atomic_store(&job->page->ranks[index].pid, rank->pid);
    return true;
}

static void read_output(struct rank *rank)
{
    for (;;) {
        if (rank->output_size > OUTPUT_LIMIT) {
            size_t excess = rank->output_size - OUTPUT_LIMIT / 2;
            memmove(rank->output, rank->output + excess, OUTPUT_LIMIT / 2);
            rank->output_size = OUTPUT_LIMIT / 2;
            rank->cut = true;
        }
        if (!rank->output)
            rank->output = malloc(OUTPUT_LIMIT + 4096);
        ssize_t got = read(rank->output_fd, rank->output + rank->output_size, 4096);
        if (got > 0) {
            rank->output_size += (size_t)got;
        } else if (got < 0 && errno == EINTR) {
            continue;
        } else {
            if (got == 0) { /* closed by all processes: no more poll() */
                close(rank->output_fd);
                rank->output_fd = -1;
            }
            return;
        }
    }
}

static bool said_something(const struct job *job, int index)
{
    return job->page->ranks[index].message[0] != '\0';
}

static int exit_code(const struct rank *rank)
{
    return WIFEXITED(rank->status) ? WEXITSTATUS(rank->status) : -1;
}

static bool has_skipped(const struct job *job, int index)
{
    return job->ranks[index].end == BY_ITSELF &&
           exit_code(&job->ranks[index]) == TD_TEST_EXIT_SKIPPED;
}

static bool has_failed(const struct job *job, int index)
{
    const struct rank *rank = &job->ranks[index];
    if (!rank->end_ns || rank->end == AFTER_ANOTHER || has_skipped(job, index))
        return false;
    if (rank->end == AT_DEADLINE || said_something(job, index))
        return true;
    return rank->status != 0 && !(job->test->may_die >> index & 1);
}

/* Takes note of the ranks that have ended, and returns how many still run. An ended rank stays a zombie until all
 * have ended: before Linux 6.15, and under QEMU, the others can find out how it ended only until then. */
static int note_ended(struct job *job)
{
    int running = 0;
    for (int i = 0; i < job->rank_count; i++) {
        struct rank *rank = &job->ranks[i];
        siginfo_t info = {.si_pid = 0};
        if (!rank->end_ns && !waitid(P_PID, (id_t)rank->pid, &info, WEXITED | WNOHANG | WNOWAIT) &&
            info.si_pid == rank->pid) {
            rank->status = info.si_code == CLD_EXITED ? W_EXITCODE(info.si_status, 0)
                                                      : W_EXITCODE(0, info.si_status);
            rank->end_ns = td__now_ns();
            atomic_store(&job->page->ranks[i].pid, -1);
            read_output(rank);
        }
        running += !rank->end_ns;
    }
    return running;
}

/* Orphans that the host has adopted. */
static void reap_orphan(void *arg, int pid, char state, const char *comm)
{
    const struct job *job = arg;
    (void)comm;
    for (int i = 0; i < job->rank_count; i++)
        if (job->ranks[i].pid == pid)
            return;
    if (state == 'Z')
        waitpid(pid, NULL, WNOHANG);
}

static void kill_running(struct job *job, int how)
{
    for (int i = 0; i < job->rank_count; i++) {
        struct rank *rank = &job->ranks[i];
        if (rank->end_ns || rank->end != BY_ITSELF)
            continue;
        rank->end = how;
        kill(-rank->pid, SIGKILL);
        kill(rank->pid, SIGKILL);
    }
}

static bool any_failed(const struct job *job)
{
    for (int i = 0; i < job->rank_count; i++)
        if (has_failed(job, i))
            return true;
    return false;
}

/* Follows the ranks until all have ended. SIGCHLD is blocked except inside ppoll(), which it ends. */
static void watch(struct job *job)
{
    td__deadline limit = job->start_ns + (int64_t)(deadline_of(job->test) * 1e9);
    int how = AT_DEADLINE;
    sigset_t blocked = awaited_signals();
    sigdelset(&blocked, SIGCHLD);
    while (note_ended(job)) {
        if (how == AT_DEADLINE && any_failed(job)) {
            how = AFTER_ANOTHER;
            limit = td__now_ns() + AFTER_FAILURE_S * td_test_slowness() * SECOND;
        }
        if (td__deadline_passed(limit)) {
            kill_running(job, how);
            limit = TD__NEVER;
        }
        struct pollfd fds[TD_TEST_MAX_RANKS];
        for (int i = 0; i < job->rank_count; i++)
            fds[i] = (struct pollfd){.fd = job->ranks[i].output_fd, .events = POLLIN};
        int64_t left = limit == TD__NEVER ? SECOND : limit - td__now_ns();
        struct timespec pause = td__timespec(left > 0 ? left : 0);
        int ready = ppoll(fds, (nfds_t)job->rank_count, &pause, &blocked);
        for (int i = 0; i < job->rank_count && ready > 0; i++)
            if (fds[i].revents)
                read_output(&job->ranks[i]);
        if (ready < 0)
            td_test_each_child(reap_orphan, job);
    }
}

/* ---- The report ------------------------------------------------------------------------------ */

static void print_output(const struct rank *rank)
{
    if (rank->cut)
        printf("     | … (only the end of its output was kept)\n");
    for (size_t at = 0; at < rank->output_size;) {
        const char *line = rank->output + at;
        const char *end = memchr(line, '\n', rank->output_size - at);
        size_t length = end ? (size_t)(end - line) : rank->output_size - at;
        printf("     | %.*s\n", (int)length, line);
        at += length + 1;
    }
}

static void print_rank(const struct job *job, int index)
{
    const struct rank *rank = &job->ranks[index];
    double seconds = (double)(rank->end_ns - job->start_ns) / 1e9;
    printf("     ");
    if (job->test->ranks)
        printf("rank %d of %d: ", index, job->rank_count);
    if (rank->end == AT_DEADLINE)
        printf("still running at its deadline, killed after %.2f s\n", seconds);
    else if (rank->end == AFTER_ANOTHER)
        printf("still running %d s after another one had failed, killed after %.2f s\n",
               AFTER_FAILURE_S * td_test_slowness(), seconds);
    else if (WIFSIGNALED(rank->status))
        printf("ended by %s after %.2f s\n", td__signal_name(WTERMSIG(rank->status)), seconds);
    else
        printf("exit code %d after %.2f s\n", exit_code(rank), seconds);
    if (said_something(job, index))
        printf("       %s\n", job->page->ranks[index].message);
    print_output(rank);
}

/* The rank to report next: those that failed first, in the order in which they ended, then those that were killed
 * for it; -1 when all have been. */
static int next_to_report(const struct job *job, const bool *done)
{
    int next = -1;
    for (int i = 0; i < job->rank_count; i++) {
        bool failed = has_failed(job, i);
        if (done[i] || (!failed && job->ranks[i].end != AFTER_ANOTHER))
            continue;
        bool next_failed = next >= 0 && has_failed(job, next);
        if (next < 0 || failed > next_failed ||
            (failed == next_failed && job->ranks[i].end_ns < job->ranks[next].end_ns))
            next = i;
    }
    return next;
}

static void print_report(const struct job *job)
{
    bool done[TD_TEST_MAX_RANKS] = {false};
    for (int i; (i = next_to_report(job, done)) >= 0; done[i] = true)
        print_rank(job, i);
    if (job->error[0])
        printf("     %s\n", job->error);
    if (job->left_behind[0])
        printf("     left behind, and killed: %s\n", job->left_behind);
}

static int report(const struct job *job)
{
    double seconds = (double)(td__now_ns() - job->start_ns) / 1e9;
    if (any_failed(job) || job->error[0] || job->left_behind[0]) {
        printf("FAIL %s (%.2f s)\n", job->test->name, seconds);
        print_report(job);
        return TD_TEST_EXIT_FAILED;
    }
    for (int i = 0; i < job->rank_count; i++) {
        if (has_skipped(job, i)) {
            printf("skip %s: %s\n", job->test->name, job->page->ranks[i].message);
            return TD_TEST_EXIT_SKIPPED;
        }
    }
    printf("ok   %s (%.2f s)\n", job->test->name, seconds);
    return 0;
}

static int host(const struct td_test *test, const char *directory)
{
    static struct job job;
    job.test = test;
    job.rank_count = ranks_of(test);
    job.start_ns = td__now_ns();
    clean_environment();
    setenv(TD_TEST_DIRECTORY_VARIABLE, directory, 1);
    char home[300];
    snprintf(home, sizeof home, "%s" HOME_BESIDE, directory);
    setenv("HOME", home, 1);
    unsetenv("XDG_CONFIG_HOME");
    if (!make_page(&job)) {
        printf("FAIL %s: no page to share with its ranks: %s\n", test->name, strerror(errno));
        return TD_TEST_EXIT_FAILED;
    }
    if (test->ranks && !open_store(&job)) {
        printf("FAIL %s: no store for its ranks: %s\n", test->name, td_last_error());
        return TD_TEST_EXIT_FAILED;
    }
    int started = 0;
    while (started < job.rank_count && start_rank(&job, started))
        started++;
    if (started < job.rank_count) {
        snprintf(job.error, sizeof job.error, "rank %d could not be started: %s", started,
                 strerror(errno));
        job.rank_count = started;
        kill_running(&job, AFTER_ANOTHER);
    }
    watch(&job);
    td_test_end_children(LEFT_BEHIND_S, job.left_behind, sizeof job.left_behind);
    if (job.store && td_store_close(job.store))
        snprintf(job.error, sizeof job.error, "closing the store: %s", td_last_error());
    return report(&job);
}

/* ---- The runner ------------------------------------------------------------------------------ */

/* Ends the runner as `signal` would have, with nothing left. */
static _Noreturn void give_up(int signal_number, const char *directory)
{
    td_test_kill_children(NULL, 0);
    td_test_end_children(0, NULL, 0);
    char home[300];
    snprintf(home, sizeof home, "%s" HOME_BESIDE, directory);
    td_test_remove_tree(directory);
    td_test_remove_tree(home);
    fflush(stdout);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    sigprocmask(SIG_SETMASK, &first_mask, NULL);
    _exit(128 + signal_number);
}

/* Waits for the host. False when it hangs, and was killed. */
static bool wait_for_host(pid_t pid, const struct td_test *test, const char *directory, int *status)
{
    sigset_t set = awaited_signals();
    td__deadline limit = td__deadline_in_ms(
        (int64_t)(deadline_of(test) + HOST_EXTRA_S * td_test_slowness()) * 1000);
    while (waitpid(pid, status, WNOHANG) != pid) {
        int64_t left = limit - td__now_ns();
        if (left <= 0) {
            kill(pid, SIGKILL);
            waitpid(pid, status, 0);
            return false;
        }
        struct timespec pause = td__timespec(left);
        int got = sigtimedwait(&set, NULL, &pause);
        if (got > 0 && got != SIGCHLD)
            give_up(got, directory);
    }
    return true;
}

static int run_test(const struct td_test *test)
{
    const char *parent = getenv("TMPDIR");
    char directory[256];
    snprintf(directory, sizeof directory, "%s/tandem-test-XXXXXX",
             parent && *parent ? parent : "/tmp");
    if (!mkdtemp(directory)) {
        printf("FAIL %s: no directory %s: %s\n", test->name, directory, strerror(errno));
        return TD_TEST_EXIT_FAILED;
    }
    char home[300];
    snprintf(home, sizeof home, "%s" HOME_BESIDE, directory);
    mkdir(home, 0700);
    pid_t runner = getpid();
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        if (getppid() != runner)
            _exit(TD_TEST_EXIT_FAILED);
        exit(host(test, directory));
    }
    int status = 0;
    bool ended = pid > 0 && wait_for_host(pid, test, directory, &status);
    int code = ended && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    char left_behind[512] = "";
    td_test_end_children(0, left_behind, sizeof left_behind);
    td_test_remove_tree(directory);
    td_test_remove_tree(home);

    /* What the host has not said itself. */
    if (pid < 0)
        printf("FAIL %s: fork: %s\n", test->name, strerror(errno));
    else if (!ended)
        printf("FAIL %s: the process that hosts it hangs\n", test->name);
    else if (code < 0)
        printf("FAIL %s: the process that hosts it was ended by %s\n", test->name,
               td__signal_name(WTERMSIG(status)));
    else if (code != 0 && code != TD_TEST_EXIT_FAILED && code != TD_TEST_EXIT_SKIPPED)
        printf("FAIL %s: the process that hosts it has exit code %d\n", test->name, code);
    else
        return code;
    return TD_TEST_EXIT_FAILED;
}

static const struct td_test *find_test(const char *name)
{
    for (const struct td_test *test = tests; test; test = test->next)
        if (!strcmp(test->name, name))
            return test;
    return NULL;
}

static bool is_chosen(const struct td_test *test, char **patterns, int count)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(patterns[i], test->name) ||
            (!test->hidden && fnmatch(patterns[i], test->name, 0) == 0))
            return true;
    return count == 0 && !test->hidden;
}

/* Whether TD_TEST_SKIP names it. */
static bool is_left_out(const struct td_test *test)
{
    const char *list = getenv("TD_TEST_SKIP");
    size_t length = strlen(test->name);
    for (const char *at = list; at && (at = strstr(at, test->name)); at += length)
        if ((at == list || at[-1] == ' ') && (!at[length] || at[length] == ' '))
            return true;
    return false;
}

static int run_chosen(char **patterns, int count)
{
    int run = 0, failed = 0, skipped = 0;
    for (const struct td_test *test = tests; test; test = test->next) {
        if (!is_chosen(test, patterns, count))
            continue;
        int code = TD_TEST_EXIT_SKIPPED;
        if (is_left_out(test))
            printf("skip %s: TD_TEST_SKIP names it\n", test->name);
        else
            code = run_test(test);
        run++;
        failed += code == TD_TEST_EXIT_FAILED;
        skipped += code == TD_TEST_EXIT_SKIPPED;
    }
    if (!run) {
        fprintf(stderr, "no test has that name; --list lists them\n");
        return 2;
    }
    printf("%d tests, %d failed", run, failed);
    if (skipped)
        printf(", %d skipped", skipped);
    printf("\n");
    return failed ? 1 : 0;
}

int main(int argc, char **argv)
{
    td_spawn_main();
    if (argc == 3 && !strcmp(argv[1], "--rank") && getenv(TD_TEST_PAGE_VARIABLE)) {
        const struct td_test *test = find_test(argv[2]);
        return test ? td_test_run_rank(test) : TD_TEST_EXIT_FAILED;
    }
    if (argc == 2 && !strcmp(argv[1], "--list")) {
        for (const struct td_test *test = tests; test; test = test->next)
            if (!test->hidden)
                printf("%s\n", test->name);
        return 0;
    }
    unsetenv(TD_TEST_LONG_VARIABLE);
    if (argc > 1 && !strcmp(argv[1], "--long")) {
        setenv(TD_TEST_LONG_VARIABLE, "1", 1);
        argc--;
        argv++;
    }
    if (argc > 2 && !strcmp(argv[1], "--device")) {
        setenv(TD_TEST_DEVICE_VARIABLE, argv[2], 1);
        argc -= 2;
        argv += 2;
    } else {
        unsetenv(TD_TEST_DEVICE_VARIABLE);
    }
    if (argc > 1 && argv[1][0] == '-') {
        fprintf(stderr, "usage: %s [--list | [--long] [--device NAME] NAME-OR-PATTERN…]\n",
                program_invocation_name);
        return 2;
    }
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, on_child);
    sigset_t set = awaited_signals();
    sigprocmask(SIG_BLOCK, &set, &first_mask);
    return run_chosen(argv + 1, argc - 1);
}
