/* The host of a round: starts its ranks, strikes the victim, and judges what came of it.
 *
 * It sleeps until something changes at the page that it shares with the ranks, and looks at the clock and
 * at its children in between. Nothing outlives it: ranks are killed by the kernel when it dies. */
#include "chaos.h"

#include "base/auth.h"
#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <netinet/in.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

enum { DEADLINE_S = 50, AFTER_DEATH_S = 15, LOOK_NS = 20000000, LEFT_S = 3, TAIL = 1500 };

struct child {
    pid_t pid;
    int output; /* a memfd */
    bool ended;
    int status;
    int64_t end_ns;
};

struct host {
    const struct plan *plan;
    struct outcome *outcome;
    struct page *page;
    int page_fd;
    td_store *store;
    char directory[64];
    int spaces[MAX_RANKS + 1]; /* descriptors of namespaces */
    int space_count;
    struct child ranks[MAX_RANKS];
    bool struck, killed;
    struct child first; /* the victim, where it was started again */
    bool again;
    int64_t resume_ns; /* when a paused victim goes on; 0: not paused */
    int64_t start_ns;
};

int slowness(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 5;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    return 5;
#else
    return 1;
#endif
#else
    return 1;
#endif
}

static void report(struct host *host, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void report(struct host *host, const char *format, ...)
{
    char *text = host->outcome->text;
    size_t used = strlen(text), room = sizeof host->outcome->text - used;
    va_list args;
    host->outcome->failed = true;
    va_start(args, format);
    int more = vsnprintf(text + used, room, format, args);
    va_end(args);
    if (more > 0 && (size_t)more + 1 < room)
        strcat(text, "\n");
}

/* ---- Setting up ------------------------------------------------------------------------------ */

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* A port that is free now. */
static int free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(fd, (struct sockaddr *)&address, size) ||
        getsockname(fd, (struct sockaddr *)&address, &size))
        address.sin_port = 0;
    close(fd);
    return ntohs(address.sin_port);
}

static bool open_store(struct host *host)
{
    const struct plan *plan = host->plan;
    char secret[65], where[64];
    const char *address = plan->way == WAY_SPACES ? NETWORK_HOST : "127.0.0.1";
    if (td__secret_make(secret))
        return false;
    setenv("TANDEM_SECRET", secret, 1);
    setenv("MASTER_ADDR", address, 1);
    unsetenv("TANDEM_AGENT_STORE");
    if (plan->store != STORE_HOST) {
        set_number("MASTER_PORT", free_port());
        return true;
    }
    td_tcp_store_options options = {.host_server = true, .secret = secret};
    if (td_tcp_store_open(address, 0, &options, &host->store))
        return false;
    int port = td_tcp_store_port(host->store);
    snprintf(where, sizeof where, "%s:%d", address, port);
    set_number("MASTER_PORT", port);
    setenv("TANDEM_AGENT_STORE", where, 1);
    return true;
}

static void set_environment(const struct host *host)
{
    const struct plan *plan = host->plan;
    set_number("WORLD_SIZE", plan->size);
    set_number("LOCAL_WORLD_SIZE", plan->size);
    set_number("CHAOS_PAGE", host->page_fd);
    setenv("CHAOS_DIRECTORY", host->directory, 1);
    set_number("TANDEM_HEARTBEAT", 2);
    if (plan->way == WAY_TCP)
        setenv("TANDEM_TRANSPORT", "tcp", 1);
    else
        unsetenv("TANDEM_TRANSPORT");
    unsetenv("TANDEM_HOST_ID");
}

static bool make_page(struct host *host)
{
    host->page_fd = memfd_create("chaos page", 0);
    if (host->page_fd < 0 || ftruncate(host->page_fd, sizeof *host->page))
        return false;
    host->page = mmap(NULL, sizeof *host->page, PROT_READ | PROT_WRITE, MAP_SHARED, host->page_fd, 0);
    if (host->page == MAP_FAILED)
        return false;
    for (int r = 0; r < MAX_RANKS; r++)
        for (int lane = 0; lane < LANES; lane++)
            atomic_store(&host->page->ranks[r].at[lane], -1);
    return true;
}

static bool make_spaces(struct host *host)
{
    if (host->plan->way != WAY_SPACES)
        return true;
    for (int r = 0; r < host->plan->size; r++)
        if (host->plan->hosts[r] >= host->space_count)
            host->space_count = host->plan->hosts[r] + 1;
    for (int i = 0; i < host->space_count; i++)
        host->spaces[i] = -1;
    for (int i = 0; i < host->space_count; i++)
        if ((host->spaces[i] = network_add(i)) < 0)
            return false;
    return true;
}

