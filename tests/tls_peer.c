/* OpenSSL at one side of a connection; see tls_peer.h. */
#include "tls_peer.h"

#include "runner.h"

#include "os/socket.h"
#include "os/tls_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>

const uint8_t tls_peer_key[TD__MAC_SIZE] = "a key that both of them have";

td__deadline tls_peer_soon(void)
{
    return td__deadline_in_ms(20000 * td_test_slowness());
}

void tls_peer_tcp_pair(int fds[2])
{
    struct td__address_list list;
    bool retry;
    CHECK_OK(td__resolve("127.0.0.1", 0, tls_peer_soon(), &list, &retry));
    int listener = td__listen_on(&list.at[0]);
    CHECK(listener >= 0);
    struct td__address address;
    td__local_address(listener, &address);
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* which a fork may use, too */
    CHECK_EQ(connect(fds[0], &address.any, address.size), 0);
    CHECK_EQ(fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
    CHECK_EQ(td__wait_fd(listener, POLLIN, tls_peer_soon()), 0);
    fds[1] = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(fds[1] >= 0);
    close(listener);
}

static void shake_as_server(int fd)
{
    char byte;
    CHECK_OK(td__tls_wrap(fd, true, tls_peer_key, tls_peer_soon(), NULL));
    while (td__sock_recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN &&
           !atomic_load(&td__tls_of(fd)->open))
        CHECK_EQ(td__wait_fd(fd, POLLIN, tls_peer_soon()), 0);
}

static void *run_server(void *arg)
{
    shake_as_server(*(int *)arg);
    return NULL;
}

void tls_peer_pair(int ends[2])
{
    struct td__tls_failure failure;
    pthread_t thread;
    tls_peer_tcp_pair(ends);
    CHECK_EQ(pthread_create(&thread, NULL, run_server, &ends[1]), 0);
    CHECK_OK(td__tls_wrap(ends[0], false, tls_peer_key, tls_peer_soon(), &failure));
    pthread_join(thread, NULL);
}

/* ---- OpenSSL's side -------------------------------------------------------------------------- */

static SSL_SESSION *make_session(SSL *ssl)
{
    static const unsigned char cipher[] = {0x13, 0x01};
    SSL_SESSION *session = SSL_SESSION_new();
    CHECK(session && SSL_SESSION_set1_master_key(session, tls_peer_key, sizeof tls_peer_key) &&
          SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, cipher)) &&
          SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION));
    return session;
}

static int use_key(SSL *ssl, const EVP_MD *digest, const unsigned char **id, size_t *id_size,
                   SSL_SESSION **session)
{
    (void)digest;
    *session = make_session(ssl);
    *id = (const unsigned char *)"tandem";
    *id_size = sizeof "tandem";
    return 1;
}

static int find_key(SSL *ssl, const unsigned char *id, size_t id_size, SSL_SESSION **session)
{
    CHECK_EQ(id_size, sizeof "tandem");
    CHECK_MEM(id, "tandem", id_size);
    *session = make_session(ssl);
    return 1;
}

int tls_peer_open(struct tls_peer *peer, bool server)
{
    int fds[2];
    tls_peer_tcp_pair(fds);
    peer->fd = fds[1];
    CHECK_EQ(fcntl(peer->fd, F_SETFL, 0), 0);
    peer->context = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    CHECK(peer->context && SSL_CTX_set_num_tickets(peer->context, 0));
    /* As an ordinary program has it: only the key is as in the library. */
    SSL_CTX_set_psk_find_session_callback(peer->context, find_key);
    SSL_CTX_set_psk_use_session_callback(peer->context, use_key);
    peer->ssl = SSL_new(peer->context);
    CHECK(peer->ssl && SSL_set_fd(peer->ssl, peer->fd));
    SSL_set_block_padding(peer->ssl, 64); /* records with zeros at the end */
    if (server)
        SSL_set_accept_state(peer->ssl);
    else
        SSL_set_connect_state(peer->ssl);
    return fds[0];
}

void tls_peer_shake(struct tls_peer *peer)
{
    CHECK_EQ(SSL_do_handshake(peer->ssl), 1);
    CHECK(SSL_session_reused(peer->ssl));
}

void tls_peer_join(struct tls_peer *peer, int fd, bool server)
{
    struct td__tls_failure failure;
    (void)peer;
    if (server)
        shake_as_server(fd);
    else
        CHECK_OK(td__tls_wrap(fd, false, tls_peer_key, tls_peer_soon(), &failure));
}

void tls_peer_close(struct tls_peer *peer)
{
    SSL_free(peer->ssl);
    SSL_CTX_free(peer->context);
    close(peer->fd);
}
