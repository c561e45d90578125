/* The listener of an endpoint, and the thread that stands at it. */
#ifndef TD_PEER_ENDPOINT_LISTENER_H
#define TD_PEER_ENDPOINT_LISTENER_H

#include "os/auth_listener.h"

enum { TD__REQUEST_SIZE = 32 };

struct td__endpoint_listener;

/** Starts to receive at the listening sockets `tcp_fd` and `local_fd`, which are taken over, also on
 *  failure; -1 for one that is not there. Clients must mean `identity`. `fn` gets each of them
 *  with its request of TD__REQUEST_SIZE bytes, on the listener's thread. */
td_status td__endpoint_listener_open(int tcp_fd, int local_fd, const struct td__secret *secret,
                                     const uint8_t identity[TD__IDENTITY_SIZE], td__accept_fn fn,
                                     void *arg, struct td__endpoint_listener **listener);

/** After this `fn` is not called any more. */
void td__endpoint_listener_close(struct td__endpoint_listener *listener);

#endif
