/* An authenticating listener: accepts connections, admits those that prove the job's secret, and passes each
 * of them on with its first request. The store's server has one (loop.h), and all endpoints of a process share one
 * (peer/domain.h). A listener belongs to one thread. */
#ifndef TD_OS_AUTH_LISTENER_H
#define TD_OS_AUTH_LISTENER_H

#include "base/auth.h"

#include <stddef.h>

enum { TD__AUTH_LISTENER_REQUEST = 64 }; /* the longest request */

struct td__auth_listener;

/** Takes over an admitted connection, non-blocking; `local` where it came by the unix socket. Called on the
 *  listener's thread, so it must not block, and does not close the listener. */
typedef void (*td__accept_fn)(void *arg, int fd, bool local, const uint8_t *request);

struct td__auth_listener_options {
    const struct td__secret *secret;
    const char
        *purpose; /* as for td__connect_trusted(); a string that lives as long as the listener */
    uint8_t identity[TD__IDENTITY_SIZE]; /* zeros where it is the only listener of its purpose */
    size_t request_size; /* bytes of the request that each client sends first; 0: none */
    td__accept_fn fn;
    /* NULL, or called now and then while there has been no descriptor for a client for some time; `error` is
     * EMFILE or ENFILE. */
    void (*full)(void *arg, int error);
    void *arg;
};

/** Opens a listener at the listening sockets `tcp_fd` and `local_fd`, -1 for none. They are taken over, also on
 *  failure. */
td_status td__auth_listener_open(int tcp_fd, int local_fd,
                                 const struct td__auth_listener_options *options,
                                 struct td__auth_listener **listener);

/** A descriptor for poll(): readable when there is something to do for td__auth_listener_turn(). */
int td__auth_listener_fd(const struct td__auth_listener *listener);

/** Accepts, reads and admits what is there, without waiting. Returns after how many milliseconds to call it again,
 *  where the descriptor is not readable before; -1: not before. */
int td__auth_listener_turn(struct td__auth_listener *listener);

/** Admits the connections that have sent their proof by now, and closes all others. */
void td__auth_listener_close(struct td__auth_listener *listener);

/** In a forked child, which has no such thread: closes the listening sockets. */
void td__auth_listener_abandon(struct td__auth_listener *listener);

#endif
