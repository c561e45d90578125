/* Finding the program that is to be started. */
#ifndef TD_LAUNCH_PROGRAM_H
#define TD_LAUNCH_PROGRAM_H

#include <tandem/base.h>

#include <limits.h>

/**
 * Finds the file that execvp() would run for `name`: itself when it has a slash, otherwise the
 * first executable of that name in PATH.
 *
 * TD_ERR_INVALID: there is none, or it cannot be run. The sentence says which, and what to do;
 * *exit_code is then what a shell would exit with, 127 or 126.
 */
td_status td__program_find(const char *name, char path[PATH_MAX], int *exit_code);

/** The sentence and exit code for a file that was found, but that execve() refused with `error`. */
td_status td__program_refused(const char *name, int error, int *exit_code);

#endif