/* Between fork and exec: this process may have threads, so only system calls. */
static void become_rank(pid_t parent, int output, int space, char *const *argv)
{
    struct rlimit no_core = {0};
    sigset_t none;
    sigemptyset(&none);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || (space >= 0 && setns(space, CLONE_NEWNET)))
        _exit(99);
    int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    close(nothing);
    setrlimit(RLIMIT_CORE, &no_core);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execv("/proc/self/exe", argv);
    _exit(98);
}

static bool start_rank(struct host *host, int index, bool again)
{
    const struct plan *plan = host->plan;
    char seed[32], round[16], rank[16], id[16];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)plan->seed);
    snprintf(round, sizeof round, "%d", plan->round);
    snprintf(rank, sizeof rank, "%d", index);
    char *const argv[] = {"chaos", "--seed", seed, "--round", round, "--rank", rank,
                          network_is_own() ? "--spaces" : "--no-spaces", again ? "--again" : NULL,
                          NULL};
    struct child *child = &host->ranks[index];
    set_number("RANK", index);
    set_number("LOCAL_RANK", index);
    if (plan->way == WAY_HOSTS) {
        snprintf(id, sizeof id, "host %d", plan->hosts[index]);
        setenv("TANDEM_HOST_ID", id, 1);
    }
    int space = plan->way == WAY_SPACES ? host->spaces[plan->hosts[index]] : -1;
    pid_t parent = getpid();
    child->output = memfd_create("chaos output", MFD_CLOEXEC);
    child->pid = child->output < 0 ? -1 : fork();
    if (child->pid == 0)
        become_rank(parent, child->output, space, argv);
    return child->pid > 0;
}

/* ---- Striking -------------------------------------------------------------------------------- */

static bool survivors_reached(const struct host *host, enum state state)
{
    for (int r = 0; r < host->plan->size; r++)
        if (r != host->plan->victim && atomic_load(&host->page->ranks[r].state) < (int)state)
            return false;
    return true;
}

static void strike(struct host *host)
{
    static const int signals[] = {[END_KILL] = SIGKILL, [END_SEGV] = SIGSEGV, [END_ABORT] = SIGABRT};
    const struct plan *plan = host->plan;
    pid_t pid = host->ranks[plan->victim].pid;
    host->struck = true;
    if (plan->delay_ns)
        td__sleep_ns(plan->delay_ns);
    atomic_store(&host->page->fault_ns, td__now_ns());
    switch (plan->fault) {
    case FAULT_PAUSE:
        kill(pid, SIGSTOP);
        host->resume_ns = td__now_ns() + plan->pause_ns;
        break;
    case FAULT_STOP:
        kill(pid, SIGSTOP);
        break;
    case FAULT_CUT:
        if (!network_cut(plan->hosts[plan->victim]))
            report(host, "the network could not be cut");
        break;
    default:
        kill(pid, signals[plan->end]);
        break;
    }
    atomic_store(&host->page->struck, true);
    page_ring(host->page);
}

static void start_again(struct host *host)
{
    struct child *victim = &host->ranks[host->plan->victim];
    host->first = *victim;
    host->again = true;
    *victim = (struct child){0};
    if (!start_rank(host, host->plan->victim, true))
        report(host, "the victim could not be started again: %s", strerror(errno));
}

/* What is due now. */
static void act(struct host *host)
{
    const struct plan *plan = host->plan;
    struct child *victim = &host->ranks[plan->victim];
    if (victim->ended && !host->again && atomic_load(&host->page->wanted_again))
        start_again(host);
    if (victim->ended)
        return;
    if (plan->by_host && !host->struck && atomic_load(&host->page->reached))
        strike(host);
    if (host->resume_ns && td__now_ns() >= host->resume_ns) {
        kill(victim->pid, SIGCONT);
        host->resume_ns = 0;
    }
    if (plan->fault == FAULT_STOP && host->struck && !host->killed &&
        survivors_reached(host, STATE_FINISHED)) {
        kill(victim->pid, SIGKILL);
        host->killed = true;
    }
}

/* ---- Watching -------------------------------------------------------------------------------- */

/* Returns how many ranks are running, and when the first one that should have lived on ended badly. */
static int reap(struct host *host, int64_t *trouble_ns)
{
    int running = 0;
    for (int r = 0; r < host->plan->size; r++) {
        struct child *child = &host->ranks[r];
        if (!child->ended && child->pid > 0 && waitpid(child->pid, &child->status, WNOHANG) == child->pid) {
            child->ended = true;
            child->end_ns = td__now_ns();
            if (r != host->plan->victim && r != host->plan->second && child->status && !*trouble_ns)
                *trouble_ns = child->end_ns;
            page_ring(host->page);
        }
        running += !child->ended && child->pid > 0;
    }
    return running;
}

