/* The handshake of TLS by OpenSSL, and the table of connections; see tls.h.
 *
 * The key is proven twice: by the handshake before, so that a client without the secret never gets here, and by TLS
 * itself, since the key depends on that handshake. A client accepts no certificate: what does not
 * know the key has no other way.
 *
 * OpenSSL reads from the socket no further than the handshake's last record, gives us the two traffic secrets
 * (SSL_CTX_set_keylog_callback()), and is not needed any more. */
#include "os/tls_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/socket.h"

#include <errno.h>
#include <openssl/err.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

static const unsigned char identity[] = "tandem";
static const unsigned char cipher_id[] = {0x13, 0x01}; /* TLS_AES_128_GCM_SHA256 */

/* ---- Contexts: one for each side, made once -------------------------------------------------- */

static SSL_SESSION *key_session(SSL *ssl)
{
    const struct td__tls *tls = SSL_get_app_data(ssl);
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, cipher_id);
    SSL_SESSION *session = SSL_SESSION_new();
    if (session && cipher && SSL_SESSION_set1_master_key(session, tls->key, sizeof tls->key) &&
        SSL_SESSION_set_cipher(session, cipher) &&
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION))
        return session;
    SSL_SESSION_free(session);
    return NULL;
}

static int use_key(SSL *ssl, const EVP_MD *digest, const unsigned char **id, size_t *id_size,
                   SSL_SESSION **session)
{
    if (digest && EVP_MD_get_type(digest) != NID_sha256)
        return 0;
    *session = key_session(ssl);
    *id = identity;
    *id_size = sizeof identity;
    return *session != NULL;
}

static int find_key(SSL *ssl, const unsigned char *id, size_t id_size, SSL_SESSION **session)
{
    *session = NULL;
    if (id_size != sizeof identity || memcmp(id, identity, id_size) != 0)
        return 1;
    *session = key_session(ssl);
    return *session != NULL;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "LABEL random secret", the last two in hexadecimal digits. */
static void take_secret(const SSL *ssl, const char *line)
{
    static const char *const labels[2] = {"CLIENT_TRAFFIC_SECRET_0 ", "SERVER_TRAFFIC_SECRET_0 "};
    struct td__tls *tls = SSL_get_app_data(ssl);
    for (int side = 0; side < 2; side++) {
        if (strncmp(line, labels[side], strlen(labels[side])) != 0)
            continue;
        struct td__tls_keys *keys = tls->server == side ? &tls->out : &tls->in;
        const char *at = strrchr(line, ' ') + 1;
        for (size_t i = 0; i < TD__TLS_SECRET && digit(at[0]) >= 0 && digit(at[1]) >= 0;
             i++, at += 2)
            keys->secret[i] = (uint8_t)(digit(at[0]) << 4 | digit(at[1]));
    }
}

static SSL_CTX *make_context(bool server)
{
    SSL_CTX *context = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    if (!context)
        return NULL;
    if (!SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) ||
        !SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") ||
        !SSL_CTX_set1_groups_list(context, "X25519:P-256") ||
        (server && !SSL_CTX_set_num_tickets(context, 0))) {
        SSL_CTX_free(context);
        return NULL;
    }
    SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_read_ahead(context, 0); /* the records after the handshake are not OpenSSL's */
    SSL_CTX_set_keylog_callback(context, take_secret);
    if (server) {
        SSL_CTX_set_psk_find_session_callback(context, find_key);
    } else {
        SSL_CTX_set_psk_use_session_callback(context, use_key);
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL); /* and no certificate is trusted */
    }
    return context;
}

/* ---- The socket, for OpenSSL: its own functions would raise SIGPIPE ----------------------------- */

static int socket_write(BIO *bio, const char *data, int size)
{
    const struct td__tls *tls = BIO_get_data(bio);
    int sent = (int)send(tls->fd, data, (size_t)size, MSG_NOSIGNAL | MSG_DONTWAIT);
    BIO_clear_retry_flags(bio);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR))
        BIO_set_retry_write(bio);
    return sent;
}

static int socket_read(BIO *bio, char *data, int room)
{
    const struct td__tls *tls = BIO_get_data(bio);
    int got = (int)recv(tls->fd, data, (size_t)room, MSG_DONTWAIT);
    BIO_clear_retry_flags(bio);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        BIO_set_retry_read(bio);
    if (got == 0)
        BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
    return got;
}

