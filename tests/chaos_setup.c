/* Setting a round up, and starting its ranks: the same program again, with an environment as a launcher would
 * give it. Their output goes to memory, and is shown when something is wrong. */
#include "chaos_host.h"

#include "base/auth.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

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
    void *page = mmap(NULL, sizeof *host->page, PROT_READ | PROT_WRITE, MAP_SHARED, host->page_fd,
                      0);
    if (page == MAP_FAILED)
        return false;
    host->page = page;
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
    char program[PATH_MAX] = ""; /* by its name: QEMU does not execute /proc/self/exe */
    if (readlink("/proc/self/exe", program, sizeof program - 1) > 0)
        execv(program, argv);
    _exit(98);
}

bool host_start_rank(struct host *host, int index, bool again)
{
    const struct plan *plan = host->plan;
    char seed[32], round[16], rank[16], id[16];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)plan->seed);
    snprintf(round, sizeof round, "%d", plan->round);
    snprintf(rank, sizeof rank, "%d", index);
    char *const argv[] = {"chaos",
                          "--seed",
                          seed,
                          "--round",
                          round,
                          "--only",
                          plan->rpc ? "rpc" : "collectives",
                          "--rank",
                          rank,
                          network_is_own() ? "--spaces" : "--no-spaces",
                          again ? "--again" : NULL,
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

bool host_set_up(struct host *host)
{
    const char *parent = getenv("TMPDIR");
    snprintf(host->directory, sizeof host->directory, "%s/tandem-chaos-XXXXXX",
             parent && *parent ? parent : "/tmp");
    if (!mkdtemp(host->directory)) {
        host_report(host, "there is no directory %s: %s", host->directory, strerror(errno));
        host->directory[0] = 0;
        return false;
    }
    if (!make_page(host) || !make_spaces(host)) {
        host_report(host, "the round could not be set up: %s", strerror(errno));
        return false;
    }
    if (!open_store(host)) {
        host_report(host, "there is no store: %s", td_last_error());
        return false;
    }
    set_environment(host);
    return true;
}
