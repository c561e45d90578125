/* The door of an endpoint, and the thread that stands at it. */
#ifndef TD_TRANSPORT_RECEPTION_H
#define TD_TRANSPORT_RECEPTION_H

#include "os/door.h"

enum { TD__REQUEST_SIZE = 32 };

struct td__reception;

/** Starts to receive at the listening sockets `tcp_fd` and `local_fd`, which are taken over, also on
 *  failure; -1 for one that is not there. Guests must mean `identity`. `fn` gets each of them
 *  with its request of TD__REQUEST_SIZE bytes, on the reception's thread. */
td_status td__reception_open(int tcp_fd, int local_fd, const struct td__secret *secret,
                             const uint8_t identity[TD__IDENTITY_SIZE], td__guest_fn fn, void *arg,
                             struct td__reception **reception);

/** After this `fn` is not called any more. */
void td__reception_close(struct td__reception *reception);

#endif
