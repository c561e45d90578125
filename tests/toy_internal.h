/* What the two files of the toy backend share. */
#ifndef TANDEM_TESTS_TOY_INSIDE_H
#define TANDEM_TESTS_TOY_INSIDE_H

#include <tandem/backend.h>

#include <pthread.h>

/* A message that has arrived, and has no recv yet. */
struct letter {
    struct letter *next;
    int32_t from, tag;
    td_bytes value; /* from, tag, data */
};

/* A recv that waits for its letter. */
struct pending {
    struct pending *next;
    td_work *work;
    td_call call;
    int64_t deadline_ms;
    struct letter *letter; /* once it has arrived */
};

struct toy {
    const td_backend_context *context;
    uint64_t last; /* the collective whose key is still there */

    pthread_mutex_t lock; /* guards what follows; not held while a work is completed */
    struct pending *pending;
    struct letter *letters; /* in order */
    int64_t read;           /* letters taken from the mailbox */
    bool reading;           /* a thread looks into the mailbox */
};

/* The slots for messages (toy_p2p.c). */
td_status toy_post(void *self, const td_call *call, td_work *work);
void toy_progress(void *self, td_work *work, int64_t timeout_ms);

#endif
