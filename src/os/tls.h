/* Sockets that may be encrypted: TLS 1.3 on a connection that has proven the job's secret.
 *
 *     td__sock_send(fd) ──> encrypts into records ──> send()  ...  recv() ──> decrypts ──> td__sock_recv(fd)
 *
 * Whoever has a connection of os/trust.h uses the functions below instead of those of the C library: they do the same on
 * any socket, and encrypt on those of td__tls_wrap(). The thread that sends or receives encrypts or decrypts, from and to
 * its own buffers. So that poll() and epoll tell the truth about a descriptor, no data that were received wait in memory: a
 * record of which only a part was taken stays in the kernel's buffer, with its last bytes at least.
 *
 * OpenSSL does the handshake: only version 1.3, with the key of the handshake before it (td__auth_key) as pre-shared key
 * and a fresh Diffie-Hellman exchange. With the secret, traffic that was recorded before cannot be decrypted. There are
 * no certificates. The records are computed here (tls_record.c), with the keys of that handshake.
 *
 * Bytes that were changed on the way end a connection: receiving fails with EBADMSG, and the log says so. */
#ifndef TD_OS_TLS_H
#define TD_OS_TLS_H

#include "base/auth.h"
#include "base/clock.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

struct td__tls;

/** What td__tls_wrap() has to say about a handshake that failed. */
struct td__tls_failure {
    int error;        /* an errno where the connection failed, 0 where TLS did */
    char reason[128]; /* where TLS did */
};

/**
 * Encrypts the non-blocking TCP connection `fd` from now on; closes it on failure.
 *
 * A client waits until both sides have proven the key, or the deadline has passed. A server, which may be an event loop,
 * does not: its calls of td__sock_recv() carry out the handshake, and fail with EAGAIN until it is done; nothing may be
 * sent before.
 *
 * Errors: TD_ERR_AUTH with *failure filled in, which may be NULL for a server; TD_ERR_NOMEM.
 */
td_status td__tls_wrap(int fd, bool server, const uint8_t key[TD__MAC_SIZE], td__deadline deadline,
                       struct td__tls_failure *failure);

#define TD__TLS_CHANGED "was cut off: TLS found that bytes were changed on the way"

/** TD__TLS_CHANGED where that is why receiving from `fd` has failed; else NULL. */
const char *td__tls_complaint(int fd);

/** The descriptor `to`, which now refers to the connection of `from`, is used instead of it (dup2()). */
void td__tls_move(int from, int to);

/** A new socket has this number: what was known about an earlier one is forgotten. */
void td__tls_forget(int fd);

/* ---- Sending and receiving: as the functions of the C library, never blocking on encrypted sockets ------------- */

extern atomic_bool td__tls_in_use; /* by this process, once */

/** What encrypts `fd`; NULL: nothing does. */
struct td__tls *td__tls_find(int fd);

ssize_t td__tls_send(struct td__tls *tls, const struct iovec *parts, size_t count);
ssize_t td__tls_recv(struct td__tls *tls, const struct iovec *parts, size_t count, bool peek);

static inline struct td__tls *td__tls_of(int fd)
{
    return atomic_load_explicit(&td__tls_in_use, memory_order_relaxed) ? td__tls_find(fd) : NULL;
}

/* Where td__sock_sendmsg() takes a part only, or nothing, the caller sends the rest, and nothing else, when the socket has
 * room again. */
static inline ssize_t td__sock_sendmsg(int fd, const struct msghdr *message, int flags)
{
    struct td__tls *tls = td__tls_of(fd);
    return tls ? td__tls_send(tls, message->msg_iov, message->msg_iovlen)
               : sendmsg(fd, message, flags);
}

static inline ssize_t td__sock_send(int fd, const void *data, size_t size, int flags)
{
    struct td__tls *tls = td__tls_of(fd);
    struct iovec part = {.iov_base = (void *)data, .iov_len = size};
    return tls ? td__tls_send(tls, &part, 1) : send(fd, data, size, flags);
}

static inline ssize_t td__sock_recvmsg(int fd, struct msghdr *message, int flags)
{
    struct td__tls *tls = td__tls_of(fd);
    return tls ? td__tls_recv(tls, message->msg_iov, message->msg_iovlen, flags & MSG_PEEK)
               : recvmsg(fd, message, flags);
}

/* MSG_PEEK sees no further than the end of a record, and a record begins with each td__sock_send(). */
static inline ssize_t td__sock_recv(int fd, void *data, size_t size, int flags)
{
    struct td__tls *tls = td__tls_of(fd);
    struct iovec part = {.iov_base = data, .iov_len = size};
    return tls ? td__tls_recv(tls, &part, 1, flags & MSG_PEEK) : recv(fd, data, size, flags);
}

/** Both announce the end to the other side. */
int td__sock_shutdown(int fd, int how);
int td__sock_close(int fd);

#endif