static void show_stacks(pid_t pid)
{
    char number[16];
    snprintf(number, sizeof number, "%d", (int)pid);
    fflush(stdout);
    pid_t gdb = fork();
    if (gdb == 0) {
        execlp("gdb", "gdb", "-p", number, "-batch", "-ex", "thread apply all bt", (char *)NULL);
        _exit(127);
    }
    if (gdb > 0)
        waitpid(gdb, NULL, 0);
}

static void kill_running(struct host *host, bool stacks)
{
    static const char *const states[] = {"not begun",         "making the world", "running",
                                         "waiting for others", "leaving",          "done"};
    for (int r = 0; r < host->plan->size; r++) {
        const struct child *child = &host->ranks[r];
        const struct report *said = &host->page->ranks[r];
        if (child->ended || child->pid <= 0)
            continue;
        report(host, "rank %d hangs: %s", r, states[atomic_load(&said->state)]);
        for (int lane = 0; lane < LANES; lane++)
            if (atomic_load(&said->at[lane]) >= 0)
                report(host, "    lane %d at operation %d, %s on group %d, for %.1f s", lane,
                       atomic_load(&said->at[lane]), kind_name((enum kind)atomic_load(&said->kind[lane])),
                       atomic_load(&said->group[lane]),
                       (double)(td__now_ns() - atomic_load(&said->since[lane])) / 1e9);
        if (stacks)
            show_stacks(child->pid);
    }
    for (int r = 0; r < host->plan->size; r++)
        if (!host->ranks[r].ended && host->ranks[r].pid > 0)
            kill(host->ranks[r].pid, SIGKILL);
}

static void watch(struct host *host, bool stacks)
{
    int64_t trouble = 0;
    td__deadline end = td__deadline_in_ms((int64_t)DEADLINE_S * 1000 * slowness());
    bool given_up = false;
    for (;;) {
        uint32_t events = atomic_load(&host->page->events);
        if (!reap(host, &trouble))
            break;
        act(host);
        bool late = td__deadline_passed(end) ||
                    (trouble && td__now_ns() - trouble > AFTER_DEATH_S * SECOND);
        if (late && !given_up) {
            kill_running(host, stacks);
            given_up = true;
        }
        page_wait(host->page, events, LOOK_NS);
    }
}

/* ---- Judging --------------------------------------------------------------------------------- */

static bool ended_as_planned(const struct plan *plan, int rank, int status)
{
    static const int signals[] = {[END_KILL] = SIGKILL, [END_SEGV] = SIGSEGV, [END_ABORT] = SIGABRT};
    bool lives = plan->fault == FAULT_PAUSE || plan->fault == FAULT_LEAVE ||
                 plan->fault == FAULT_CUT || plan->fault == FAULT_ABORT;
    if (rank != plan->second && (rank != plan->victim || lives))
        return status == 0;
    if (rank == plan->victim && plan->fault == FAULT_STOP)
        return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (plan->end == END_EXIT || plan->end == END_SILENT)
        return WIFEXITED(status) && WEXITSTATUS(status) == (plan->end == END_EXIT ? 3 : 0);
    if (slowness() > 1 && plan->end != END_KILL)
        return true; /* a sanitizer ends it its own way */
    return WIFSIGNALED(status) && WTERMSIG(status) == signals[plan->end];
}

static void show_output(struct host *host, int rank)
{
    char text[TAIL + 1];
    off_t size = lseek(host->ranks[rank].output, 0, SEEK_END);
    off_t from = size > TAIL ? size - TAIL : 0;
    ssize_t got = pread(host->ranks[rank].output, text, TAIL, from);
    if (got <= 0)
        return;
    text[got] = 0;
    report(host, "    its output: %s", text);
}

/* All who live to the end agree on who was left after each attempt. */
static void compare_rests(struct host *host)
{
    const struct plan *plan = host->plan;
    for (int attempt = 0; attempt < 3; attempt++) {
        unsigned first = 0;
        for (int r = 0; r < plan->size; r++) {
            unsigned mask = atomic_load(&host->page->ranks[r].left[attempt]);
            bool counts = plan->after && r != plan->victim && r != plan->second;
            if (counts && mask && first && mask != first)
                report(host, "after attempt %d ranks %x are left for some, %x for rank %d", attempt,
                       first, mask, r);
            first = counts && !first ? mask : first;
        }
    }
}

