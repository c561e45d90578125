/* The listener of a server: listens, lets in who proves the job's secret, and hands the connection on
 * together with the request that came with it. The store and the endpoints of ranks each have one. */
#ifndef TD_OS_AUTH_LISTENER_H
#define TD_OS_AUTH_LISTENER_H

#include "base/auth.h"
#include "os/loop.h"

enum { TD__AUTH_LISTENER_REQUEST = 64 }; /* the longest request */

struct td__auth_listener;

/** A proven connection, non-blocking; `local` where it came by the unix socket. It belongs to the one who
 *  is called. On the loop's thread, so it must not block. */
typedef void (*td__accept_fn)(void *arg, int fd, bool local, const uint8_t *request);

struct td__auth_listener_options {
    const struct td__secret *secret;
    const char
        *purpose; /* as for td__connect_trusted(); a string that lives as long as the listener */
    uint8_t identity[TD__IDENTITY_SIZE]; /* zeros where it is the only listener of its purpose */
    size_t request_size;                 /* what each client says first; 0: nothing */
    td__accept_fn fn;
    /* NULL, or called now and then while there has been no descriptor for a client for some time; `error` says
     * which limit it is. */
    void (*full)(void *arg, int error);
    void *arg;
};

/** Opens a listener at the listening sockets `tcp_fd` and `local_fd`, -1 for one that is not there. They are
 *  taken over, also on failure. On the loop's thread, as all that happens at the listener. */
td_status td__auth_listener_open(struct td__loop *loop, int tcp_fd, int local_fd,
                                 const struct td__auth_listener_options *options,
                                 struct td__auth_listener **listener);

/** Nobody comes in any more, but for those who have sent their proof by now. On the loop's thread; the
 *  listener frees itself once its handles are closed. */
void td__auth_listener_close(struct td__auth_listener *listener);

/** In a forked child, which has no such thread: closes the listening sockets. */
void td__auth_listener_abandon(struct td__auth_listener *listener);

#endif
