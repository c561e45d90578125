/* Child processes; see process.h.
 *
 * The child is made by vfork(): nothing of the parent is copied, and no handler of pthread_atfork() runs, so that this
 * works, too, in a process that a fork() would break (td__fork_breaks()). Until execve() the child has the parent's
 * memory, while the calling thread waits and other threads run on. So it makes only system calls, and writes to
 * nothing but its own variables. It reports a failure through a pipe that execve() closes, so that the parent knows
 * either way. */
#include "os/process.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* The steps of the child, and their names for messages. */
enum step { LIFELINE, CPUS, DESCRIPTORS, LIMITS, SIGNALS, EXEC };
static const char *const step_names[] = {"prctl",     "sched_setaffinity", "dup2",
                                         "setrlimit", "sigprocmask",       "execve"};

enum { PARTING_FD = 1023 };

struct failure {
    enum step step;
    int error;
};

/* What the child needs of the parent, made before the fork. */
struct start {
    const struct td__child_spec *spec;
    pid_t parent;
    sigset_t mask;
    char **shell_argv;
};

int td__die_with_parent(pid_t parent, int signal)
{
    if (prctl(PR_SET_PDEATHSIG, signal))
        return errno;
    /* A parent that died before prctl() sends no signal any more. */
    return getppid() == parent ? 0 : ESRCH;
}

/* The parent's handlers are removed before the first signal can arrive: they would report the child's signal
 * to the parent, through descriptors that both have. */
static int restore_signals(const struct td__child_spec *spec, const sigset_t *mask)
{
    const struct sigaction plain = {.sa_handler = SIG_DFL};
    for (int signal = 1; signal < NSIG; signal++) {
        struct sigaction action;
        if (sigaction(signal, NULL, &action))
            continue; /* not a signal that can be handled */
        bool wanted = spec->default_signals && sigismember(spec->default_signals, signal) == 1;
        if (action.sa_handler == SIG_DFL || (action.sa_handler == SIG_IGN && !wanted))
            continue;
        if (sigaction(signal, &plain, NULL))
            return errno;
    }
    return sigprocmask(SIG_SETMASK, spec->mask ? spec->mask : mask, NULL) ? errno : 0;
}

static int place_descriptors(const int standard[3])
{
    int moved[3];
    /* First out of the way of 0 to 2, where a source may stand itself. */
    for (int i = 0; i < 3; i++) {
        moved[i] = standard[i] < 0 ? -1 : fcntl(standard[i], F_DUPFD_CLOEXEC, 3);
        if (standard[i] >= 0 && moved[i] < 0)
            return errno;
    }
    for (int i = 0; i < 3; i++)
        if (moved[i] >= 0 && dup2(moved[i], i) < 0)
            return errno;
    return 0;
}

static int keep_descriptors(const int keep[2])
{
    for (int i = 0; i < 2; i++)
        if (keep[i] >= 0 && fcntl(keep[i], F_SETFD, 0))
            return errno;
    return 0;
}

/* Without it only the order of ends is less exact: no reason not to start. */
static void keep_exit_pipe(int exit_pipe)
{
    struct rlimit limit;
    int number = PARTING_FD;
    if (exit_pipe < 0 || getrlimit(RLIMIT_NOFILE, &limit))
        return;
    if (limit.rlim_cur <= PARTING_FD)
        number = (int)limit.rlim_cur - 1;
    int kept = fcntl(exit_pipe, F_DUPFD, number);
    (void)kept;
}

/* Takes the steps; returns only when one of them fails. */
static struct failure become(const struct start *start)
{
    const struct td__child_spec *spec = start->spec;
    int error = !spec->parents_group && setpgid(0, 0) ? errno
                                                      : td__die_with_parent(start->parent, SIGKILL);
    if (error)
        return (struct failure){LIFELINE, error};
    if (spec->cpus && sched_setaffinity(0, spec->cpus_size, spec->cpus))
        return (struct failure){CPUS, errno};
    error = place_descriptors(spec->standard);
    if (!error)
        error = keep_descriptors(spec->keep);
    if (error)
        return (struct failure){DESCRIPTORS, error};
    keep_exit_pipe(spec->exit_pipe);
    /* Only now: below a lower limit there may be no number left for the descriptors above. */
    if (spec->file_limit && setrlimit(RLIMIT_NOFILE, spec->file_limit))
        return (struct failure){LIMITS, errno};
    error = restore_signals(spec, &start->mask);
    if (error)
        return (struct failure){SIGNALS, error};
    execve(spec->path, spec->argv, spec->envp);
    if (errno == ENOEXEC) {
        execve("/bin/sh", start->shell_argv, spec->envp);
        errno = ENOEXEC;
    }
    return (struct failure){EXEC, errno};
}

static _Noreturn void run_child(const struct start *start, int news)
{
    struct failure failure = become(start);
    ssize_t written;
    do
        written = write(news, &failure, sizeof failure);
    while (written < 0 && errno == EINTR);
    _exit(127);
}

/* The arguments for /bin/sh: sh, the file, and the program's own. */
static char **make_shell_argv(const struct td__child_spec *spec)
{
    size_t count = 0;
    while (spec->argv[count])
        count++;
    char **argv = calloc(count + 3, sizeof *argv);
    if (!argv)
        return NULL;
    argv[0] = "sh";
    argv[1] = (char *)spec->path;
    for (size_t i = 1; i < count; i++)
        argv[i + 1] = spec->argv[i];
    return argv;
}

/* Waits until the child has become the program, or has failed to. */
static int hear(int news, pid_t pid, const char **step)
{
    struct failure failure;
    ssize_t got;
    do
        got = read(news, &failure, sizeof failure);
    while (got < 0 && errno == EINTR);
    if (got != (ssize_t)sizeof failure)
        return 0; /* closed by execve(), or by a death that the caller learns of as any other */
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
    *step = step_names[failure.step];
    return failure.error;
}

/* The parent goes on when the child has become the program, or has ended. */
static pid_t start_process(const struct start *start, int news)
{
    pid_t pid = vfork();
    if (pid == 0)
        run_child(start, news);
    return pid;
}

int td__child_start(const struct td__child_spec *spec, pid_t *pid_out, const char **step)
{
    struct start start = {.spec = spec, .parent = getpid(), .shell_argv = make_shell_argv(spec)};
    int news[2];
    *step = "vfork";
    if (!start.shell_argv)
        return ENOMEM;
    if (pipe2(news, O_CLOEXEC)) {
        int error = errno;
        free(start.shell_argv);
        return error;
    }
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &start.mask);
    pid_t pid = start_process(&start, news[1]);
    int error = pid < 0 ? errno : 0;
    pthread_sigmask(SIG_SETMASK, &start.mask, NULL);
    close(news[1]);
    if (pid > 0) {
        error = hear(news[0], pid, step);
    }
    close(news[0]);
    free(start.shell_argv);
    if (!error)
        *pid_out = pid;
    return error;
}
