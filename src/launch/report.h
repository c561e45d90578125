/* What tdrun says about workers that failed. */
#ifndef TD_LAUNCH_REPORT_H
#define TD_LAUNCH_REPORT_H

#include "launch/worker.h"

/** The exit code of tdrun for a status of waitpid(): the code, or 128 plus the signal's number. */
int td__exit_code(int status);

/** "exit code 3", "SIGSEGV (core dumped)". */
void td__describe_status(int status, char *text, size_t room);

/** One sentence on how a worker ended: "rank 1 (local rank 1, pid 77) failed with exit code 3 after
 *  0.42 s". `where` goes into the brackets, as " on node 1"; "" for nothing. */
void td__describe_failure(const struct td__worker *worker, const char *where, char *text,
                          size_t room);

/** Says how a worker failed, with the last lines that it wrote. `sentence` is that of above. */
void td__report_failure(struct td__console *console, const struct td__worker *worker,
                        const char *sentence);

/** Says which others had failed by themselves when `first` did, where there are any. */
void td__report_others(struct td__console *console, const struct td__worker *workers, int count,
                       const struct td__worker *first);

#endif
