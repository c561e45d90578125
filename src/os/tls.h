/* TLS on a connection that has proven the job's secret.
 *
 *     its user ── plain end ══ socketpair ══ pump ── TLS ── wire (TCP) ── the other host
 *
 * Everything above uses plain descriptors (poll, epoll, sendmsg, libuv), so it is given one: one end of a
 * socketpair. One thread of the process, "td-tls", moves bytes between the other ends and their
 * connections. It is started with the first of them and ends with the last.
 *
 * TLS 1.3 only, with the key of the handshake (td__auth_key) as pre-shared key and a fresh
 * Diffie-Hellman exchange: with the secret, traffic that was recorded before cannot be decrypted. There are
 * no certificates.
 *
 * An end passes through: shutdown() of the plain end arrives as the end of the stream at the other
 * side, and close() does when all that was written before has arrived. A connection that breaks
 * ends the plain end; whether it broke or was closed does not show there, so a protocol that needs
 * to know sends a last message, as all of ours do. Bytes that were changed on the way end it, too: the log says so,
 * and td__tls_complaint(). */
#ifndef TD_OS_TLS_H
#define TD_OS_TLS_H

#include "base/auth.h"
#include "base/clock.h"

/** What td__tls_wrap() has to say about a handshake that failed. */
struct td__tls_failure {
    int error;        /* an errno where the connection failed, 0 where TLS did */
    char reason[128]; /* where TLS did */
};

/**
 * Encrypts the connection `fd`, which is taken over, also on failure. *plain_fd is non-blocking and
 * close-on-exec, and belongs to the caller.
 *
 * A client waits until both sides have proven the key, or the deadline has passed. A server, which may be
 * an event loop, does not: *plain_fd ends where the handshake fails, or takes longer than the deadline.
 *
 * Errors: TD_ERR_AUTH with *failure filled in, which may be NULL for a server; TD_ERR_SYSTEM,
 * TD_ERR_NOMEM.
 */
td_status td__tls_wrap(int fd, bool server, const uint8_t key[TD__MAC_SIZE], td__deadline deadline,
                       struct td__tls_failure *failure, int *plain_fd);

#define TD__TLS_CHANGED "was cut off: TLS found that bytes were changed on the way"

/** TD__TLS_CHANGED where that is why the plain end `fd` has ended; NULL otherwise, and for every other
 *  descriptor. */
const char *td__tls_complaint(int fd);

/** The plain end `fd` belongs to `owner`: a world, a store. Nothing happens for any other descriptor. */
void td__tls_set_owner(int fd, const void *owner);

/** Waits until all that was written to plain ends of this owner (NULL: those without one) that are closed by now has
 *  reached the other side, or the deadline has passed. For an owner that ends: what is left of its plain ends has no
 *  owner then. An exit() waits a little, too. */
void td__tls_drain(const void *owner, td__deadline deadline);

#endif
