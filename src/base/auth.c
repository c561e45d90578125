/* HMAC authentication; see auth.h. OpenSSL provides HMAC; random bytes come from the kernel. */
#include "base/auth.h"

#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SECRET_LIMIT = 4096 };

/* A hello begins with these three bytes and a fourth for whether TLS follows. */
static const uint8_t magic[3] = {'T', 'D', 'M'};
enum { PLAIN = 1, ENCRYPTED = 2 };
static const uint8_t refused[TD__REFUSAL_SIZE] = {'T', 'D', 'M', 0};

td_status td__random(void *bytes, size_t size)
{
    for (uint8_t *at = bytes; size;) {
        ssize_t got = getrandom(at, size, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return td_fail(TD_ERR_SYSTEM, "random bytes: %s", td__errno_text(errno));
        at += got;
        size -= (size_t)got;
    }
    return TD_OK;
}

/* Otherwise OpenSSL frees its memory at exit(), while other threads still use it. */
static void keep_openssl(void)
{
    OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, NULL);
}

static void hmac(const void *key, size_t key_size, const void *data, size_t size,
                 uint8_t out[TD__MAC_SIZE])
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    unsigned length = TD__MAC_SIZE;
    pthread_once(&once, keep_openssl);
    if (!HMAC(EVP_sha256(), key, (int)key_size, data, size, out, &length)) {
        /* No provider, or no memory: a random proof fails closed. */
        if (td__random(out, TD__MAC_SIZE))
            abort();
    }
}

/* Kubernetes mounts secrets as files of root's that a group of the container's user may read: there is no other way to
 * give them to an ordinary user. */
static bool others_may_read(const struct stat *info)
{
    mode_t theirs = info->st_uid == 0 && geteuid() != 0 ? 037 : 077;
    return info->st_mode & theirs;
}

/* Regular files only: opening a pipe blocks until there is a writer, and each byte reaches one reader only. */
static td_status open_secret_file(const char *path, int *fd_out)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return td_fail(TD_ERR_AUTH, "TANDEM_SECRET_FILE: cannot read %s: %s", path,
                       td__errno_text(errno));
    if (fstat(fd, &info) || !S_ISREG(info.st_mode)) {
        close(fd);
        return td_fail(TD_ERR_AUTH,
                       "TANDEM_SECRET_FILE: %s is not a regular file, which every process of the "
                       "job can read",
                       path);
    }
    if (others_may_read(&info))
        td_log(TD_LOG_WARN, "the secret file %s can be read by other users: chmod 600 it", path);
    *fd_out = fd;
    return TD_OK;
}

static td_status read_secret_file(const char *path, char *text, size_t capacity)
{
    int fd = -1;
    TD_TRY(open_secret_file(path, &fd));
    size_t size = 0;
    ssize_t got = 1;
    while (got > 0 && size < capacity) {
        got = read(fd, text + size, capacity - size);
        if (got > 0)
            size += (size_t)got;
    }
    int error = errno;
    close(fd);
    if (got < 0)
        return td_fail(TD_ERR_AUTH, "TANDEM_SECRET_FILE: cannot read %s: %s", path,
                       td__errno_text(error));
    if (size == capacity)
        return td_fail(TD_ERR_AUTH, "TANDEM_SECRET_FILE: %s is longer than %d bytes", path,
                       SECRET_LIMIT);
    if (memchr(text, 0, size)) /* text functions would stop there */
        return td_fail(TD_ERR_AUTH, "TANDEM_SECRET_FILE: %s contains a NUL byte; a secret is text",
                       path);
    while (size && strchr(" \t\r\n", text[size - 1]))
        size--;
    text[size] = '\0';
    if (!size)
        return td_fail(TD_ERR_AUTH, "TANDEM_SECRET_FILE: %s is empty", path);
    return TD_OK;
}

static td_status load_switch(const char *name, const char *meaning, bool *on)
{
    const char *value = getenv(name);
    if (value && *value && strcmp(value, "0") != 0 && strcmp(value, "1") != 0)
        return td_fail(TD_ERR_INVALID, "%s is \"%.40s\"; it must be 1 (%s) or 0", name, value,
                       meaning);
    *on = value && !strcmp(value, "1");
    return TD_OK;
}

static struct {
    pthread_mutex_t lock;
    char text[65];
    const char *origin;
} adopted = {.lock = PTHREAD_MUTEX_INITIALIZER};

td_status td__secret_adopt(const char *text, const char *origin)
{
    pthread_mutex_lock(&adopted.lock);
    snprintf(adopted.text, sizeof adopted.text, "%s", text);
    adopted.origin = origin;
    pthread_mutex_unlock(&adopted.lock);
    return TD_OK;
}

/* Copies the adopted secret; its origin, or NULL when there is none. */
static const char *load_adopted(char *text)
{
    pthread_mutex_lock(&adopted.lock);
    const char *origin = adopted.origin;
    memcpy(text, adopted.text, sizeof adopted.text);
    pthread_mutex_unlock(&adopted.lock);
    return origin;
}

