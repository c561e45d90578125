/* Two processes instead of one, so that each can clean up after the other.
 *
 *     shell ── supervisor (the pid that the user sees) ── agent ── workers ── whatever they start
 *
 * The supervisor forwards signals and waits. The agent does everything else: it starts the workers of this
 * node, watches them, and ends them. Both adopt what descends from them. When the supervisor is killed, the
 * agent sees the end of the signal pipe, kills all its descendants, and ends; when the agent is killed, the
 * supervisor does the same. The agent has another name, so that `pkill -9 tdrun` leaves it time for that. */
#ifndef TD_LAUNCH_SUPERVISOR_H
#define TD_LAUNCH_SUPERVISOR_H

#include "launch/node.h"

#include <tandem/base.h>

#include <signal.h>

/** How the agent starts. The signals that the supervisor handles, and SIGCHLD, are blocked; the agent
 *  unblocks them when it is ready for them. */
struct td__agent_start {
    int signal_pipe;  /* has a byte for each signal that reached the supervisor, its number, and
                         ends with the supervisor */
    sigset_t signals; /* those to be ready for: what was ignored from the start is not among them */
    sigset_t mask;    /* the mask that this process was started with: the workers' too */
    sigset_t ignored; /* signals that the agent ignores, and the workers should not */
};

struct td__agent_job {
    const struct td__run_options *options;
    const struct td__job_secret *secret;
    const struct td__worker_program *program;
};

/** Whether the workers get this signal, and nothing else happens: SIGUSR1 and SIGUSR2, unless they are among
 *  those that end the job. Batch systems announce the end of a job's time by them. */
bool td__signal_is_passed_on(int signal, const sigset_t *handled);

/** The agent: runs the job and returns tdrun's exit code. Says on standard error what the user should
 *  know. */
int td__agent_run(const struct td__agent_start *start, const struct td__agent_job *job);

/**
 * Runs the agent in a process of its own until it ends, and returns its exit code; forwards the signals of
 * the options to it meanwhile, and SIGTSTP and SIGCONT. A signal that was ignored when this process
 * started stays so. argv (with argc) is the memory in which ps looks for a process's title; the agent
 * overwrites its copy.
 *
 * When the agent is killed, says so on standard error and returns 128 plus the signal's number.
 * TD_ERR_SYSTEM: the agent could not be started.
 */
td_status td__supervisor_run(int argc, char **argv, const struct td__agent_job *job,
                             int *exit_code);

/* ---- Ending everything that descends from this process, daemons too ---------------------------- */

/** Makes this process the one that adopts its descendants when their parents die, so that none of
 *  them can get away. */
void td__reap_tree_prepare(void);

/**
 * Kills all descendants of this process with SIGKILL, and reaps them; also those that appear while
 * it does so. Costs one system call when there are none. Returns how many are left after 10 s: processes
 * that are stuck in the kernel, or that belong to another user.
 *
 * Takes the exit status of any child; blocks SIGCHLD meanwhile.
 */
int td__reap_tree(void);

#endif