static long socket_control(BIO *bio, int command, long number, void *pointer)
{
    (void)number;
    (void)pointer;
    if (command == BIO_CTRL_EOF)
        return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0;
    return command == BIO_CTRL_FLUSH;
}

static SSL_CTX *contexts[2]; /* client, server: kept for the life of the process … */
static BIO_METHOD *method;   /* … as this is */

static void make_contexts(void)
{
    contexts[0] = make_context(false);
    contexts[1] = make_context(true);
    method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
    if (method) {
        BIO_meth_set_write(method, socket_write);
        BIO_meth_set_read(method, socket_read);
        BIO_meth_set_ctrl(method, socket_control);
    }
}

static SSL_CTX *context_of(bool server)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_contexts);
    return contexts[server];
}

static BIO *make_bio(struct td__tls *tls)
{
    BIO *bio = method ? BIO_new(method) : NULL;
    if (bio) {
        BIO_set_data(bio, tls);
        BIO_set_init(bio, 1);
    }
    return bio;
}

/* ---- The table of connections: by descriptor, in chunks that stay -------------------------------- */

enum { CHUNK = 1024, CHUNKS = 4096 };

atomic_bool td__tls_in_use;
static _Atomic(struct td__tls *) *_Atomic chunks[CHUNKS];

static _Atomic(struct td__tls *) *place_of(int fd)
{
    _Atomic(struct td__tls *) *chunk = fd >= 0 && fd < CHUNK * CHUNKS
                                           ? atomic_load_explicit(&chunks[fd / CHUNK],
                                                                  memory_order_acquire)
                                           : NULL;
    return chunk ? &chunk[fd % CHUNK] : NULL;
}

struct td__tls *td__tls_find(int fd)
{
    _Atomic(struct td__tls *) *place = place_of(fd);
    return place ? atomic_load_explicit(place, memory_order_acquire) : NULL;
}

static bool make_place(int fd)
{
    if (fd >= CHUNK * CHUNKS)
        return false;
    if (place_of(fd))
        return true;
    _Atomic(struct td__tls *) *none = NULL, *chunk = calloc(CHUNK, sizeof *chunk);
    if (chunk && !atomic_compare_exchange_strong(&chunks[fd / CHUNK], &none, chunk))
        free(chunk); /* another thread has made it */
    return place_of(fd);
}

/* In a forked child the locks may be held by threads that it does not have: it only forgets. */
static void free_tls(struct td__tls *tls)
{
    if (!tls)
        return;
    SSL_free(tls->ssl);
    td__gcm_free(&tls->in.gcm);
    td__gcm_free(&tls->out.gcm);
    if (tls->text)
        OPENSSL_cleanse(tls->text, TD__TLS_TEXT);
    free(tls->text);
    free(tls->part);
    free(tls->wire);
    if (tls->fork_generation == td__fork_generation()) {
        pthread_mutex_destroy(&tls->recv_lock);
        pthread_mutex_destroy(&tls->send_lock);
    }
    OPENSSL_cleanse(tls, sizeof *tls);
    free(tls);
}

static struct td__tls *replace(int fd, struct td__tls *tls)
{
    _Atomic(struct td__tls *) *place = place_of(fd);
    return place ? atomic_exchange(place, tls) : NULL;
}

void td__tls_forget(int fd)
{
    if (td__tls_of(fd))
        free_tls(replace(fd, NULL));
}

void td__tls_move(int from, int to)
{
    if (!atomic_load(&td__tls_in_use))
        return;
    struct td__tls *tls = replace(from, NULL);
    td__tls_forget(to);
    if (!tls)
        return;
    tls->fd = to;
    if (make_place(to))
        replace(to, tls);
    else
        free_tls(tls);
}

int td__sock_shutdown(int fd, int how)
{
    struct td__tls *tls = td__tls_of(fd);
    if (tls && how != SHUT_RD)
        td__tls_say_end(tls, false);
    return shutdown(fd, how);
}

int td__sock_close(int fd)
{
    struct td__tls *tls = td__tls_of(fd);
    if (tls) {
        td__tls_say_end(tls, false);
        td__tls_forget(fd);
    }
    return close(fd);
}

const char *td__tls_complaint(int fd)
{
    const struct td__tls *tls = td__tls_of(fd);
    return tls && atomic_load(&tls->changed) ? TD__TLS_CHANGED : NULL;
}

