/* A process as others on the same machine find it again, whatever becomes of its pid. */
#ifndef TD_OS_PROCESS_MARK_H
#define TD_OS_PROCESS_MARK_H

#include <stdbool.h>
#include <stdint.h>

struct td__process_mark {
    uint64_t space; /* this run of the machine, and the namespace of the pid */
    int pid;
    uint64_t started; /* in ticks since the machine was started */
};

/** The mark of the process that has `pid` here and now; false where there is none, or /proc is missing. */
bool td__process_mark(int pid, struct td__process_mark *mark);

bool td__process_mark_equal(const struct td__process_mark *a, const struct td__process_mark *b);

/** A pidfd of the process with this mark, which has this process's `space`; -1 where it has ended, or cannot
 *  be watched: then *ended says which. */
int td__process_mark_open(const struct td__process_mark *mark, bool *ended);

#endif
