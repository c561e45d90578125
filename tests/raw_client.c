/* A misbehaving client; see raw_client.h. */
#include "raw_client.h"

#include "runner.h"

#include "base/clock.h"
#include "os/socket.h"

#include <tandem/store.h>

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static td__deadline soon(void)
{
    return td__deadline_in_ms(15000 * td_test_slowness());
}

int raw_connect(int port)
{
    struct td__address address = {.v4 = {.sin_family = AF_INET,
                                         .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                         .sin_port = htons((uint16_t)port)},
                                  .size = sizeof address.v4};
    int fd = td__connect_to(&address, soon());
    if (fd == -ECONNRESET)
        return -1; /* rejected */
    if (fd < 0)
        FAIL("connecting to port %d: %s", port, strerror(-fd));
    return fd;
}

bool raw_send(int fd, const void *data, size_t size)
{
    int error = td__send_all(fd, data, size, soon());
    if (error && error != EPIPE && error != ECONNRESET)
        FAIL("sending %zu bytes: %s", size, strerror(error));
    return !error;
}

void raw_receive(int fd, void *data, size_t size)
{
    int error = td__recv_all(fd, data, size, soon());
    if (error)
        FAIL("receiving %zu bytes: %s", size,
             error == ENODATA ? "the server has closed the connection" : strerror(error));
}

size_t raw_drain(int fd)
{
    static _Thread_local char bytes[1 << 16];
    td__deadline deadline = soon();
    for (size_t sum = 0;;) {
        ssize_t got = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (got > 0)
            sum += (size_t)got;
        else if (got == 0 || errno == ECONNRESET)
            return sum;
        else if (errno != EAGAIN || td__wait_fd(fd, POLLIN, deadline))
            FAIL("the server has not closed the connection (%zu bytes came)", sum);
    }
}

bool raw_is_closed(int fd)
{
    char byte;
    ssize_t got = recv(fd, &byte, 1, MSG_DONTWAIT);
    CHECK(got <= 0);
    return got == 0 || errno == ECONNRESET;
}

void raw_prove(int fd, const char *secret)
{
    struct td__auth auth = {.purpose = "store"};
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    CHECK_OK(td__secret_load(secret, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    CHECK(raw_send(fd, hello, sizeof hello));
    raw_receive(fd, challenge, sizeof challenge);
    CHECK(td__auth_check_challenge(&auth, challenge));
    td__auth_proof(&auth, proof);
    CHECK(raw_send(fd, proof, sizeof proof));
}

int raw_open(int port, const char *secret)
{
    int fd = raw_connect(port);
    raw_prove(fd, secret);
    return fd;
}

struct td__buffer raw_begin(uint32_t id, uint8_t op)
{
    struct td__buffer request = {0};
    td__wire_begin(&request, id, op);
    return request;
}

void raw_finish(int fd, struct td__buffer *request)
{
    td__wire_end(request, 0);
    CHECK(raw_send(fd, request->data, request->size));
    td__buffer_free(request);
}

struct td__wire_header raw_answer(int fd, struct td__buffer *body)
{
    uint8_t bytes[TD__WIRE_HEADER];
    struct td__wire_header header;
    raw_receive(fd, bytes, sizeof bytes);
    CHECK(td__wire_read_header(bytes, &header));
    *body = (struct td__buffer){0};
    CHECK(td__buffer_reserve(body, header.body_size + 1));
    raw_receive(fd, body->data, header.body_size);
    body->size = header.body_size;
    return header;
}

/* ---- One that behaves ------------------------------------------------------------------------ */

static void *be_steady(void *arg)
{
    struct steady *steady = arg;
    td_store *store;
    td_tcp_store_options options = {.secret = steady->secret};
    CHECK_OK(td_tcp_store_open("127.0.0.1", steady->port, &options, &store));
    for (long round = 0; !atomic_load(&steady->stop); round++) {
        char text[32];
        td_bytes value;
        int64_t sum;
        snprintf(text, sizeof text, "round %ld", round);
        CHECK_OK(td_store_set(store, "steady", text, strlen(text)));
        CHECK_OK(td_store_get(store, "steady", 0, &value));
        CHECK_STR(value.data, text);
        td_bytes_free(&value);
        CHECK_OK(td_store_add(store, "steady rounds", 1, &sum));
        CHECK_EQ(sum, round + 1);
        atomic_store(&steady->rounds, sum);
        td__sleep_ns(200000); /* leaves the processors to misbehaving clients */
    }
    CHECK_OK(td_store_close(store));
    return NULL;
}

void steady_start(struct steady *steady, int port, const char *secret)
{
    *steady = (struct steady){.port = port, .secret = secret};
    CHECK_EQ(pthread_create(&steady->thread, NULL, be_steady, steady), 0);
    steady_check(steady);
}

void steady_check(struct steady *steady)
{
    long before = atomic_load(&steady->rounds);
    CHECK_SOON(atomic_load(&steady->rounds) > before + 5);
}

void steady_stop(struct steady *steady)
{
    steady_check(steady);
    atomic_store(&steady->stop, true);
    CHECK_EQ(pthread_join(steady->thread, NULL), 0);
}

/* ---- The scene ------------------------------------------------------------------------------- */

void scene_open(struct client_scene *scene)
{
    td_tcp_store_options options = {.host_server = true, .secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &scene->store));
    scene->port = td_tcp_store_port(scene->store);
    td_log_set_level(TD_LOG_ERROR); /* the server warns of what is done to it here */
    steady_start(&scene->steady, scene->port, RAW_SECRET);
}

void scene_close(struct client_scene *scene)
{
    steady_stop(&scene->steady);
    CHECK_OK(td_store_close(scene->store));
}

bool scene_has(const struct client_scene *scene, const char *key)
{
    bool there;
    CHECK_OK(td_store_check(scene->store, &key, 1, &there));
    return there;
}

void raise_file_limit(long wanted)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_max < (rlim_t)wanted)
        td_test_skip("fewer than %ld file descriptors are allowed here", wanted);
}