/* ---- The handshake --------------------------------------------------------------------------- */

static void describe_failure(int error, struct td__tls_failure *failure)
{
    unsigned long code = ERR_peek_error();
    bool cut = !code || ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
    const char *reason = code ? ERR_reason_error_string(code) : NULL;
    failure->error = cut ? (error ? error : ECONNRESET) : 0;
    snprintf(failure->reason, sizeof failure->reason, "%s", reason ? reason : "unknown");
}

/* OpenSSL has done its part. */
static bool begin_records(struct td__tls *tls, struct td__tls_failure *failure)
{
    bool with_key = SSL_session_reused(tls->ssl); /* and not without it */
    SSL_free(tls->ssl);
    tls->ssl = NULL;
    OPENSSL_cleanse(tls->key, sizeof tls->key);
    bool made = with_key && td__tls_set_keys(&tls->in, tls->in.secret) &&
                td__tls_set_keys(&tls->out, tls->out.secret);
    if (!made)
        *failure = (struct td__tls_failure){.reason = "the key was not used"};
    atomic_store_explicit(&tls->open, made, memory_order_release);
    return made;
}

int td__tls_shake(struct td__tls *tls, struct td__tls_failure *failure)
{
    if (!tls->ssl) {
        *failure = (struct td__tls_failure){.error = ECONNRESET};
        return -1;
    }
    ERR_clear_error();
    errno = 0;
    int result = SSL_do_handshake(tls->ssl), error = errno;
    int what = SSL_get_error(tls->ssl, result);
    if (what == SSL_ERROR_NONE)
        return begin_records(tls, failure) ? 1 : -1;
    if (what == SSL_ERROR_WANT_READ || what == SSL_ERROR_WANT_WRITE)
        return 0;
    describe_failure(error, failure);
    if (tls->server && !failure->error)
        td_log(TD_LOG_WARN,
               "a client that had proven the job's secret failed in TLS (%s): the bytes may be "
               "changed on the way",
               failure->reason);
    SSL_free(tls->ssl);
    tls->ssl = NULL;
    return -1;
}

static td_status shake_as_client(struct td__tls *tls, td__deadline deadline,
                                 struct td__tls_failure *failure)
{
    for (;;) {
        pthread_mutex_lock(&tls->recv_lock);
        int step = td__tls_shake(tls, failure);
        pthread_mutex_unlock(&tls->recv_lock);
        if (step > 0)
            return TD_OK;
        if (step == 0)
            failure->error = td__wait_fd(tls->fd, POLLIN, deadline);
        if (step < 0 || failure->error)
            return td_fail(TD_ERR_AUTH, "TLS: the handshake failed: %s",
                           failure->error ? td__errno_text(failure->error) : failure->reason);
    }
}

td_status td__tls_wrap(int fd, bool server, const uint8_t key[TD__MAC_SIZE], td__deadline deadline,
                       struct td__tls_failure *failure)
{
    SSL_CTX *context = context_of(server);
    SSL *ssl = context ? SSL_new(context) : NULL;
    struct td__tls *tls = aligned_alloc(64, (sizeof *tls + 63) / 64 * 64);
    BIO *bio = ssl && tls && make_place(fd) ? make_bio(tls) : NULL;
    if (!bio) {
        SSL_free(ssl);
        free(tls);
        close(fd);
        return td__fail_nomem("TLS");
    }
    SSL_set_bio(ssl, bio, bio);
    memset(tls, 0, sizeof *tls);
    tls->fd = fd;
    tls->fork_generation = td__fork_generation();
    tls->ssl = ssl;
    tls->server = server;
    memcpy(tls->key, key, sizeof tls->key);
    pthread_mutex_init(&tls->recv_lock, NULL);
    pthread_mutex_init(&tls->send_lock, NULL);
    SSL_set_app_data(ssl, tls);
    if (server)
        SSL_set_accept_state(ssl);
    else
        SSL_set_connect_state(ssl);
    free_tls(replace(fd, tls));
    atomic_store(&td__tls_in_use, true);
    if (server)
        return TD_OK;
    *failure = (struct td__tls_failure){0};
    td_status status = shake_as_client(tls, deadline, failure);
    if (status)
        td__sock_close(fd);
    return status;
}
