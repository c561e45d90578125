/* The program that is to be started: which file it is, who interprets it, and its arguments. */
#ifndef TD_LAUNCH_WORKER_PROGRAM_H
#define TD_LAUNCH_WORKER_PROGRAM_H

#include "launch/options.h"

#include <limits.h>

/** What each worker runs. */
struct td__worker_program {
    char path[PATH_MAX]; /* what is executed: the program, or the interpreter of a script */
    char **argv;         /* ended by NULL; the arguments themselves belong to the options */
    int local_rank_at;   /* where the local rank goes; -1: nowhere */
    const char *local_rank_name;
    bool by_itself; /* a Python script that its first line runs */
};

/**
 * Finds out what to execute for options->program. A name with a slash is a file, another one the first
 * executable of that name in PATH, as for execvp(). A file *.py is a script for the interpreter, which
 * is $PYTHON_EXEC or python3, unless it is executable and names its own in its first line (and no
 * PYTHON_EXEC is set); one without a slash is looked for in the current directory first.
 *
 * TD_ERR_INVALID: there is none, or it cannot be run. The sentence says which, and what to do;
 * *exit_code is then what a shell would exit with, 127 or 126. Free with td__worker_program_free().
 */
td_status td__worker_program_plan(const struct td__run_options *options,
                                  struct td__worker_program *program, int *exit_code);

void td__worker_program_free(struct td__worker_program *program);

/** The arguments of one worker, ended by NULL, in one piece of memory for free(); NULL without
 *  memory. */
char **td__worker_program_arguments(const struct td__worker_program *program, int local_rank);

/** The sentence and exit code for a file that was found, but that execve() refused with `error`. */
td_status td__worker_program_refused(const char *name, int error, int *exit_code);

#endif
