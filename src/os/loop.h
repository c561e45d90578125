/* A libuv loop with a thread of its own: what a server inside the library runs on.
 *
 * Handles belong to the loop's thread. Other threads reach them by td__loop_run(), which runs a
 * function there and waits for it. */
#ifndef TD_OS_LOOP_H
#define TD_OS_LOOP_H

#include <tandem/base.h>

#include <pthread.h>
#include <uv.h>

struct td__loop_call;

struct td__loop {
    uv_loop_t uv;
    pthread_t thread;
    uv_async_t wake;
    pthread_mutex_t lock; /* protects calls */
    struct td__loop_call *calls;
};

/** uv_loop_init(), but -EMFILE where the process has no descriptors left: libuv aborts then. */
int td__uv_loop_init(uv_loop_t *loop);

/** Starts the thread; `name` has at most 15 characters. */
td_status td__loop_start(struct td__loop *loop, const char *name);

/** Runs fn(arg) on the loop's thread, and returns when it has. Not from that thread itself. */
void td__loop_run(struct td__loop *loop, void (*fn)(void *), void *arg);

/** The same for a function that can fail: returns its status, with its last error. */
td_status td__loop_try(struct td__loop *loop, td_status (*fn)(void *), void *arg);

/** Ends the thread once every other handle is closed, and frees the loop. */
void td__loop_stop(struct td__loop *loop);

#endif
