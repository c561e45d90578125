/* Files that grow past a limit.
 *
 * Who writes behind RLIMIT_FSIZE (ulimit -f) gets SIGXFSZ, which ends the process, and only then EFBIG. Here
 * the signal is held back, so that it is an error like any other; td__errno_text() names the limit. */
#ifndef TD_BASE_FILE_LIMIT_H
#define TD_BASE_FILE_LIMIT_H

#include <signal.h>
#include <stdbool.h>

struct td__file_limit {
    sigset_t before;
    bool pending; /* one that came before */
};

/** Holds SIGXFSZ back from this thread. It changes no errno, nor does the other. */
void td__file_limit_enter(struct td__file_limit *limit);

/** Drops one that has come since, and restores what was. */
void td__file_limit_leave(struct td__file_limit *limit);

#endif
