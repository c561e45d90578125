/* Connections that are proven: reaching a server of the job, and listening for its clients.
 *
 * The rule for both sides: with the job's secret anywhere; without it on loopback and unix sockets only,
 * where a key of the user's own secret is used instead, unless TANDEM_INSECURE=1. Over a unix socket the
 * other side must also run as our user. Where the job asks for TLS, TCP is encrypted (os/tls.h), on loopback,
 * too. os/auth_listener.h serves the listening sockets. */
#ifndef TD_OS_TRUST_H
#define TD_OS_TRUST_H

#include "base/auth.h"
#include "os/address.h"

/**
 * Connects to `host`:`port` and proves the secret both ways. While nothing listens there yet, or the
 * connection is closed without an answer, as by a proxy whose server has not started yet, it tries again
 * until the deadline. A server that refuses the secret says so, and is not tried again. A host name that
 * cannot be resolved is tried for 10 s at most.
 *
 * `purpose` names the kind of server, in the proof and in messages ("store"), and `identity`
 * (TD__IDENTITY_SIZE bytes) the one that is meant among several; NULL where there is only one. A client has
 * the identity from the server itself, so where nothing listens any more, the server has ended: TD_ERR_PEER,
 * at once. *fd is a stream socket, non-blocking: TCP, a unix socket, or the plain end of TLS.
 *
 * Errors: TD_ERR_TIMEOUT lists each address tried with its reason; TD_ERR_PEER; TD_ERR_AUTH; TD_ERR_INVALID;
 * TD_ERR_SYSTEM where this process has no descriptor left.
 */
td_status td__connect_trusted(const char *host, int port, const char *purpose,
                              const uint8_t *identity, const struct td__secret *secret,
                              td__deadline deadline, int *fd);

/** A server at a loopback address also listens at a unix socket that is named after that address: half
 *  the latency for its clients, which try it first. `tcp_fd` is its listening socket; one that
 *  listens on every address counts as 127.0.0.1. Returns the unix socket, or -1 when there is none;
 *  then clients use TCP. */
int td__listen_shortcut(int tcp_fd, const char *purpose);

/** Listens as `host` says: on loopback only when it is a loopback address or without a secret, else
 *  on every address. Where another user holds an abstract name, one beside it is taken, where clients look,
 *  too. *port_out receives the port. The secret is bound to the address. TD_ERR_SYSTEM names a port that is
 *  taken. */
td_status td__listen_trusted(const char *host, int port, const char *purpose,
                             struct td__secret *secret, td__deadline deadline, int *fd,
                             int *port_out);

#endif
