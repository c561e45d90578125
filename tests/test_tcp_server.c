/* The store's server among clients that know the secret and misbehave: they are disconnected, and other clients
 * do not notice. Clients without the secret are in test_tcp_unauthenticated.c, what a client sees when its server
 * fails in test_tcp_loss.c. */
#include "raw_client.h"
#include "runner.h"

#include "base/clock.h"

#include <tandem/store.h>

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

/* ---- Clients that send garbage --------------------------------------------------------------- */

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* A valid request, then an invalid one: the first is answered, then the connection is closed. */
static void expect_ended(const struct client_scene *scene, const void *bytes, size_t size)
{
    struct td__buffer body;
    int fd = raw_open(scene->port, RAW_SECRET);
    struct td__buffer request = raw_begin(5, TD__WIRE_ADD);
    td__buffer_put_string(&request, "fine", 4);
    td__buffer_put_u64(&request, 1);
    td__wire_end(&request, 0);
    td__buffer_put(&request, bytes, size);
    raw_send(fd, request.data, request.size);
    td__buffer_free(&request);
    struct td__wire_header header = raw_answer(fd, &body);
    CHECK_EQ(header.id, 5);
    CHECK_EQ(header.code, TD_OK);
    td__buffer_free(&body);
    CHECK_EQ(raw_drain(fd), 0);
    close(fd);
}

static void expect_body_refused(const struct client_scene *scene, uint8_t op,
                                const struct td__buffer *body)
{
    struct td__buffer frame = raw_begin(6, op);
    td__buffer_put(&frame, body->data, body->size);
    td__wire_end(&frame, 0);
    expect_ended(scene, frame.data, frame.size);
    td__buffer_free(&frame);
}

TEST(garbage_ends_a_client)
{
    struct client_scene scene;
    uint32_t state = 7;
    uint8_t bytes[4096];
    scene_open(&scene);
    for (int i = 0; i < 20; i++) {
        for (size_t at = 0; at < sizeof bytes; at++)
            bytes[at] = (uint8_t)next_random(&state);
        bytes[9] |= 1; /* no header has that */
        expect_ended(&scene, bytes, sizeof bytes);
    }
    memset(bytes, 0xff, sizeof bytes);
    expect_ended(&scene, bytes, sizeof bytes);
    memset(bytes, 0, sizeof bytes); /* request 0 */
    expect_ended(&scene, bytes, sizeof bytes);
    scene_close(&scene);
}

TEST(wrong_headers_end_a_client)
{
    struct client_scene scene;
    scene_open(&scene);
    static const uint8_t headers[][TD__WIRE_HEADER] = {
        {0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, TD__WIRE_SET, 0, 0, 0}, /* announces 4 GiB */
        {0x01, 0x00, 0x00, 0x20, 1, 0, 0, 0, TD__WIRE_SET, 0, 0, 0}, /* a byte more than allowed */
        {0, 0, 0, 0, 1, 0, 0, 0, TD__WIRE_SYNC, 1, 0, 0},
        {0, 0, 0, 0, 1, 0, 0, 0, TD__WIRE_SYNC, 0, 0, 0x80},
        {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0},
        {0, 0, 0, 0, 1, 0, 0, 0, TD__WIRE_BYE + 1, 0, 0, 0},
        {0, 0, 0, 0, 1, 0, 0, 0, 255, 0, 0, 0},
        {1, 0, 0, 0, 1, 0, 0, 0, TD__WIRE_SYNC, 0, 0, 0}, /* with a body, below */
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        uint8_t frame[TD__WIRE_HEADER + 1] = {0};
        memcpy(frame, headers[i], TD__WIRE_HEADER);
        expect_ended(&scene, frame, sizeof frame);
    }
    scene_close(&scene);
}

