/* The supervisor and the agent; see supervisor.h.
 *
 * The agent is in a process group of its own. On a terminal Ctrl-C and Ctrl-Z go to the group in the
 * foreground, which is the supervisor's: so exactly one process gets them, and forwards them as bytes on
 * the signal pipe. (With both in one group, one Ctrl-C would arrive twice, and the second counts as
 * "now".) What the agent writes comes from a group in the background; it ignores SIGTTOU, so that
 * this is allowed also where `stty tostop` is set. It never stops itself: Ctrl-Z stops the workers
 * and the supervisor, which the shell waits for.
 *
 * A signal that is sent to the agent directly, as by a service manager that signals every process of
 * a service, reaches it as well; it takes a signal that it knows already as one and the same. */
#include "launch/supervisor.h"

#include "base/fail.h"
#include "launch/worker.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* The title is written over the arguments, which lie in memory one after another. */
static void set_title(int argc, char **argv, pid_t supervisor)
{
    prctl(PR_SET_NAME, "tandem-agent");
    char *end = argv[0];
    for (int i = 0; i < argc && argv[i] == end; i++)
        end += strlen(argv[i]) + 1;
    size_t room = (size_t)(end - argv[0]);
    memset(argv[0], 0, room);
    if (room)
        snprintf(argv[0], room, "tandem-agent of process %d", (int)supervisor);
}

static void ignore(int number, sigset_t *ignored)
{
    if (signal(number, SIG_IGN) != SIG_IGN)
        sigaddset(ignored, number);
}

static _Noreturn void be_agent(int argc, char **argv, struct td__agent_start *start,
                               const struct td__agent_job *job)
{
    set_title(argc, argv, getppid());
    setpgid(0, 0);
    td__reap_tree_prepare(); /* does not pass to a child by itself */
    sigemptyset(&start->ignored);
    ignore(SIGTTOU, &start->ignored);
    ignore(SIGPIPE, &start->ignored);
    ignore(SIGXFSZ, &start->ignored); /* a file that is too large is then as a disk that is full */
    exit(td__agent_run(start, job));
}

static void forward(int signal_pipe, int signal)
{
    uint8_t byte = (uint8_t)signal;
    ssize_t written = write(signal_pipe, &byte, 1);
    (void)written; /* the end of the agent is noticed by waitpid() */
}

/* Stops this process as the shell expects it, and returns when it goes on. */
static void pause_with_workers(int signal_pipe)
{
    forward(signal_pipe, SIGTSTP);
    kill(getpid(), SIGSTOP);
    forward(signal_pipe, SIGCONT);
}

/* Reaps what has ended; true when the agent has, with its status. */
static bool agent_ended(pid_t agent, int *status)
{
    pid_t pid;
    int any;
    bool ended = false;
    while ((pid = waitpid(-1, &any, WNOHANG)) > 0) {
        if (pid == agent) {
            *status = any;
            ended = true;
        }
    }
    return ended;
}

static int clean_up_after(pid_t agent, int status, const char *host)
{
    /* An agent that ended in order left nothing. */
    int left = td__reap_tree();
    if (WIFSIGNALED(status))
        fprintf(stderr,
                "tdrun%s%s: its agent (pid %d) was killed by %s; all workers on this node were ended "
                "with it\n",
                host ? " on " : "", host ? host : "", (int)agent, td__signal_name(WTERMSIG(status)));
    if (left)
        fprintf(stderr, "tdrun: %d processes of this job cannot be ended; see ps\n", left);
    return td__exit_code(status);
}

static int supervise(pid_t agent, const sigset_t *waited, int signal_pipe, const char *host)
{
    int status = 0;
    while (!agent_ended(agent, &status)) {
        int signal = sigwaitinfo(waited, NULL);
        if (signal == SIGTSTP)
            pause_with_workers(signal_pipe);
        else if (signal > 0 && signal != SIGCHLD)
            forward(signal_pipe, signal);
    }
    return clean_up_after(agent, status, host);
}

bool td__signal_is_passed_on(int signal, const sigset_t *handled)
{
    return (signal == SIGUSR1 || signal == SIGUSR2) && sigismember(handled, signal) != 1;
}

/* Those of `handled`, SIGTSTP, and those that are passed on, as far as they were not ignored when this process
 * started. */
static void choose_signals(const sigset_t *handled, sigset_t *signals)
{
    sigemptyset(signals);
    for (int number = 1; number < NSIG; number++) {
        struct sigaction action;
        if (sigismember(handled, number) != 1 && number != SIGTSTP &&
            !td__signal_is_passed_on(number, handled))
            continue;
        if (!sigaction(number, NULL, &action) && action.sa_handler != SIG_IGN)
            sigaddset(signals, number);
    }
    signal(SIGCHLD, SIG_DFL); /* inherited as ignored, children would vanish without a status */
}

td_status td__supervisor_run(int argc, char **argv, const struct td__agent_job *job, int *exit_code)
{
    struct td__agent_start start;
    int signal_pipe[2];
    td__reap_tree_prepare();
    choose_signals(&job->options->signals, &start.signals);
    if (pipe2(signal_pipe, O_CLOEXEC))
        return td_fail(TD_ERR_SYSTEM, "cannot make a pipe: %s", td__errno_text(errno));
    sigset_t waited = start.signals;
    sigaddset(&waited, SIGCHLD);
    sigprocmask(SIG_BLOCK, &waited, &start.mask);
    pid_t pid = fork();
    if (pid < 0) {
        td_status status = td_fail(TD_ERR_SYSTEM, "cannot start the agent: %s",
                                   td__errno_text(errno));
        close(signal_pipe[0]);
        close(signal_pipe[1]);
        return status;
    }
    if (pid == 0) {
        close(signal_pipe[1]);
        start.signal_pipe = signal_pipe[0];
        be_agent(argc, argv, &start, job);
    }
    close(signal_pipe[0]);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    *exit_code = supervise(pid, &waited, signal_pipe[1], job->options->served_host);
    close(signal_pipe[1]);
    return TD_OK;
}