static void judge(struct host *host)
{
    const struct plan *plan = host->plan;
    struct outcome *outcome = host->outcome;
    outcome->struck = atomic_load(&host->page->fault_ns) != 0;
    if (!outcome->struck)
        report(host, "the victim was not struck");
    if (host->again && !ended_as_planned(plan, plan->victim, host->first.status))
        report(host, "rank %d ended first with status %x", plan->victim, host->first.status);
    if (plan->after == AFTER_GROW && !host->again)
        report(host, "the victim was not started again");
    compare_rests(host);
    for (int r = 0; r < plan->size; r++) {
        const struct child *child = &host->ranks[r];
        struct report *said = &host->page->ranks[r];
        bool planned = host->again && r == plan->victim ? child->status == 0
                                                        : ended_as_planned(plan, r, child->status);
        if (said->complaint[0])
            report(host, "rank %d: %s", r, said->complaint);
        if (!planned && WIFSIGNALED(child->status))
            report(host, "rank %d ended by %s", r, td__signal_name(WTERMSIG(child->status)));
        else if (!planned)
            report(host, "rank %d ended with code %d", r, WEXITSTATUS(child->status));
        if (said->complaint[0] || !planned)
            show_output(host, r);
        outcome->operations += atomic_load(&said->operations);
        int found = atomic_load(&said->detections);
        for (int i = 0; i < found && i < MAX_DETECTIONS && r != plan->victim; i++)
            outcome->detection_ns[outcome->detections++] = said->detection_ns[i];
    }
}

/* Processes that a rank has left are ours, since this process is a subreaper. */
static void await_orphans(struct host *host)
{
    td__deadline end = td__deadline_in_ms(LEFT_S * 1000);
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) >= 0 || errno != ECHILD;) {
        if (pid == 0 && td__deadline_passed(end)) {
            report(host, "a process of a rank is left");
            return;
        }
        if (pid == 0)
            td__sleep_ns(2000000);
    }
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

static void check_left(struct host *host)
{
    char left[1000] = "";
    pid_t pids[MAX_RANKS];
    const struct plan *plan = host->plan;
    for (int r = 0; r < plan->size; r++)
        pids[r] = host->ranks[r].pid;
    /* The file of a store is removed by the last one who leaves in order. */
    bool last_died = plan->fault == FAULT_LATE || plan->fault == FAULT_STOP;
    td__deadline end = td__deadline_in_ms(LEFT_S * 1000);
    do {
        *left = 0;
        left_check(pids, plan->size, last_died ? NULL : host->directory, left, sizeof left);
        if (*left)
            td__sleep_ns(20000000);
    } while (*left && !td__deadline_passed(end));
    if (*left)
        report(host, "left behind: %s", left);
}

static void clear(struct host *host)
{
    if (host->store)
        td_store_close(host->store);
    for (int i = 0; i < host->space_count; i++)
        if (host->spaces[i] >= 0)
            close(host->spaces[i]);
    network_clear(host->space_count);
    if (host->page && host->page != MAP_FAILED)
        check_left(host);
    for (int r = 0; r < host->plan->size; r++)
        if (host->ranks[r].output > 0)
            close(host->ranks[r].output);
    if (host->first.output > 0)
        close(host->first.output);
    if (host->directory[0])
        nftw(host->directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    if (host->page && host->page != MAP_FAILED)
        munmap(host->page, sizeof *host->page);
    if (host->page_fd > 0)
        close(host->page_fd);
}

void host_run(const struct plan *plan, bool stacks, struct outcome *outcome)
{
    struct host host = {.plan = plan, .outcome = outcome, .start_ns = td__now_ns()};
    *outcome = (struct outcome){0};
    strcpy(host.directory, "/tmp/tandem-chaos-XXXXXX");
    if (!mkdtemp(host.directory)) {
        host.directory[0] = 0;
        report(&host, "there is no directory %s: %s", host.directory, strerror(errno));
    } else if (!make_page(&host) || !make_spaces(&host)) {
        report(&host, "the round could not be set up: %s", strerror(errno));
    } else if (!open_store(&host)) {
        report(&host, "there is no store: %s", td_last_error());
    } else {
        set_environment(&host);
        for (int r = 0; r < plan->size; r++)
            if (!start_rank(&host, r, false))
                report(&host, "rank %d could not be started: %s", r, strerror(errno));
        watch(&host, stacks);
        await_orphans(&host);
        judge(&host);
    }
    clear(&host);
    outcome->seconds = (double)(td__now_ns() - host.start_ns) / 1e9;
}