td_status td__secret_load(const char *text, struct td__secret *secret)
{
    char from_file[SECRET_LIMIT + 1];
    bool tls = false, insecure = false;
    TD_TRY(load_switch("TANDEM_TLS", "connections over TCP are encrypted", &tls));
    TD_TRY(load_switch("TANDEM_INSECURE", "no secret is needed beyond this host", &insecure));
    const char *path = getenv("TANDEM_SECRET_FILE");
    secret->origin = NULL;
    if (!text) {
        text = getenv("TANDEM_SECRET");
        if ((!text || !*text) && path && *path) {
            TD_TRY(read_secret_file(path, from_file, sizeof from_file));
            text = from_file;
        } else if ((!text || !*text) && (secret->origin = load_adopted(from_file))) {
            text = from_file;
        }
    }
    secret->tls = tls;
    secret->insecure = insecure;
    secret->given = text && *text;
    secret->bound = secret->given || insecure;
    const char *used = secret->given ? text : "";
    static const char label[] = "tandem job secret";
    hmac(label, sizeof label, used, strlen(used), secret->key);
    OPENSSL_cleanse(from_file, sizeof from_file);
    return TD_OK;
}

void td__secret_derive(struct td__secret *secret, const uint8_t *bytes, size_t size,
                       const char *context)
{
    char text[512];
    int length = snprintf(text, sizeof text, "tandem job at %s", context);
    hmac(bytes, size, text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1,
         secret->key);
    secret->bound = true;
}

td_status td__secret_make(char text[65])
{
    uint8_t bytes[32];
    TD_TRY(td__random(bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return TD_OK;
}

static void mac(const struct td__auth *auth, const char *label, bool tls, bool both,
                uint8_t out[TD__MAC_SIZE])
{
    uint8_t data[64 + TD__IDENTITY_SIZE + 2 * TD__NONCE_SIZE] = {0};
    size_t size = (size_t)snprintf((char *)data, 64, "%s%s %.40s", label, tls ? "-tls" : "",
                                   auth->purpose) +
                  1;
    memcpy(data + size, auth->identity, TD__IDENTITY_SIZE);
    size += TD__IDENTITY_SIZE;
    memcpy(data + size, auth->client_nonce, TD__NONCE_SIZE);
    size += TD__NONCE_SIZE;
    if (both) {
        memcpy(data + size, auth->server_nonce, TD__NONCE_SIZE);
        size += TD__NONCE_SIZE;
    }
    hmac(auth->secret.key, sizeof auth->secret.key, data, size, out);
}

static bool mac_matches(const struct td__auth *auth, const char *label, bool tls, bool both,
                        const uint8_t theirs[TD__MAC_SIZE])
{
    uint8_t ours[TD__MAC_SIZE];
    mac(auth, label, tls, both, ours);
    return CRYPTO_memcmp(ours, theirs, TD__MAC_SIZE) == 0;
}

td_status td__auth_hello(struct td__auth *client, uint8_t hello[TD__HELLO_SIZE])
{
    TD_TRY(td__random(client->client_nonce, TD__NONCE_SIZE));
    memcpy(hello, magic, sizeof magic);
    hello[sizeof magic] = client->tls ? ENCRYPTED : PLAIN;
    memcpy(hello + TD__MAGIC_SIZE, client->client_nonce, TD__NONCE_SIZE);
    mac(client, "hello", client->tls, false, hello + TD__MAGIC_SIZE + TD__NONCE_SIZE);
    return TD_OK;
}

bool td__auth_may_be_hello(const uint8_t bytes[TD__MAGIC_SIZE])
{
    return !memcmp(bytes, magic, sizeof magic) &&
           (bytes[sizeof magic] == PLAIN || bytes[sizeof magic] == ENCRYPTED);
}

bool td__auth_check_hello(struct td__auth *server, const uint8_t hello[TD__HELLO_SIZE])
{
    if (!td__auth_may_be_hello(hello))
        return false;
    bool tls = hello[sizeof magic] == ENCRYPTED;
    memcpy(server->client_nonce, hello + TD__MAGIC_SIZE, TD__NONCE_SIZE);
    bool right = mac_matches(server, "hello", tls, false, hello + TD__MAGIC_SIZE + TD__NONCE_SIZE);
    server->other_tls = right && tls != server->tls;
    return right && tls == server->tls;
}

void td__auth_refusal(uint8_t refusal[TD__REFUSAL_SIZE])
{
    memcpy(refusal, refused, sizeof refused);
}

bool td__auth_is_refusal(const uint8_t bytes[TD__REFUSAL_SIZE])
{
    return !memcmp(bytes, refused, sizeof refused);
}

td_status td__auth_challenge(struct td__auth *server, uint8_t challenge[TD__CHALLENGE_SIZE])
{
    TD_TRY(td__random(server->server_nonce, TD__NONCE_SIZE));
    memcpy(challenge, server->server_nonce, TD__NONCE_SIZE);
    mac(server, "server", server->tls, true, challenge + TD__NONCE_SIZE);
    return TD_OK;
}

bool td__auth_check_challenge(struct td__auth *client, const uint8_t challenge[TD__CHALLENGE_SIZE])
{
    const uint8_t *theirs = challenge + TD__NONCE_SIZE;
    memcpy(client->server_nonce, challenge, TD__NONCE_SIZE);
    bool right = mac_matches(client, "server", client->tls, true, theirs);
    client->other_tls = !right && mac_matches(client, "server", !client->tls, true, theirs);
    return right;
}

void td__auth_proof(const struct td__auth *client, uint8_t proof[TD__PROOF_SIZE])
{
    mac(client, "client", client->tls, true, proof);
}

bool td__auth_check_proof(const struct td__auth *server, const uint8_t proof[TD__PROOF_SIZE])
{
    return mac_matches(server, "client", server->tls, true, proof);
}

void td__auth_key(const struct td__auth *auth, uint8_t key[TD__MAC_SIZE])
{
    mac(auth, "key", auth->tls, true, key);
}
