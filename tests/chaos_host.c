/* The host of a round: injects the fault, and watches the ranks.
 *
 * It sleeps until something changes at the page that it shares with the ranks, and looks at the clock and
 * at its children in between. Nothing outlives it: ranks are killed by the kernel when it dies. */
#include "chaos_host.h"
#include "chaos_rpc.h"

#include <errno.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

enum { DEADLINE_S = 50, AFTER_DEATH_S = 15, LOOK_NS = 20000000 };

volatile int host_ended_by;

int slowness(void)
{
    return TD_TEST_SLOWNESS;
}

/* ---- Striking -------------------------------------------------------------------------------- */

static bool survivors_reached(const struct host *host, enum state state)
{
    for (int r = 0; r < host->plan->size; r++)
        if (r != host->plan->victim && atomic_load(&host->page->ranks[r].state) < (int)state)
            return false;
    return true;
}

static void inject(struct host *host)
{
    static const int signals[] = {
        [END_KILL] = SIGKILL, [END_SEGV] = SIGSEGV, [END_ABORT] = SIGABRT};
    const struct plan *plan = host->plan;
    pid_t pid = host->ranks[plan->victim].pid;
    host->injected = true;
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
            host_report(host, "the network could not be cut");
        break;
    default:
        kill(pid, signals[plan->end]);
        break;
    }
    atomic_store(&host->page->injected, true);
    page_ring(host->page);
}

static void start_again(struct host *host)
{
    struct child *victim = &host->ranks[host->plan->victim];
    host->first = *victim;
    host->again = true;
    *victim = (struct child){0};
    if (!host_start_rank(host, host->plan->victim, true))
        host_report(host, "the victim could not be started again: %s", strerror(errno));
}

/* Injects faults and resumes ranks whose time has come. */
static void act(struct host *host)
{
    const struct plan *plan = host->plan;
    struct child *victim = &host->ranks[plan->victim];
    if (victim->ended && !host->again && atomic_load(&host->page->wanted_again))
        start_again(host);
    if (victim->ended)
        return;
    if (plan->by_host && !host->injected && atomic_load(&host->page->reached))
        inject(host);
    if (host->resume_ns && td__now_ns() >= host->resume_ns) {
        kill(victim->pid, SIGCONT);
        host->resume_ns = 0;
    }
    if (plan->fault == FAULT_STOP && host->injected && !host->killed &&
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
        if (!child->ended && child->pid > 0 &&
            waitpid(child->pid, &child->status, WNOHANG) == child->pid) {
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
    static const char *const states[] = {"not begun",          "making the world", "running",
                                         "waiting for others", "leaving",          "done"};
    for (int r = 0; r < host->plan->size; r++) {
        const struct child *child = &host->ranks[r];
        const struct report *said = &host->page->ranks[r];
        if (child->ended || child->pid <= 0)
            continue;
        host_report(host, "rank %d hangs: %s", r, states[atomic_load(&said->state)]);
        for (int lane = 0; lane < LANES; lane++)
            if (atomic_load(&said->at[lane]) >= 0)
                host_report(host, "    lane %d at operation %d, %s on %s %d, for %.1f s", lane,
                            atomic_load(&said->at[lane]),
                            host->plan->rpc ? call_name(atomic_load(&said->kind[lane]))
                                            : kind_name((enum kind)atomic_load(&said->kind[lane])),
                            host->plan->rpc ? "worker" : "group", atomic_load(&said->group[lane]),
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
    int64_t failed_ns = 0;
    td__deadline end = td__deadline_in_ms((int64_t)DEADLINE_S * 1000 * slowness());
    bool aborted_group = false;
    for (;;) {
        uint32_t events = atomic_load(&host->page->events);
        if (!reap(host, &failed_ns))
            break;
        act(host);
        bool late = td__deadline_passed(end) ||
                    (failed_ns && td__now_ns() - failed_ns > AFTER_DEATH_S * SECOND);
        if ((late || host_ended_by) && !aborted_group) {
            kill_running(host, stacks && late);
            aborted_group = true;
        }
        page_wait(host->page, events, LOOK_NS);
    }
}

/* ---- The round ------------------------------------------------------------------------------- */

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

static void clear(struct host *host)
{
    if (host->store)
        td_store_close(host->store);
    for (int i = 0; i < host->space_count; i++)
        if (host->spaces[i] >= 0)
            close(host->spaces[i]);
    network_clear(host->space_count);
    if (host->page)
        host_check_left(host);
    for (int r = 0; r < host->plan->size; r++)
        if (host->ranks[r].output > 0)
            close(host->ranks[r].output);
    if (host->first.output > 0)
        close(host->first.output);
    if (host->directory[0])
        nftw(host->directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    if (host->page)
        munmap(host->page, sizeof *host->page);
    if (host->page_fd > 0)
        close(host->page_fd);
}

void host_run(const struct plan *plan, bool stacks, struct outcome *outcome)
{
    struct host host = {.plan = plan, .outcome = outcome, .start_ns = td__now_ns()};
    *outcome = (struct outcome){0};
    if (host_set_up(&host)) {
        for (int r = 0; r < plan->size; r++)
            if (!host_start_rank(&host, r, false))
                host_report(&host, "rank %d could not be started: %s", r, strerror(errno));
        watch(&host, stacks);
        host_await_orphans(&host);
        host_judge(&host);
    }
    clear(&host);
    outcome->seconds = (double)(td__now_ns() - host.start_ns) / 1e9;
}
