/* TLS by OpenSSL; see tls.h. The thread that calls what is here is in tls_pump.c.
 *
 * The key is proven twice: by the handshake before, so that a client without the secret never gets here, and by TLS
 * itself, since the key depends on that handshake. A client accepts no certificate: what does not
 * know the key has no other way. */
#include "base/fail.h"
#include "os/socket.h"
#include "os/tls_internal.h"

#include <errno.h>
#include <openssl/err.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const unsigned char identity[] = "tandem";
static const unsigned char cipher_id[] = {0x13, 0x01}; /* TLS_AES_128_GCM_SHA256 */

uint64_t td__tls_key_limit = (uint64_t)64 << 30;

/* ---- Contexts: one for each side, made once -------------------------------------------------- */

static SSL_SESSION *key_session(SSL *ssl)
{
    const struct td__tls_link *link = SSL_get_app_data(ssl);
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, cipher_id);
    SSL_SESSION *session = SSL_SESSION_new();
    if (session && cipher && SSL_SESSION_set1_master_key(session, link->key, sizeof link->key) &&
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

static SSL_CTX *make_context(bool server)
{
    SSL_CTX *context = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    if (!context)
        return NULL;
    if (!SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") ||
        !SSL_CTX_set1_groups_list(context, "X25519:P-256") ||
        (server && !SSL_CTX_set_num_tickets(context, 0))) {
        SSL_CTX_free(context);
        return NULL;
    }
    SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, 64 << 10);
    if (server) {
        SSL_CTX_set_psk_find_session_callback(context, find_key);
    } else {
        SSL_CTX_set_psk_use_session_callback(context, use_key);
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL); /* and no certificate is trusted */
    }
    return context;
}

static SSL_CTX *contexts[2]; /* client, server: kept for the life of the process */

static void make_contexts(void)
{
    contexts[0] = make_context(false);
    contexts[1] = make_context(true);
}

static SSL_CTX *context_of(bool server)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_contexts);
    return contexts[server];
}

/* ---- Steps ----------------------------------------------------------------------------------- */

/* Judges what an operation of OpenSSL returned. */
static enum td__tls_step step_of(struct td__tls_link *link, int result)
{
    switch (SSL_get_error(link->ssl, result)) {
    case SSL_ERROR_NONE:
        return TD__TLS_MORE;
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
        return TD__TLS_WAITS;
    case SSL_ERROR_ZERO_RETURN:
        return TD__TLS_ENDED;
    default:
        return TD__TLS_FAILED;
    }
}

static void describe_failure(int error, struct td__tls_failure *failure)
{
    unsigned long code = ERR_peek_error();
    bool cut = !code || ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
    const char *reason = code ? ERR_reason_error_string(code) : NULL;
    failure->error = cut ? (error ? error : ECONNRESET) : 0;
    snprintf(failure->reason, sizeof failure->reason, "%s", reason ? reason : "unknown");
}

enum td__tls_step td__tls_shake(struct td__tls_link *link, struct td__tls_failure *failure)
{
    ERR_clear_error();
    errno = 0;
    int result = SSL_do_handshake(link->ssl);
    enum td__tls_step step = step_of(link, result);
    if (step == TD__TLS_MORE &&
        !SSL_session_reused(link->ssl)) { /* it came about without the key */
        step = TD__TLS_FAILED;
        *failure = (struct td__tls_failure){.reason = "the key was not used"};
    } else if (step == TD__TLS_FAILED || step == TD__TLS_ENDED) {
        step = TD__TLS_FAILED;
        describe_failure(errno, failure);
    }
    link->open = step == TD__TLS_MORE;
    return step;
}

enum td__tls_step td__tls_write(struct td__tls_link *link, const void *data, size_t size,
                                size_t *written)
{
    ERR_clear_error();
    *written = 0;
    if (link->under_key >= td__tls_key_limit && !link->up.size &&
        SSL_key_update(link->ssl, SSL_KEY_UPDATE_NOT_REQUESTED))
        link->under_key = 0;
    int result = SSL_write_ex(link->ssl, data, size, written);
    link->under_key += *written;
    return step_of(link, result);
}

enum td__tls_step td__tls_read(struct td__tls_link *link, void *data, size_t room, size_t *got)
{
    ERR_clear_error();
    *got = 0;
    return step_of(link, SSL_read_ex(link->ssl, data, room, got));
}

bool td__tls_found_changes(const char **reason)
{
    unsigned long code = ERR_peek_error();
    const char *words = code ? ERR_reason_error_string(code) : NULL;
    *reason = words ? words : "unknown";
    return code && !ERR_FATAL_ERROR(code) &&
           ERR_GET_REASON(code) != SSL_R_UNEXPECTED_EOF_WHILE_READING;
}

enum td__tls_step td__tls_end(struct td__tls_link *link)
{
    ERR_clear_error();
    int result = SSL_shutdown(link->ssl);
    return result >= 0 ? TD__TLS_MORE : step_of(link, result);
}

/* ---- Life ------------------------------------------------------------------------------------ */

void td__tls_link_free(struct td__tls_link *link)
{
    SSL_free(link->ssl);
    close(link->wire);
    if (link->plain >= 0)
        close(link->plain);
    td__buffer_free(&link->up);
    td__buffer_free(&link->down);
    OPENSSL_cleanse(link, sizeof *link);
    free(link);
}

td_status td__tls_wrap(int fd, bool server, const uint8_t key[TD__MAC_SIZE], td__deadline deadline,
                       struct td__tls_failure *failure, int *plain_fd)
{
    struct td__tls_wait wait = {.done = false};
    struct stat end;
    int ends[2];
    SSL_CTX *context = context_of(server);
    SSL *ssl = context ? SSL_new(context) : NULL;
    struct td__tls_link *link = calloc(1, sizeof *link);
    int error = ssl && link && SSL_set_fd(ssl, fd) ? td__socket_pair(ends) : ENOMEM;
    if (error) {
        SSL_free(ssl);
        free(link);
        close(fd);
        return error == ENOMEM
                   ? td__fail_nomem("TLS")
                   : td_fail(TD_ERR_SYSTEM, "TLS: no sockets: %s", td__errno_text(error));
    }
    td__name_pair(fd, ends[0], ends[1]);
    link->ssl = ssl;
    link->wire = fd;
    link->plain = ends[1];
    link->end_id = fstat(ends[0], &end) ? 0 : end.st_ino;
    link->wait = server ? NULL : &wait;
    link->end = deadline;
    memcpy(link->key, key, sizeof link->key);
    SSL_set_app_data(ssl, link);
    if (server)
        SSL_set_accept_state(ssl);
    else
        SSL_set_connect_state(ssl);

    td_status status = td__tls_pump_add(link);
    if (!status && (wait.failure.error || *wait.failure.reason))
        status = td_fail(TD_ERR_AUTH, "the TLS handshake failed: %s",
                         wait.failure.error ? td__errno_text(wait.failure.error)
                                            : wait.failure.reason);
    if (status) {
        if (failure)
            *failure = wait.failure;
        close(ends[0]);
        return status;
    }
    *plain_fd = ends[0];
    return TD_OK;
}
