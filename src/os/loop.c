/* The loop thread; see loop.h. */
#include "os/loop.h"

#include "base/fail.h"
#include "base/thread.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { LOOP_FDS = 6 }; /* that a loop opens, some once in a process */

struct td__loop_call {
    struct td__loop_call *next;
    void (*fn)(void *);
    td_status (*try)(void *); /* instead of `fn` */
    void *arg;
    bool done;
    td_status status;
    struct td__error error; /* where `try` has failed: the last error is the thread's own */
    pthread_cond_t finished;
};

static void run_calls(uv_async_t *wake)
{
    struct td__loop *loop = wake->data;
    pthread_mutex_lock(&loop->lock);
    while (loop->calls) {
        struct td__loop_call *call = loop->calls;
        loop->calls = call->next;
        pthread_mutex_unlock(&loop->lock);
        if (call->fn)
            call->fn(call->arg);
        else if ((call->status = call->try(call->arg)))
            td__error_save(&call->error);
        pthread_mutex_lock(&loop->lock);
        call->done = true;
        pthread_cond_signal(&call->finished);
    }
    pthread_mutex_unlock(&loop->lock);
}

static void *run_loop(void *arg)
{
    struct td__loop *loop = arg;
    uv_run(&loop->uv, UV_RUN_DEFAULT); /* returns when the last handle is closed */
    return NULL;
}

/* Whether the process can have `count` descriptors more; 0, or an errno. */
static int find_descriptors(int count)
{
    int fd = eventfd(0, EFD_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = count > 1 ? find_descriptors(count - 1) : 0;
    close(fd);
    return error;
}

int td__uv_loop_init(uv_loop_t *loop)
{
    int error = find_descriptors(LOOP_FDS);
    return error ? -error : uv_loop_init(loop);
}

td_status td__loop_start(struct td__loop *loop, const char *name)
{
    loop->calls = NULL;
    int error = td__uv_loop_init(&loop->uv);
    if (!error && (error = uv_async_init(&loop->uv, &loop->wake, run_calls)))
        uv_loop_close(&loop->uv);
    if (error)
        return td_fail(TD_ERR_SYSTEM, "event loop: %s", td__errno_text(-error));
    loop->wake.data = loop;
    pthread_mutex_init(&loop->lock, NULL);
    error = td__thread_start(&loop->thread, name, run_loop, loop);
    if (error) {
        uv_close((uv_handle_t *)&loop->wake, NULL);
        uv_run(&loop->uv, UV_RUN_DEFAULT);
        uv_loop_close(&loop->uv);
        pthread_mutex_destroy(&loop->lock);
        return td_fail(TD_ERR_SYSTEM, "event loop: no thread (%s)", td__errno_text(error));
    }
    return TD_OK;
}

static void carry_out(struct td__loop *loop, struct td__loop_call *call)
{
    td__cond_init(&call->finished);
    pthread_mutex_lock(&loop->lock);
    struct td__loop_call **end = &loop->calls;
    while (*end)
        end = &(*end)->next;
    *end = call;
    uv_async_send(&loop->wake);
    while (!call->done)
        td__cond_wait(&call->finished, &loop->lock, TD__NEVER);
    pthread_mutex_unlock(&loop->lock);
    pthread_cond_destroy(&call->finished);
}

void td__loop_run(struct td__loop *loop, void (*fn)(void *), void *arg)
{
    struct td__loop_call call = {.fn = fn, .arg = arg};
    carry_out(loop, &call);
}

td_status td__loop_try(struct td__loop *loop, td_status (*fn)(void *), void *arg)
{
    struct td__loop_call call = {.try = fn, .arg = arg};
    carry_out(loop, &call);
    return call.status ? td__error_restore(&call.error) : TD_OK;
}

/* ---- A listener on a loop -------------------------------------------------------------------- */

static void on_timer(uv_timer_t *timer);

static void take_turn(struct td__loop_listener *served)
{
    int ms = td__auth_listener_turn(served->listener);
    if (ms < 0)
        uv_timer_stop(&served->timer);
    else
        uv_timer_start(&served->timer, on_timer, (uint64_t)ms, 0);
}

static void on_timer(uv_timer_t *timer)
{
    take_turn(timer->data);
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    take_turn(poll->data);
}

td_status td__loop_listen(struct td__loop *loop, int tcp_fd, int local_fd,
                          const struct td__auth_listener_options *options,
                          struct td__loop_listener *served)
{
    struct td__auth_listener *listener;
    TD_TRY(td__auth_listener_open(tcp_fd, local_fd, options, &listener));
    int error = uv_poll_init(&loop->uv, &served->poll, td__auth_listener_fd(listener));
    if (error) {
        td__auth_listener_close(listener);
        return td_fail(TD_ERR_SYSTEM, "%s: cannot listen: %s", options->purpose,
                       td__errno_text(-error));
    }
    uv_timer_init(&loop->uv, &served->timer);
    served->poll.data = served->timer.data = served;
    served->listener = listener;
    uv_poll_start(&served->poll, UV_READABLE, on_readable);
    return TD_OK;
}

void td__loop_unlisten(struct td__loop_listener *served)
{
    uv_close((uv_handle_t *)&served->poll, NULL);
    uv_close((uv_handle_t *)&served->timer, NULL);
    td__auth_listener_close(served->listener);
    served->listener = NULL;
}

/* ---- The end --------------------------------------------------------------------------------- */

static void close_wake(void *arg)
{
    struct td__loop *loop = arg;
    uv_close((uv_handle_t *)&loop->wake, NULL);
}

void td__loop_stop(struct td__loop *loop)
{
    td__loop_run(loop, close_wake, loop);
    pthread_join(loop->thread, NULL);
    uv_loop_close(&loop->uv);
    pthread_mutex_destroy(&loop->lock);
}
