/* A descriptor that is written to without ever keeping the caller waiting.
 *
 * Standard output may be a pipe that nobody reads, a terminal on hold, a slow disk. Setting it
 * non-blocking would change it for every process that shares it, the user's shell too. So a thread
 * of its own writes, from a queue; the caller looks at the queue's length, and stops producing. */
#ifndef TD_LAUNCH_SINK_H
#define TD_LAUNCH_SINK_H

#include "base/buffer.h"

#include <pthread.h>
#include <tandem/base.h>

struct td__sink {
    int fd;
    void (*notify)(
        void *arg); /* called by the thread when something was written, or could not be */
    void *arg;

    pthread_mutex_t lock; /* guards all below; nothing is taken after it */
    pthread_cond_t changed;
    struct td__buffer queue; /* what the thread has not taken yet … */
    size_t in_hand;          /* … and how much it has taken and not written yet */
    int error;               /* of the first write that failed; nothing is written after that */
    bool started, closing;
    pthread_t thread;
};

/** `fd` stays the caller's. The thread is started by the first write. */
void td__sink_init(struct td__sink *sink, int fd, void (*notify)(void *), void *arg);

/** Queues bytes. What is queued by one call is not mixed with anything else. */
void td__sink_write(struct td__sink *sink, const void *data, size_t size);

/** How many bytes are not written yet. */
size_t td__sink_backlog(struct td__sink *sink);

/** The errno of the write that failed; 0 when all went well. Bytes are dropped from then on. */
int td__sink_error(struct td__sink *sink);

/** Waits until all is written, and ends the thread. */
void td__sink_close(struct td__sink *sink);

#endif
