/* Unauthenticated clients at the listener of an endpoint, and the requests of admitted ones.
 *
 *     byte 0    bit 0: the job uses TLS; bits 1 to 7: how many bytes come at a time, 0: all
 *     then      steps: control, length, that many bytes
 *
 *     control   bits 0 and 1   which pending
 *               bit 2          it is a new one; the one before is left open
 *               bit 3          it comes by the unix socket
 *               bit 4          it ends behind the bytes
 *               bit 5          what is due (a hello, a proof) comes before the bytes, and is right
 *               bit 6          the oldest pending connections' time is over
 *
 * The source of the listener is included. Its sockets are memory, and a proof is right when it begins with a
 * certain byte: fuzz_store_auth.c has the real ones. Every connection is closed or handed on, once. */
#include "fuzz.h"
#include "memory_socket.h"

#include "base/auth.h"
#include "os/loop.h"
#include "os/tls.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CLIENTS = 4, MOST_STEPS = 64, RANKS = 5, RIGHT = 0x77 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

/* ---- Instead of TLS and proofs --------------------------------------------------------------- */

static bool fake_check_hello(struct td__auth *auth, const uint8_t *bytes)
{
    memcpy(auth->client_nonce, bytes + TD__MAGIC_SIZE, TD__NONCE_SIZE);
    return bytes[TD__MAGIC_SIZE] == RIGHT;
}

static td_status fake_challenge(struct td__auth *auth, uint8_t *bytes)
{
    (void)auth;
    memset(bytes, 0, TD__CHALLENGE_SIZE);
    return TD_OK;
}

static bool fake_check_proof(const struct td__auth *auth, const uint8_t *bytes)
{
    (void)auth;
    return bytes[0] == RIGHT;
}

static void fake_key(const struct td__auth *auth, uint8_t key[TD__MAC_SIZE])
{
    (void)auth;
    memset(key, 0, TD__MAC_SIZE);
}

/* Nothing is encrypted. */
static td_status fake_wrap(int fd, bool server, const uint8_t *key, td__deadline deadline,
                           void *unused)
{
    (void)fd;
    (void)server;
    (void)key;
    (void)deadline;
    (void)unused;
    return TD_OK;
}

#define td__auth_check_hello fake_check_hello
#define td__auth_challenge fake_challenge
#define td__auth_check_proof fake_check_proof
#define td__auth_key fake_key
#define td__tls_wrap fake_wrap
#include "os/auth_listener.c"

#include "peer/endpoint_internal.h"

/* ---- The target ------------------------------------------------------------------------------ */

static int clients;

/* What a domain and its endpoint do first. */
static void on_accepted(void *arg, int fd, bool local, const uint8_t *bytes)
{
    struct td__request request;
    (void)arg;
    (void)local;
    clients++;
    uint8_t *exact = malloc(TD__REQUEST_SIZE); /* for the sanitizer */
    memcpy(exact, bytes, TD__REQUEST_SIZE);
    if (td__request_read(exact, RANKS, &request)) {
        check(request.rank >= 0 && request.rank < RANKS);
        check(request.what >= TD__WANT_LINK && request.what <= TD__WANT_HAND_OVER);
        check(request.what != TD__WANT_LOSS_REPORT || request.group < RANKS);
        uint8_t again[TD__REQUEST_SIZE];
        td__request_write(&request, td__request_number(exact), again);
        check(!memcmp(again, exact, sizeof again));
    }
    free(exact);
    close(fd);
}

static struct pending *find_pending(struct td__auth_listener *listener, int fd)
{
    struct list *lists[] = {&listener->silent, &listener->known};
    for (int i = 0; i < 2; i++)
        for (struct pending *at = oldest_of(lists[i]); at; at = TAILQ_NEXT(at, link))
            if (at->fd == fd)
                return at;
    return NULL;
}

static void check_lists(const struct td__auth_listener *listener)
{
    const struct list *lists[] = {&listener->silent, &listener->known};
    for (int i = 0; i < 2; i++) {
        size_t count = 0;
        for (const struct pending *at = oldest_of(lists[i]); at; at = TAILQ_NEXT(at, link)) {
            check((at->stage == HELLO) == (i == 0));
            count++;
        }
        check(count == lists[i]->count);
    }
}

/* How every hello begins. */
static const uint8_t *magic(void)
{
    static uint8_t hello[TD__HELLO_SIZE];
    struct td__auth auth = {.purpose = "link"};
    if (!hello[0])
        check(!td__auth_hello(&auth, hello));
    return hello;
}

/* What a client of the job would say next; each hello has a nonce of its own. */
static size_t say_right(const struct pending *pending, uint8_t *bytes, uint8_t number)
{
    bool hello = !pending || pending->stage == HELLO;
    size_t size = hello ? TD__HELLO_SIZE : TD__PROOF_SIZE;
    if (pending && pending->stage == REQUEST)
        return 0;
    memset(bytes, 0, size);
    if (hello)
        memcpy(bytes, magic(), TD__MAGIC_SIZE);
    bytes[hello ? TD__MAGIC_SIZE : 0] = RIGHT;
    if (hello)
        bytes[TD__MAGIC_SIZE + 1] = number;
    return size;
}

struct step {
    uint8_t right[TD__HELLO_SIZE];
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct td__auth_listener listener;
    static struct step steps[MOST_STEPS];
    int fds[CLIENTS] = {-1, -1, -1, -1};
    if (size < 1)
        return 0;
    memset(&listener, 0, offsetof(struct td__auth_listener, nonces));
    memset(listener.nonces, 0, 4 * sizeof *listener.nonces);
    TAILQ_INIT(&listener.silent.queue);
    TAILQ_INIT(&listener.known.queue);
    listener.entrances[0].fd = listener.entrances[1].fd = -1;
    listener.next_check = TD__NEVER;
    listener.options = (struct td__auth_listener_options){
        .purpose = "link", .request_size = TD__REQUEST_SIZE, .fn = on_accepted};
    listener.secret.tls = data[0] & 1;
    listener.limit = 2;
    listener.warned = listener.warned_of_secret = true;
    clients = 0;
    size_t at = 1, piece = data[0] >> 1;
    for (int i = 0; i < MOST_STEPS && size - at >= 2; i++) {
        uint8_t control = data[at];
        size_t length = data[at + 1];
        at += 2;
        length = length < size - at ? length : size - at;
        int *fd = &fds[control & 3];
        struct pending *pending = *fd >= 0 ? find_pending(&listener, *fd) : NULL;
        bool new = control & 4 || !pending;
        if (new &&pending)
            reject(pending);
        if (new)
            *fd = memory_socket(NULL, 0, piece);
        size_t right = control & 32 ? say_right(new ? NULL : pending, steps[i].right, (uint8_t)i)
                                    : 0;
        if (right)
            memory_socket_more(*fd, steps[i].right, right);
        memory_socket_more(*fd, data + at, length);
        if (control & 16)
            memory_socket_end(*fd);
        at += length;
        if (new)
            add_pending(&listener, *fd, control & 8, HELLO, td__now_ns());
        else
            td__auth_listener_turn(&listener);
        check_lists(&listener);
        if (control & 64 && oldest_of(&listener.silent))
            throttle(oldest_of(&listener.silent));
    }
    while (oldest_of(&listener.silent))
        reject(oldest_of(&listener.silent));
    while (oldest_of(&listener.known))
        reject(oldest_of(&listener.known));
    check(memory_socket_reset() == 0);
    return 0;
}