TEST(wrong_bodies_end_a_client)
{
    struct client_scene scene;
    static const uint8_t listed[] = {TD__WIRE_SET, TD__WIRE_GET, TD__WIRE_WAIT, TD__WIRE_CHECK};
    static const uint8_t all[] = {TD__WIRE_SET,         TD__WIRE_APPEND, TD__WIRE_GET,
                                  TD__WIRE_WAIT,        TD__WIRE_CHECK,  TD__WIRE_ADD,
                                  TD__WIRE_COMPARE_SET, TD__WIRE_DELETE, TD__WIRE_NUM_KEYS,
                                  TD__WIRE_CANCEL,      TD__WIRE_WILL};
    struct td__buffer body = {0};
    scene_open(&scene);
    for (size_t i = 0; i < sizeof all; i++) {
        body.size = 0;
        expect_body_refused(&scene, all[i], &body); /* empty */
        td__buffer_put_u8(&body, 1);
        expect_body_refused(&scene, all[i], &body); /* too short */
        body.size = 0;
        td__buffer_put_u32(&body, 0x7fffffff);
        td__buffer_put_u32(&body, 0x7fffffff);
        expect_body_refused(&scene, all[i], &body); /* lengths far beyond it */
        body.size = 0;
        td__buffer_put_u32(&body, 1);
        td__buffer_put_string(&body, "k", 1);
        td__buffer_put_string(&body, "v", 1);
        td__buffer_put(&body, "twenty-four more bytes..", 24);
        expect_body_refused(&scene, all[i], &body); /* too long, whatever it is */
    }
    for (size_t i = 0; i < sizeof listed; i++) {
        body.size = 0;
        td__buffer_put_u32(&body, 0); /* no keys */
        expect_body_refused(&scene, listed[i], &body);
        body.size = 0;
        td__buffer_put_u32(&body, TD_STORE_MAX_KEYS + 1); /* too many, and they are all there */
        for (int key = 0; key <= TD_STORE_MAX_KEYS; key++) {
            td__buffer_put_string(&body, "k", 1);
            if (listed[i] == TD__WIRE_SET)
                td__buffer_put_string(&body, "", 0);
        }
        expect_body_refused(&scene, listed[i], &body);
    }
    body.size = 0; /* a key that is too long */
    CHECK(td__buffer_reserve(&body, TD_STORE_MAX_KEY + 5));
    td__store_u32(body.data, TD_STORE_MAX_KEY + 1);
    memset(body.data + 4, 'k', TD_STORE_MAX_KEY + 1);
    body.size = TD_STORE_MAX_KEY + 5;
    expect_body_refused(&scene, TD__WIRE_DELETE, &body);
    td__buffer_free(&body);
    CHECK(!scene_has(&scene, "k"));
    scene_close(&scene);
}

TEST(a_truncated_request_is_not_carried_out)
{
    struct client_scene scene;
    scene_open(&scene);
    struct td__buffer frame = raw_begin(1, TD__WIRE_SET);
    td__buffer_put_u32(&frame, 1);
    td__buffer_put_string(&frame, "torn", 4);
    td__buffer_put_string(&frame, "value", 5);
    td__wire_end(&frame, 0);
    for (size_t size = 1; size < frame.size; size++) {
        int fd = raw_open(scene.port, RAW_SECRET);
        CHECK(raw_send(fd, frame.data, size));
        shutdown(fd, SHUT_WR);
        CHECK_EQ(raw_drain(fd), 0);
        close(fd);
        CHECK(!scene_has(&scene, "torn"));
    }
    int fd = raw_open(scene.port, RAW_SECRET);
    CHECK(raw_send(fd, frame.data, frame.size));
    shutdown(fd, SHUT_WR);
    CHECK_EQ(raw_drain(fd), 0);
    close(fd);
    CHECK(scene_has(&scene, "torn"));
    td__buffer_free(&frame);
    scene_close(&scene);
}

/* A length that would be allowed, and nothing behind it. */
TEST(an_announced_length_costs_no_memory)
{
    struct client_scene scene;
    scene_open(&scene);
    uint8_t header[TD__WIRE_HEADER] = {0, 0, 0, 0x20, 1, 0, 0, 0, TD__WIRE_SET, 0, 0, 0};
    int fds[64];
    for (int i = 0; i < 64; i++) {
        fds[i] = raw_open(scene.port, RAW_SECRET);
        CHECK(raw_send(fds[i], header, sizeof header)); /* 512 MiB each */
    }
    steady_check(&scene.steady);
    for (int i = 0; i < 64; i++) {
        CHECK(!raw_is_closed(fds[i]));
        close(fds[i]);
    }
    scene_close(&scene);
}

