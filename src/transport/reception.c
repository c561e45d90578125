/* The door of an endpoint; see reception.h. What happens at it is os/door.c's. */
#include "transport/reception.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct td__reception {
    struct td__loop loop;
    struct td__door *door;
};

struct start {
    struct td__reception *reception;
    int tcp_fd, local_fd;
    struct td__door_options options;
    td_status status;
    char error[256];
};

/* The sentence about a failure is the thread's own, so it is handed over. */
static void start_on_loop(void *arg)
{
    struct start *start = arg;
    struct td__reception *reception = start->reception;
    start->status = td__door_open(&reception->loop, start->tcp_fd, start->local_fd, &start->options,
                                  &reception->door);
    if (start->status)
        snprintf(start->error, sizeof start->error, "%s", td_last_error());
}

static void stop_on_loop(void *arg)
{
    td__door_close(((struct td__reception *)arg)->door);
}

td_status td__reception_open(int tcp_fd, int local_fd, const struct td__secret *secret,
                             const uint8_t identity[TD__IDENTITY_SIZE], td__guest_fn fn, void *arg,
                             struct td__reception **reception_out)
{
    struct td__reception *reception = calloc(1, sizeof *reception);
    td_status status = reception ? td__loop_start(&reception->loop, "td-endpoint")
                                 : td__fail_nomem("endpoint");
    if (status) {
        if (tcp_fd >= 0)
            close(tcp_fd);
        if (local_fd >= 0)
            close(local_fd);
        free(reception);
        return status;
    }
    struct start start = {.reception = reception,
                          .tcp_fd = tcp_fd,
                          .local_fd = local_fd,
                          .options = {.secret = secret,
                                      .purpose = "link",
                                      .request_size = TD__REQUEST_SIZE,
                                      .fn = fn,
                                      .arg = arg}};
    memcpy(start.options.identity, identity, TD__IDENTITY_SIZE);
    td__loop_run(&reception->loop, start_on_loop, &start);
    if (start.status) {
        td__loop_stop(&reception->loop);
        free(reception);
        return td__fail(start.status, "%s", start.error);
    }
    *reception_out = reception;
    return TD_OK;
}

void td__reception_close(struct td__reception *reception)
{
    td__loop_run(&reception->loop, stop_on_loop, reception);
    td__loop_stop(&reception->loop);
    free(reception);
}
