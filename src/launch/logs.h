/* The files in which workers' output is kept:
 *     DIR/<run id>/[node_<k>/ with several nodes]attempt_<n>/<local rank>/stdout.log, stderr.log */
#ifndef TD_LAUNCH_LOGS_H
#define TD_LAUNCH_LOGS_H

#include <limits.h>
#include <tandem/base.h>

struct td__logs {
    char directory[PATH_MAX]; /* down to the run id, or the node */
    char fresh[PATH_MAX];     /* the directory that was made for want of one; "" otherwise */
};

/** Makes the directory of this run. `directory` NULL: a fresh one in $TMPDIR, or /tmp. `node` is -1
 *  for a job of one node. */
td_status td__logs_open(struct td__logs *logs, const char *directory, const char *run_id, int node);

struct td__log_file {
    int fd; /* -1: none */
    char *path;
    int error; /* of the first write that failed; nothing is written after that */
};

/** Makes the file for a worker's stream, empty. `name` is "stdout" or "stderr". */
td_status td__log_file_open(struct td__log_file *file, const struct td__logs *logs, int attempt,
                            int local_rank, const char *name);

/** Writes; false when that fails for the first time. */
bool td__log_file_write(struct td__log_file *file, const void *data, size_t size);

/** Closes; false when the system reports only now that something could not be written. */
bool td__log_file_close(struct td__log_file *file);

#endif
