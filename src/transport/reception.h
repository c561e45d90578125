/* The door of an endpoint: listens, lets in who proves the job's secret, and hands the connection on
 * together with the one request that came with it. */
#ifndef TD_TRANSPORT_RECEPTION_H
#define TD_TRANSPORT_RECEPTION_H

#include "base/auth.h"

enum { TD__REQUEST_SIZE = 32 };

struct td__reception;

/** A proven connection, handed over with its request; `local` where it came by the unix socket. On the
 *  reception's thread, so it must not block. */
typedef void (*td__guest_fn)(void *arg, int fd, bool local,
                             const uint8_t request[TD__REQUEST_SIZE]);

/** Starts to receive at the listening sockets `tcp_fd` and `local_fd`, which are taken over, also on
 *  failure; -1 for one that is not there. */
td_status td__reception_open(int tcp_fd, int local_fd, const struct td__secret *secret,
                             td__guest_fn fn, void *arg, struct td__reception **reception);

/** After this `fn` is not called any more. */
void td__reception_close(struct td__reception *reception);

#endif
