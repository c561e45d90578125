/* Forks of a test; see forks.h. */
#include "forks.h"

#include "runner.h"

#include "base/clock.h"
#include "base/fail.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_FORKS = 1024 };

struct started {
    pid_t pid;
    bool ended;
    bool may_die; /* a signal was sent to it on purpose */
};

static struct started forks[MAX_FORKS];
static int fork_count;

static _Noreturn void be_fork(void (*fn)(void *), void *arg, pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    fork_count = 0; /* those are its siblings */
    fn(arg);
    exit(0); /* and not _exit(): a leak is found on the way */
}

pid_t fork_start(void (*fn)(void *), void *arg)
{
    if (fork_count == MAX_FORKS)
        FAIL("more than %d forks", MAX_FORKS);
    pid_t parent = getpid();
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        FAIL("fork: %s", strerror(errno));
    if (pid == 0)
        be_fork(fn, arg, parent);
    forks[fork_count++] = (struct started){.pid = pid};
    return pid;
}

/* Waits for the forks only, not for other children. */
static void look_at(struct started *fork)
{
    int status;
    if (fork->ended || waitpid(fork->pid, &status, WNOHANG) != fork->pid)
        return;
    fork->ended = true;
    if (fork->may_die)
        return;
    if (WIFSIGNALED(status))
        FAIL("a fork, process %d, was ended by %s", (int)fork->pid,
             td__signal_name(WTERMSIG(status)));
    if (WEXITSTATUS(status))
        FAIL("a fork, process %d, has exit code %d", (int)fork->pid, WEXITSTATUS(status));
}

static struct started *find(pid_t pid)
{
    for (int i = fork_count - 1; i >= 0; i--)
        if (forks[i].pid == pid)
            return &forks[i];
    FAIL("process %d is no fork of this one", (int)pid);
}

bool fork_has_ended(pid_t pid)
{
    for (int i = 0; i < fork_count; i++)
        look_at(&forks[i]);
    return find(pid)->ended;
}

void fork_join(pid_t pid)
{
    while (!fork_has_ended(pid))
        td__sleep_ns(500000);
}

void fork_kill(pid_t pid, int number)
{
    struct started *fork = find(pid);
    fork->may_die = true;
    kill(pid, number);
    fork_join(pid);
}

struct of_rank {
    void (*fn)(int rank, void *arg);
    void *arg;
    int rank;
};

static void run_rank(void *arg)
{
    const struct of_rank *rank = arg;
    rank->fn(rank->rank, rank->arg);
}

void fork_ranks(int count, void (*fn)(int rank, void *arg), void *arg)
{
    int first = fork_count;
    for (int rank = 0; rank < count; rank++)
        fork_start(run_rank, &(struct of_rank){fn, arg, rank});
    for (int i = first; i < first + count; i++)
        fork_join(forks[i].pid);
    fork_count = first;
}

void *fork_shared(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        FAIL("mmap: %s", strerror(errno));
    return memory;
}

/* Bound, but not listening: the system gives the port to no other socket, and a connection to it is refused. The
 * socket stays open until the process ends. */
int reserve_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        bind(fd, (struct sockaddr *)&address, size) ||
        getsockname(fd, (struct sockaddr *)&address, &size))
        FAIL("no port to be had: %s", strerror(errno));
    return ntohs(address.sin_port);
}

void set_variables(const char *const *list)
{
    for (; *list; list++) {
        char name[128];
        const char *equals = strchr(*list, '=');
        CHECK(equals != NULL && equals - *list < (ptrdiff_t)sizeof name);
        snprintf(name, sizeof name, "%.*s", (int)(equals - *list), *list);
        if (equals[1])
            setenv(name, equals + 1, 1);
        else
            unsetenv(name);
    }
}

void set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}
