/* The store's server: one thread, one event loop, any number of clients. */
#ifndef TD_STORE_TCP_SERVER_H
#define TD_STORE_TCP_SERVER_H

#include "base/auth.h"
#include "base/clock.h"

struct td__tcp_server;

/** Serves at the listening socket `fd`, and at `shortcut` (-1: none), a unix socket beside it. Takes
 *  both over, also when it fails. */
td_status td__tcp_server_start(int fd, int shortcut, const struct td__secret *secret,
                               struct td__tcp_server **server);

/** Takes no new client from now on, waits until the present ones have left or the deadline has
 *  passed, sends what is still to be sent, and ends. */
void td__tcp_server_stop(struct td__tcp_server *server, td__deadline deadline);

/** In a forked child: closes the descriptors; the thread and its memory are the parent's. */
void td__tcp_server_abandon(struct td__tcp_server *server);

#endif