TEST(requests_may_come_in_any_pieces)
{
    struct client_scene scene;
    struct td__buffer stream = {0}, body;
    enum { REQUESTS = 200 };
    scene_open(&scene);
    for (uint32_t i = 1; i <= REQUESTS; i++) {
        size_t start = td__wire_begin(&stream, i, TD__WIRE_ADD);
        td__buffer_put_string(&stream, "pieces", 6);
        td__buffer_put_u64(&stream, 1);
        td__wire_end(&stream, start);
    }
    uint32_t state = 3;
    int fd = raw_open(scene.port, RAW_SECRET);
    for (size_t at = 0; at < stream.size;) {
        size_t size = 1 + next_random(&state) % 60;
        if (size > stream.size - at)
            size = stream.size - at;
        CHECK(raw_send(fd, stream.data + at, size));
        at += size;
    }
    for (uint32_t i = 1; i <= REQUESTS; i++) {
        struct td__wire_header header = raw_answer(fd, &body);
        CHECK_EQ(header.id, i);
        CHECK_EQ(header.body_size, 8);
        CHECK_EQ(td__load_u32(body.data), i);
        td__buffer_free(&body);
    }
    CHECK(!raw_is_closed(fd));
    close(fd);
    td__buffer_free(&stream);
    scene_close(&scene);
}

TEST(odd_requests_are_harmless)
{
    struct client_scene scene;
    struct td__buffer request, body;
    scene_open(&scene);
    int fd = raw_open(scene.port, RAW_SECRET);
    request = raw_begin(1, TD__WIRE_CANCEL); /* of what was never asked */
    td__buffer_put_u32(&request, 4711);
    raw_finish(fd, &request);
    for (int i = 0; i < 2; i++) { /* two waits of one id */
        request = raw_begin(9, TD__WIRE_WAIT);
        td__buffer_put_u32(&request, 2);
        td__buffer_put_string(&request, "odd", 3);
        td__buffer_put_string(&request, "odd", 3); /* of one key, twice */
        raw_finish(fd, &request);
    }
    request = raw_begin(1, TD__WIRE_CANCEL);
    td__buffer_put_u32(&request, 9);
    raw_finish(fd, &request);
    struct td__wire_header header = raw_answer(fd, &body);
    CHECK_EQ(header.id, 9);
    CHECK_EQ(header.code, TD_ERR_TIMEOUT);
    CHECK_EQ(body.size, 4 + 3); /* the key that was missing */
    td__buffer_free(&body);
    CHECK_OK(td_store_set(scene.store, "odd", "x", 1));
    header = raw_answer(fd, &body); /* the other one */
    CHECK_EQ(header.id, 9);
    CHECK_EQ(header.code, TD_OK);
    td__buffer_free(&body);
    request = raw_begin(0, TD__WIRE_BYE); /* and requests after it */
    raw_finish(fd, &request);
    request = raw_begin(3, TD__WIRE_SYNC);
    raw_finish(fd, &request);
    CHECK_EQ(raw_answer(fd, &body).id, 3);
    td__buffer_free(&body);
    close(fd);
    scene_close(&scene);
}

TEST(one_client_cannot_wait_without_end)
{
    struct client_scene scene;
    enum { LIMIT = 16384 };
    struct td__buffer requests = {0};
    scene_open(&scene);
    for (uint32_t i = 1; i <= LIMIT; i++) {
        size_t start = td__wire_begin(&requests, i, TD__WIRE_WAIT);
        td__buffer_put_u32(&requests, 1);
        td__buffer_put_string(&requests, "never", 5);
        td__wire_end(&requests, start);
    }
    size_t one = requests.size / LIMIT;
    int fd = raw_open(scene.port, RAW_SECRET);
    CHECK(raw_send(fd, requests.data, requests.size));
    struct td__buffer request = raw_begin(1, TD__WIRE_SYNC), body;
    raw_finish(fd, &request);
    raw_answer(fd, &body);
    td__buffer_free(&body);
    CHECK(raw_send(fd, requests.data, one));
    CHECK_EQ(raw_drain(fd), 0);
    close(fd);
    td__buffer_free(&requests);
    scene_close(&scene);
}

/* ---- A client that does not read ------------------------------------------------------------- */

