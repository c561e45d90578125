/* The store's server and clients that cannot prove the job's secret: they get no byte and take no time. */
#include "raw_client.h"
#include "runner.h"

#include "base/clock.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

TEST(random_bytes_get_no_answer)
{
    struct client_scene scene;
    uint32_t state = 1;
    static uint8_t bytes[200000];
    scene_open(&scene);
    for (int i = 0; i < 60; i++) {
        size_t size = i < 30 ? (size_t)i * 8 : next_random(&state) % sizeof bytes;
        for (size_t at = 0; at < size; at++)
            bytes[at] = (uint8_t)next_random(&state);
        if (i % 3 == 0 && size >= 4)
            memcpy(bytes, "TDM\1", 4); /* begins as a hello does */
        int fd = raw_connect(scene.port);
        raw_send(fd, bytes, size);
        if (size < TD__HELLO_SIZE)
            shutdown(fd, SHUT_WR);
        size_t came = raw_drain(
            fd); /* what may be a hello is refused, which a reset may overtake */
        CHECK(!came || (came == TD__REFUSAL_SIZE && i % 3 == 0 && size >= TD__HELLO_SIZE));
        close(fd);
    }
    scene_close(&scene);
}

/* Nothing but a refusal is received. */
static void expect_refusal(int fd)
{
    uint8_t refusal[TD__REFUSAL_SIZE];
    raw_receive(fd, refusal, sizeof refusal);
    CHECK(td__auth_is_refusal(refusal));
    CHECK_EQ(raw_drain(fd), 0);
    close(fd);
}

