/* A libuv loop with a thread of its own: what a server inside the library runs on.
 *
 * Handles belong to the loop's thread. Other threads reach them by td__loop_run(), which runs a
 * function there and waits for it. */
#ifndef TD_OS_LOOP_H
#define TD_OS_LOOP_H

#include "os/auth_listener.h"

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

/** Runs a listener on the loop, as td__auth_listener_open() opens it. */
struct td__loop_listener {
    uv_poll_t poll;
    uv_timer_t timer;
    struct td__auth_listener *listener;
};

/** Both on the loop's thread. `served` lives until the loop has ended. */
td_status td__loop_listen(struct td__loop *loop, int tcp_fd, int local_fd,
                          const struct td__auth_listener_options *options,
                          struct td__loop_listener *served);
void td__loop_unlisten(struct td__loop_listener *served);

/** Ends the thread once every other handle is closed, and frees the loop. */
void td__loop_stop(struct td__loop *loop);

#endif
