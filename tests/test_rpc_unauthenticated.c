/* Remote calls and strangers: a process that does not know the secret sends well-formed requests to the listener of a
 * worker. It gets nothing, and the worker runs nothing. */
#include "endpoint_world.h"
#include "forks.h"
#include "rpc_world.h"

#include "os/socket.h"
#include "peer/endpoint_internal.h"
#include "rpc/rpc_agent.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { NOBODY = 65534, RPC_LINKS = 1, MOST_BYTES = 600 };

static atomic_int marks;

static td_value *mark(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_of(atomic_fetch_add(&marks, 1) + 1);
}

/* What a client of the job sends after its proof: the request for a link, the handshake of the link, and a call. */
struct attack {
    char address[TD__CARD_TEXT], local[TD__CARD_TEXT];
    int port;
    uint8_t identity[TD__IDENTITY_SIZE];
    uint8_t link[TD__REQUEST_SIZE];
    uint8_t call[MOST_BYTES]; /* the handshake and the call, again and again */
    const char *secret;       /* NULL: no authentication at all */
    bool right_hello;         /* with the right secret, but not its proof */
    bool locally;             /* at the unix socket */
    bool other_user;          /* as another user, where this one is root */
};

static void make_call(struct td__rpc_agent *agent, struct attack *attack)
{
    struct td__message *message = td__message_create(agent, 1, false);
    struct td__message_header header = {.kind = TD__MESSAGE_REQUEST, .id = 7, .timeout_ms = 5000};
    CHECK(message);
    td__buffer_put_string(&message->bytes, "mark", 4);
    td__buffer_put_u32(&message->bytes, 0);
    CHECK_OK(td__message_seal(message, &header, SIZE_MAX));
    size_t size = TD__LINK_HELLO_SIZE + message->size;
    CHECK(size < MOST_BYTES);
    td__hello_write(attack->call, TD__HELLO_SOCKET, 1, 0, 0);
    memcpy(attack->call + TD__LINK_HELLO_SIZE, td__message_head(message), message->size);
    for (size_t at = size; at < MOST_BYTES; at++)
        attack->call[at] = attack->call[at - size];
    td__message_free(message);
}

static void prepare(struct attack *attack)
{
    struct td__rpc_agent *agent = td__agent_hold();
    CHECK(agent);
    const struct td__card *target = td__peer(agent->endpoint, 1);
    memcpy(attack->address, target->address, sizeof attack->address);
    memcpy(attack->local, target->local, sizeof attack->local);
    memcpy(attack->identity, target->identity, sizeof attack->identity);
    attack->port = target->port;
    struct td__request request = {
        .what = TD__WANT_LINK, .rank = 0, .group = RPC_LINKS, .channel = TD__CHANNEL_RPC};
    td__request_write(&request, target->number, attack->link);
    make_call(agent, attack);
    td__agent_leave(agent);
}

static int connect_to_worker(const struct attack *attack)
{
    struct td__address_list list;
    bool retry;
    const char *host = attack->locally ? attack->local : attack->address;
    CHECK_OK(td__resolve(host, attack->locally ? 0 : attack->port, soon(), &list, &retry));
    int fd = td__connect_to(&list.at[0], soon());
    if (fd < 0)
        FAIL("connecting to %s: %s", host, strerror(-fd));
    return fd;
}

/* All that comes back is a refusal, or (for the right hello) a challenge; then the connection ends. */
static void check_gets_nothing(int fd, size_t most)
{
    uint8_t bytes[4096];
    size_t got = 0;
    while (got < sizeof bytes && !td__recv_all(fd, bytes + got, 1, soon()))
        got++;
    if (got > most)
        FAIL("a stranger has got %zu bytes", got);
    close(fd);
}

static void run_attack(void *arg)
{
    const struct attack *attack = arg;
    struct td__auth auth = {.purpose = "link"};
    uint8_t hello[TD__HELLO_SIZE], proof[TD__PROOF_SIZE] = {1};
    if (attack->secret) {
        CHECK_OK(td__secret_load(attack->secret, &auth.secret));
        CHECK_OK(td__secret_bind(&auth.secret, "links"));
        memcpy(auth.identity, attack->identity, sizeof auth.identity);
        CHECK_OK(td__auth_hello(&auth, hello));
    }
    if (geteuid() == 0 && attack->other_user)
        CHECK_EQ(setuid(NOBODY), 0);
    int fd = connect_to_worker(attack);
    if (attack->secret) {
        td__send_all(fd, hello, sizeof hello, soon());
        td__send_all(fd, proof, sizeof proof, soon());
        td__send_all(fd, attack->link, sizeof attack->link, soon());
    }
    td__send_all(fd, attack->call, sizeof attack->call, soon());
    check_gets_nothing(fd, attack->right_hello ? TD__CHALLENGE_SIZE
                           : attack->secret    ? TD__REFUSAL_SIZE
                                               : 0);
    _exit(0); /* with what was the parent's */
}

RANKS(strangers_get_nothing, .ranks = 2)
{
    static const char *const secrets[] = {NULL, "", "another secret"};
    TD_SCOPE;
    CHECK_OK(td_rpc_register("mark()", mark, NULL));
    rpc_begin(NULL);
    if (td_test_rank() == 0) {
        struct attack attack = {0};
        prepare(&attack);
        CHECK_EQ(rpc_int("w1", "add", TD_ARGS(1)), 11);
        for (int i = 0; i < 16; i++) {
            attack.right_hello = i / 4 == 3;
            attack.secret = attack.right_hello ? getenv("TANDEM_SECRET") : secrets[i / 4];
            attack.locally = i % 2;
            attack.other_user = i / 2 % 2;
            fork_join(fork_start(run_attack, &attack));
            CHECK_EQ(rpc_int("w1", "add", TD_ARGS(i)), i + 10);
        }
        CHECK_EQ(rpc_int("w1", "mark", TD_NO_ARGS), 1); /* the first one that has arrived */
    }
    rpc_end();
}