/* A hello with another secret. */
static void greet_in_vain(int port, const char *secret)
{
    struct td__auth auth = {.purpose = "store"};
    uint8_t hello[TD__HELLO_SIZE];
    CHECK_OK(td__secret_load(secret, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    int fd = raw_connect(port);
    raw_send(fd, hello, sizeof hello);
    expect_refusal(fd);
}

struct log {
    atomic_int lines;
    char last[1024];
};

static void note_line(td_log_level level, const char *line, void *arg)
{
    struct log *log = arg;
    (void)level;
    snprintf(log->last, sizeof log->last, "%s", line);
    atomic_fetch_add(&log->lines, 1);
}

/* A client with another secret is logged once: unauthenticated clients do not fill the log. */
TEST(a_wrong_secret_is_logged_once)
{
    for (int local = 0; local < 2; local++) {
        struct log log = {0};
        struct client_scene scene;
        scene_open(&scene);
        td_log_set_level(TD_LOG_WARN);
        td_log_set_sink(note_line, &log);
        for (int i = 0; i < 20 && !local; i++)
            greet_in_vain(scene.port, "another secret");
        td_store *store;
        td_tcp_store_options options = {.secret = "a third one"};
        CHECK_FAILS(td_tcp_store_open("127.0.0.1", scene.port, &options, &store), TD_ERR_AUTH,
                    "refused the job's secret");
        scene_close(&scene);
        td_log_set_sink(NULL, NULL);
        CHECK_EQ(atomic_load(&log.lines), 1);
        CHECK_CONTAINS(log.last, local
                                     ? "a client on this host connected to the store with another "
                                       "secret"
                                     : "a client at 127.0.0.1:");
        CHECK_CONTAINS(log.last, "set TANDEM_SECRET to the same text there");
    }
}

TEST(a_wrong_secret_is_refused)
{
    struct client_scene scene;
    scene_open(&scene);
    static const char *const wrong[] = {"another secret", "", "a secret for test"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        greet_in_vain(scene.port, wrong[i]);

        td_store *store;
        td_tcp_store_options options = {.secret = wrong[i]};
        CHECK_FAILS(td_tcp_store_open("127.0.0.1", scene.port, &options, &store), TD_ERR_AUTH,
                    "refused the job's secret");
    }
    /* The right secret, for another purpose. */
    struct td__auth auth = {.purpose = "transport"};
    uint8_t hello[TD__HELLO_SIZE];
    CHECK_OK(td__secret_load(RAW_SECRET, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    int fd = raw_connect(scene.port);
    raw_send(fd, hello, sizeof hello);
    expect_refusal(fd);
    scene_close(&scene);
}

TEST(a_replayed_hello_leads_nowhere)
{
    struct client_scene scene;
    struct td__auth auth = {.purpose = "store"};
    uint8_t hello[TD__HELLO_SIZE], proof[TD__PROOF_SIZE], challenge[TD__CHALLENGE_SIZE];
    scene_open(&scene);
    CHECK_OK(td__secret_load(RAW_SECRET, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    int fd = raw_connect(scene.port);
    raw_send(fd, hello, sizeof hello);
    raw_receive(fd, challenge, sizeof challenge);
    CHECK(td__auth_check_challenge(&auth, challenge));
    td__auth_proof(&auth, proof);
    raw_send(fd, proof, sizeof proof);
    struct td__buffer request = raw_begin(1, TD__WIRE_SYNC), body;
    raw_finish(fd, &request);
    CHECK_EQ(raw_answer(fd, &body).id, 1);
    td__buffer_free(&body);
    close(fd);

    /* The same bytes, replayed by another client: not even a challenge. */
    fd = raw_connect(scene.port);
    raw_send(fd, hello, sizeof hello);
    CHECK_EQ(raw_drain(fd), 0);
    close(fd);
    scene_close(&scene);
}

TEST(a_slow_handshake_is_a_handshake)
{
    struct client_scene scene;
    struct td__auth auth = {.purpose = "store"};
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE];
    struct td__buffer rest = {0}, body;
    scene_open(&scene);
    CHECK_OK(td__secret_load(RAW_SECRET, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    int fd = raw_connect(scene.port);
    for (size_t i = 0; i < sizeof hello; i++) { /* no delay between, but often one packet each */
        CHECK(raw_send(fd, hello + i, 1));
        td__sleep_ns(300000);
    }
    raw_receive(fd, challenge, sizeof challenge);
    CHECK(td__auth_check_challenge(&auth, challenge));
    /* The proof and the first request, in pieces too. */
    CHECK(td__buffer_reserve(&rest, TD__PROOF_SIZE));
    td__auth_proof(&auth, rest.data);
    rest.size = TD__PROOF_SIZE;
    td__wire_begin(&rest, 77, TD__WIRE_SYNC);
    for (size_t i = 0; i < rest.size; i++) {
        CHECK(raw_send(fd, rest.data + i, 1));
        td__sleep_ns(300000);
    }
    struct td__wire_header header = raw_answer(fd, &body);
    CHECK_EQ(header.id, 77);
    CHECK_EQ(header.code, TD_OK);
    td__buffer_free(&body);
    td__buffer_free(&rest);
    close(fd);
    scene_close(&scene);
}

/* The handshake has a timeout of ten seconds. */
TEST(silence_ends_a_handshake, .deadline_s = 40)
{
    struct client_scene scene;
    struct td__auth auth = {.purpose = "store"};
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE];
    scene_open(&scene);
    CHECK_OK(td__secret_load(RAW_SECRET, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    int64_t start = td__now_ns();
    int fds[4];
    for (int i = 0; i < 4; i++)
        fds[i] = raw_connect(scene.port);
    raw_send(fds[1], hello, sizeof hello / 2);
    raw_send(fds[2], hello, sizeof hello); /* and no proof */
    raw_receive(fds[2], challenge, sizeof challenge);
    size_t trickled = 0;
    bool closed[4] = {false};
    for (int left = 4; left;) {
        if (trickled < sizeof hello / 2 && !closed[3])
            raw_send(fds[3], hello + trickled++, 1); /* a byte now and then buys no time */
        for (int i = 0; i < 4; i++) {
            if (closed[i] || !raw_is_closed(fds[i]))
                continue;
            closed[i] = true;
            left--;
            double took = (double)(td__now_ns() - start) / 1e9;
            CHECK(took > 9 && took < 40 * td_test_slowness());
        }
        td__sleep_ns(SECOND / 10);
    }
    for (int i = 0; i < 4; i++)
        close(fds[i]);
    scene_close(&scene);
}

TEST(too_many_unauthenticated_clients_evict_the_oldest)
{
    enum { MANY = 4200 }; /* the server holds 4096 */
    raise_file_limit(2 * MANY + 100);
    struct client_scene scene;
    static int fds[MANY];
    scene_open(&scene);
    for (int i = 0; i < MANY; i++)
        fds[i] = raw_connect(scene.port);
    for (int i = 0; i < MANY - 4096; i++)
        CHECK_EQ(raw_drain(fds[i]), 0);
    CHECK(!raw_is_closed(fds[MANY - 1]));
    raw_prove(fds[MANY - 1], RAW_SECRET); /* later ones may still prove the secret */
    steady_check(&scene.steady);
    int fd = raw_open(scene.port, RAW_SECRET);
    close(fd);
    for (int i = 0; i < MANY; i++)
        close(fds[i]);
    scene_close(&scene);
}

TEST(thousands_connect_and_close)
{
    struct client_scene scene;
    struct td__auth auth = {.purpose = "store"};
    uint8_t hello[TD__HELLO_SIZE];
    scene_open(&scene);
    CHECK_OK(td__secret_load(RAW_SECRET, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    for (int i = 0; i < 3000; i++) {
        int fd = raw_connect(scene.port);
        if (i % 3)
            raw_send(fd, hello, i % 3 == 1 ? 20 : sizeof hello);
        if (i % 2) /* a reset instead of an end */
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
        close(fd);
    }
    steady_check(&scene.steady);
    for (int i = 0; i < 300; i++) {
        td_store *store;
        td_tcp_store_options options = {.secret = RAW_SECRET};
        CHECK_OK(td_tcp_store_open("127.0.0.1", scene.port, &options, &store));
        CHECK_OK(td_store_close(store));
    }
    scene_close(&scene);
}
