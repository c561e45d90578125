/* The listener of an endpoint; see endpoint_listener.h. What happens at it is os/auth_listener.c's. */
#include "peer/endpoint_listener.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct td__endpoint_listener {
    struct td__loop loop;
    struct td__auth_listener *listener;
};

struct start {
    struct td__endpoint_listener *listener;
    int tcp_fd, local_fd;
    struct td__auth_listener_options options;
    td_status status;
    char error[256];
};

/* The sentence about a failure is the thread's own, so it is handed over. */
static void start_on_loop(void *arg)
{
    struct start *start = arg;
    struct td__endpoint_listener *listener = start->listener;
    start->status = td__auth_listener_open(&listener->loop, start->tcp_fd, start->local_fd,
                                           &start->options, &listener->listener);
    if (start->status)
        snprintf(start->error, sizeof start->error, "%s", td_last_error());
}

static void stop_on_loop(void *arg)
{
    td__auth_listener_close(((struct td__endpoint_listener *)arg)->listener);
}

td_status td__endpoint_listener_open(int tcp_fd, int local_fd, const struct td__secret *secret,
                                     const uint8_t identity[TD__IDENTITY_SIZE], td__accept_fn fn,
                                     void *arg, struct td__endpoint_listener **listener_out)
{
    struct td__endpoint_listener *listener = calloc(1, sizeof *listener);
    td_status status = listener ? td__loop_start(&listener->loop, "td-endpoint")
                                : td__fail_nomem("endpoint");
    if (status) {
        if (tcp_fd >= 0)
            close(tcp_fd);
        if (local_fd >= 0)
            close(local_fd);
        free(listener);
        return status;
    }
    struct start start = {.listener = listener,
                          .tcp_fd = tcp_fd,
                          .local_fd = local_fd,
                          .options = {.secret = secret,
                                      .purpose = "link",
                                      .request_size = TD__REQUEST_SIZE,
                                      .fn = fn,
                                      .arg = arg}};
    memcpy(start.options.identity, identity, TD__IDENTITY_SIZE);
    td__loop_run(&listener->loop, start_on_loop, &start);
    if (start.status) {
        td__loop_stop(&listener->loop);
        free(listener);
        return td_fail(start.status, "%s", start.error);
    }
    *listener_out = listener;
    return TD_OK;
}

void td__endpoint_listener_close(struct td__endpoint_listener *listener)
{
    td__loop_run(&listener->loop, stop_on_loop, listener);
    td__loop_stop(&listener->loop);
    free(listener);
}
