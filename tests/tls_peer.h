/* OpenSSL itself at one side of a TCP connection over loopback, with the key of the tests; and pairs of ours. */
#ifndef TANDEM_TESTS_TLS_PEER_H
#define TANDEM_TESTS_TLS_PEER_H

#include "base/auth.h"
#include "base/clock.h"

#include <openssl/ssl.h>
#include <stdbool.h>

extern const uint8_t tls_peer_key[TD__MAC_SIZE];

struct tls_peer {
    SSL_CTX *context;
    SSL *ssl;
    int fd;
};

td__deadline tls_peer_soon(void);

/** Two ends of a TCP connection. */
void tls_peer_tcp_pair(int fds[2]);

/** Both ends by the library: ends[0] is the client. */
void tls_peer_pair(int ends[2]);

/** OpenSSL's side; returns the other end, for tls_peer_join(). */
int tls_peer_open(struct tls_peer *peer, bool server);

/** Its handshake, in a thread of its own. */
void tls_peer_shake(struct tls_peer *peer);

/** The handshake of the library's side. */
void tls_peer_join(struct tls_peer *peer, int fd, bool server);

void tls_peer_close(struct tls_peer *peer);

#endif
