/* Finding the pages of jobs: those that run on this machine, and those that were kept as files. */
#ifndef TD_LAUNCH_JOBS_H
#define TD_LAUNCH_JOBS_H

#include "launch/story.h"

#include <sys/types.h>

/** Copies the books of all jobs on this machine; of this user, or of everybody where `everybody` and the
 *  system lets us. One job a book. For free(), after the bytes of each. */
td_status td__jobs_find(bool everybody, struct td__story_book **books, int *count);

/** Whether `pid` is the launcher of the book, or one of its workers. */
bool td__job_has_process(const struct td__story_book *book, pid_t pid);

/** Reads a book that was kept as a file. */
td_status td__job_read_file(const char *path, struct td__story_book *book);

/** The state of a process as ps shows it: 'R', 'S', 'T' (stopped), 'Z' …; 0 where there is none. */
char td__process_state(pid_t pid);

#endif
