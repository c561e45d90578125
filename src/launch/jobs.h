/* Finding the pages of jobs: those that run on this machine, and those that were kept as files. */
#ifndef TD_LAUNCH_JOBS_H
#define TD_LAUNCH_JOBS_H

#include "launch/postmortem.h"

#include <sys/types.h>

/** A job on this machine: what the head of its book says, and where that is. */
struct td__job {
    struct td__flight_book_info info;
    bool hollow;   /* the book names many workers and has next to nothing about them */
    char path[64]; /* below /proc */
    dev_t device;
    ino_t inode;
};

/** Finds all jobs on this machine, the oldest first; those of this user, or of all users if `all_users`
 *  and the system permits it. *jobs is for free(). */
td_status td__jobs_find(bool all_users, struct td__job **jobs, int *count);

/** A copy of the job's book, of a hollow one of the head, for td__postmortem_take() or
 *  td__postmortem_books_free(); NULL where the job is gone meanwhile, or there is no memory for it. */
struct td__postmortem_book *td__job_copy(const struct td__job *job);

/** Whether `pid` is the launcher of the book, or one of its workers. */
bool td__job_has_process(const struct td__postmortem_book *book, pid_t pid);

/** Reads a book that was kept as a file. */
td_status td__job_read_file(const char *path, struct td__postmortem_book *book);

/** A command of tdrun. It takes its own arguments, argv[0] being its name, and returns the
 *  exit code. */
typedef int (*td__command_fn)(int argc, char **argv);

/** The command that shows jobs and has this name, or NULL. */
td__command_fn td__command_find(const char *name);

#endif