static size_t resident_bytes(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    CHECK(file && fscanf(file, "%*u %lu", &pages) == 1);
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void ask_for(int fd, uint32_t id, const char *key)
{
    struct td__buffer request = raw_begin(id, TD__WIRE_GET);
    td__buffer_put_u32(&request, 1);
    td__buffer_put_string(&request, key, strlen(key));
    raw_finish(fd, &request);
}

static uint8_t *make_value(size_t size)
{
    uint8_t *value = malloc(size);
    for (size_t i = 0; i < size; i++)
        value[i] = (uint8_t)(i * 7 + i / 1000);
    return value;
}

/* For half a second, the others get on with their work and memory does not grow by much. */
static void expect_calm(struct client_scene *scene, size_t before)
{
    int64_t end = td__now_ns() + SECOND / 2;
    while (td__now_ns() < end) {
        steady_check(&scene->steady);
        size_t now = resident_bytes(), more = ((size_t)64 << 20) * (size_t)td_test_slowness();
        if (now > before + more)
            FAIL("the server has taken %zu MiB", (now - before) >> 20);
    }
}

TEST(a_client_that_does_not_read_costs_little, .deadline_s = 40)
{
    enum { SIZE = 2 << 20, TIMES = 300 };
    struct client_scene scene;
    scene_open(&scene);
    uint8_t *value = make_value(SIZE);
    CHECK_OK(td_store_set(scene.store, "large", value, SIZE));
    CHECK(scene_has(&scene, "large")); /* it has arrived */

    int fd = raw_open(scene.port, RAW_SECRET);
    size_t before = resident_bytes();
    for (uint32_t i = 1; i <= TIMES; i++)
        ask_for(fd, i, "large");
    expect_calm(&scene, before);
    for (uint32_t i = 1; i <= TIMES; i++) { /* all is answered once it reads */
        struct td__buffer body;
        struct td__wire_header header = raw_answer(fd, &body);
        CHECK_EQ(header.id, i);
        CHECK_EQ(header.code, TD_OK);
        CHECK_EQ(body.size, SIZE + 4);
        CHECK_MEM(body.data + 4, value, i % 50 ? 1000 : SIZE);
        td__buffer_free(&body);
    }
    for (int round = 0; round < 20; round++) { /* it may go with answers on their way */
        ask_for(fd, 1, "large");
        close(fd);
        fd = raw_open(scene.port, RAW_SECRET);
    }
    close(fd);
    free(value);
    scene_close(&scene);
}

/* The same, but it has asked before the value was there. */
TEST(a_waiter_that_does_not_read_costs_little, .deadline_s = 40)
{
    enum { SIZE = 1 << 20, TIMES = 600 };
    struct client_scene scene;
    struct td__buffer body;
    scene_open(&scene);
    uint8_t *value = make_value(SIZE);
    int fd = raw_open(scene.port, RAW_SECRET);
    for (uint32_t i = 1; i <= TIMES; i++)
        ask_for(fd, i, "late");
    struct td__buffer request = raw_begin(TIMES + 1, TD__WIRE_SYNC);
    raw_finish(fd, &request);
    CHECK_EQ(raw_answer(fd, &body).id, TIMES + 1);
    td__buffer_free(&body);

    size_t before = resident_bytes();
    CHECK_OK(td_store_set(scene.store, "late", value, SIZE));
    expect_calm(&scene, before);
    static bool seen[TIMES + 1];
    for (int i = 0; i < TIMES; i++) {
        struct td__wire_header header = raw_answer(fd, &body);
        CHECK(header.id >= 1 && header.id <= TIMES && !seen[header.id]);
        seen[header.id] = true;
        CHECK_EQ(body.size, SIZE + 4);
        CHECK_MEM(body.data + 4, value, 1000);
        td__buffer_free(&body);
    }
    close(fd);
    free(value);
    scene_close(&scene);
}

/* A client that requests much at once, and reads as fast as it can. */
struct greedy_client {
    int fd;
    size_t bytes; /* that it gets */
    atomic_bool full;
};

static void *read_all(void *arg)
{
    struct greedy_client *client = arg;
    static _Thread_local char bytes[1 << 20];
    for (size_t left = client->bytes; left;) {
        size_t now = left < sizeof bytes ? left : sizeof bytes;
        raw_receive(client->fd, bytes, now);
        left -= now;
    }
    atomic_store(&client->full, true);
    return NULL;
}

TEST(a_greedy_client_does_not_starve_others, .deadline_s = 40)
{
    enum { SIZE = 1 << 20, TIMES = 1500 };
    struct client_scene scene;
    struct td__buffer requests = {0};
    pthread_t thread;
    scene_open(&scene);
    uint8_t *value = make_value(SIZE);
    CHECK_OK(td_store_set(scene.store, "large", value, SIZE));
    CHECK(scene_has(&scene, "large"));
    for (uint32_t i = 1; i <= TIMES; i++) {
        size_t start = td__wire_begin(&requests, i, TD__WIRE_GET);
        td__buffer_put_u32(&requests, 1);
        td__buffer_put_string(&requests, "large", 5);
        td__wire_end(&requests, start);
    }
    struct greedy_client client = {.fd = raw_open(scene.port, RAW_SECRET),
                                   .bytes = (size_t)TIMES * (TD__WIRE_HEADER + 4 + SIZE)};
    CHECK_EQ(pthread_create(&thread, NULL, read_all, &client), 0);
    CHECK(raw_send(client.fd, requests.data, requests.size));
    int answered = 0; /* while the greedy client gets its 1.5 GB */
    for (; !atomic_load(&client.full); answered++)
        CHECK_OK(td_store_add(scene.store, "key", 1, NULL));
    if (answered < 10)
        FAIL("another client got only %d answers meanwhile", answered);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    close(client.fd);
    td__buffer_free(&requests);
    free(value);
    scene_close(&scene);
}

/* Waiters that cancel while an answer is pending, when the value was deleted again. */
TEST(a_waiter_may_cancel_a_pending_answer)
{
    enum { SIZE = 1 << 20, WAITERS = 12 };
    struct client_scene scene;
    struct td__buffer stream = {0}, body;
    scene_open(&scene);
    uint8_t *value = make_value(SIZE);
    int fd = raw_open(scene.port, RAW_SECRET);
    for (uint32_t i = 1; i <= WAITERS; i++)
        ask_for(fd, i, "brief");
    size_t start = td__wire_begin(&stream, 0, TD__WIRE_SET);
    td__buffer_put_u32(&stream, 1);
    td__buffer_put_string(&stream, "brief", 5);
    td__buffer_put_string(&stream, value, SIZE);
    td__wire_end(&stream, start);
    start = td__wire_begin(&stream, WAITERS + 1, TD__WIRE_DELETE);
    td__buffer_put_string(&stream, "brief", 5);
    td__wire_end(&stream, start);
    for (uint32_t i = 1; i <= WAITERS; i++) {
        start = td__wire_begin(&stream, 0, TD__WIRE_CANCEL);
        td__buffer_put_u32(&stream, i);
        td__wire_end(&stream, start);
    }
    CHECK(raw_send(fd, stream.data, stream.size));
    td__buffer_free(&stream);
    bool seen[WAITERS + 2] = {false};
    for (int i = 0; i <= WAITERS;
         i++) { /* each is answered once: the value, or that it is not there */
        struct td__wire_header header = raw_answer(fd, &body);
        CHECK(header.id >= 1 && header.id <= WAITERS + 1 && !seen[header.id]);
        seen[header.id] = true;
        if (header.id <= WAITERS)
            CHECK(header.code == TD_OK ? body.size == SIZE + 4 : header.code == TD_ERR_TIMEOUT);
        td__buffer_free(&body);
    }
    close(fd);
    free(value);
    scene_close(&scene);
}

/* The server is closed while clients request more than they can read at once. */
struct asker {
    int port;
    atomic_int asking;
};

static void *ask_and_ask(void *arg)
{
    struct asker *asker = arg;
    static _Thread_local char bytes[1 << 16];
    int fd = raw_open(asker->port, RAW_SECRET);
    atomic_fetch_add(&asker->asking, 1);
    struct td__buffer request = raw_begin(1, TD__WIRE_GET);
    td__buffer_put_u32(&request, 1);
    td__buffer_put_string(&request, "large", 5);
    td__wire_end(&request, 0);
    bool going = true;
    for (size_t at = 0; going;) {
        struct pollfd ready = {.fd = fd, .events = POLLIN | POLLOUT};
        poll(&ready, 1, 100);
        ssize_t sent = send(fd, request.data + at, request.size - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        going = sent >= 0 || errno == EAGAIN;
        at = (at + (size_t)(sent > 0 ? sent : 0)) % request.size;
        ssize_t got;
        while ((got = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0)
            ;
        going = going && got < 0 && errno == EAGAIN;
    }
    td__buffer_free(&request);
    close(fd);
    return NULL;
}

TEST(closing_ends_clients_that_keep_sending)
{
    enum { ASKERS = 3, SIZE = 256 << 10 };
    char *value = calloc(1, SIZE);
    for (int round = 0; round < 4; round++) {
        td_store *store;
        td_tcp_store_options options = {.host_server = true, .secret = RAW_SECRET};
        CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
        CHECK_OK(td_store_set(store, "large", value, SIZE));
        CHECK_OK(td_store_add(store, "key", 1, NULL)); /* it has arrived */
        struct asker asker = {.port = td_tcp_store_port(store)};
        pthread_t threads[ASKERS];
        for (int i = 0; i < ASKERS; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, ask_and_ask, &asker), 0);
        CHECK_SOON(atomic_load(&asker.asking) == ASKERS);
        for (int i = 0; i < round; i++) /* each time at another moment */
            CHECK_OK(td_store_add(store, "key", 1, NULL));
        int64_t start = td__now_ns();
        CHECK_OK(td_store_close(store));
        CHECK_PROMPT(start); /* they read all the time */
        for (int i = 0; i < ASKERS; i++)
            CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    free(value);
}

/* ---- Many well-behaved clients --------------------------------------------------------------- */

TEST(a_thousand_clients_at_once, .deadline_s = 40)
{
    enum { CLIENTS = 1000 };
    static td_store *stores[CLIENTS];
    struct client_scene scene;
    td_tcp_store_options options = {.secret = RAW_SECRET};
    char key[32], text[32];
    raise_file_limit(4096);
    scene_open(&scene);
    for (int i = 0; i < CLIENTS; i++)
        CHECK_OK(td_tcp_store_open("127.0.0.1", scene.port, &options, &stores[i]));
    for (int i = 0; i < CLIENTS; i++) {
        snprintf(key, sizeof key, "key %d", i);
        snprintf(text, sizeof text, "value %d", i);
        CHECK_OK(td_store_set(stores[i], key, text, strlen(text)));
    }
    for (int i = 0; i < CLIENTS; i++) {
        td_bytes value;
        int64_t sum;
        snprintf(key, sizeof key, "key %d", (i * 17 + 5) % CLIENTS);
        snprintf(text, sizeof text, "value %d", (i * 17 + 5) % CLIENTS);
        CHECK_OK(td_store_get(stores[i], key, 0, &value));
        CHECK_STR(value.data, text);
        td_bytes_free(&value);
        CHECK_OK(td_store_add(stores[i], "sum", i, &sum));
        CHECK_EQ(sum, (int64_t)i * (i + 1) / 2);
    }
    steady_check(&scene.steady);
    for (int i = 0; i < CLIENTS; i++)
        CHECK_OK(td_store_close(stores[i]));
    scene_close(&scene);
}

struct player {
    int port;
    int side;
};

enum { VOLLEYS = 200 };

static void *play(void *arg)
{
    const struct player *player = arg;
    td_store *store;
    td_tcp_store_options options = {.secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", player->port, &options, &store));
    for (int i = 0; i < VOLLEYS; i++) {
        char names[2][32];
        snprintf(names[0], sizeof names[0], "ping %d", i);
        snprintf(names[1], sizeof names[1], "pong %d", i);
        const char *awaited = names[!player->side];
        if (player->side == 0)
            CHECK_OK(td_store_set(store, names[0], "", 0));
        CHECK_OK(td_store_wait(store, &awaited, 1, 0));
        if (player->side == 1)
            CHECK_OK(td_store_set(store, names[1], "", 0));
    }
    CHECK_OK(td_store_close(store));
    return NULL;
}

/* A server that looked for news from time to time would need longer. */
TEST(waiters_are_woken_at_once)
{
    td_store *store;
    td_tcp_store_options options = {.host_server = true, .secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    struct player players[2];
    pthread_t threads[2];
    int64_t start = td__now_ns();
    for (int i = 0; i < 2; i++) {
        players[i] = (struct player){td_tcp_store_port(store), i};
        CHECK_EQ(pthread_create(&threads[i], NULL, play, &players[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_PROMPT(start);
    CHECK_OK(td_store_close(store));
}
