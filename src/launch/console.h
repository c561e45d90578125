/* Where the user looks: tdrun's own standard output and standard error. */
#ifndef TD_LAUNCH_CONSOLE_H
#define TD_LAUNCH_CONSOLE_H

#include "base/buffer.h"

#include <tandem/base.h>

#include <pthread.h>

struct td__console;

/* Output and error are numbered as their descriptors are, from 1. */
enum { TD__OUT = 0, TD__ERR = 1 };

/* A descriptor that is written to without blocking the caller. Standard output may be a pipe that no process
 * reads, a terminal on hold, a slow disk. Setting it non-blocking would change it for every process that shares
 * it, the user's shell too. So a thread of its own, started by the first write, writes from a queue; the caller
 * looks at the queue's length, and stops producing. */
struct td__outlet {
    struct td__console *console;
    int fd;
    bool terminal;
    bool mid_line;     /* what was written last did not end a line … */
    const void *owner; /* … and this is its writer */

    pthread_mutex_t lock; /* protects all below; no other lock is taken under it */
    pthread_cond_t changed;
    struct td__buffer queue; /* what the thread has not taken yet … */
    size_t in_hand;          /* … and how much it has taken and not written yet */
    int error;               /* of the first write that failed; nothing is written after that */
    bool started, closing;
    pthread_t thread;
};

struct td__console {
    struct td__outlet outlets[2];
    struct td__outlet *to[2]; /* both are the same one where output and error are the same file, so
                                 that what is written first also appears first */
    bool colour;
    char name[280];            /* what stands in front of messages: "tdrun" */
    bool output_lost;          /* something could not be written where the user wanted it */
    void (*notify)(void *arg); /* called by a thread when something was written, or could not be */
    void *arg;
};

void td__console_open(struct td__console *console, void (*notify)(void *), void *arg);

/** Writes bytes for `owner`, without mixing them with others. On a terminal, another owner's unfinished line is
 *  ended first. */
void td__console_write(struct td__console *console, int which, const void *owner, const void *data,
                       size_t size);

/** True when the unfinished line at the end is `owner`'s. */
bool td__console_owns_line(const struct td__console *console, int which, const void *owner);

/** Writes the console's name, ": ", the text and a line end to standard error, on a line of its own. */
void td__console_say(struct td__console *console, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** How many bytes for `which` are not written yet. */
size_t td__console_backlog(struct td__console *console, int which);

/** True when that is so much that its producers should wait. */
bool td__console_is_full(struct td__console *console, int which);

/** The errno of the write that failed; 0 when all went well. Bytes are dropped from then on. */
int td__console_error(struct td__console *console, int which);

/** Waits until all is written. */
void td__console_close(struct td__console *console);

#endif
