/* What a client sees when its server dies, stops or closes, what the others see when a client dies, and the kinds
 * of addresses of a server. */
#include "forks.h"
#include "raw_client.h"
#include "runner.h"

#include "base/clock.h"
#include "store/store_ops.h"

#include <tandem/store.h>

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

/* ---- A server in a process of its own -------------------------------------------------------- */

struct server {
    pid_t pid;
    struct {
        atomic_int port; /* 0 until it serves */
        rlim_t file_limit;
    } * shared;
};

static void serve(void *arg)
{
    struct server *server = arg;
    td_store *store;
    if (server->shared->file_limit) {
        struct rlimit limit = {server->shared->file_limit, server->shared->file_limit};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    }
    td_tcp_store_options options = {.host_server = true, .secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    atomic_store(&server->shared->port, td_tcp_store_port(store));
    for (;;)
        pause();
}

static void server_start(struct server *server, rlim_t file_limit)
{
    server->shared = fork_shared(sizeof *server->shared);
    server->shared->file_limit = file_limit;
    server->pid = fork_start(serve, server);
    CHECK_SOON(atomic_load(&server->shared->port) != 0 || fork_has_ended(server->pid));
}

static td_store *server_open(const struct server *server)
{
    td_store *store;
    td_tcp_store_options options = {.secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", atomic_load(&server->shared->port), &options, &store));
    return store;
}

/* Stops the server for certain: it is not running any more when this returns. */
static void server_stop(const struct server *server)
{
    char path[64], state = '?';
    kill(server->pid, SIGSTOP);
    snprintf(path, sizeof path, "/proc/%d/stat", (int)server->pid);
    while (state != 'T') {
        FILE *file = fopen(path, "re");
        CHECK(file != NULL);
        CHECK_EQ(fscanf(file, "%*d (%*[^)]) %c", &state), 1);
        fclose(file);
    }
}

/* Kills it, and returns when the end of its connections has arrived here: a connection that was
 * made after the others is closed after them. */
static void server_kill(const struct server *server, int last_connection)
{
    fork_kill(server->pid, SIGKILL);
    raw_drain(last_connection);
    close(last_connection);
}

static void expect_lost(td_status status, const struct server *server)
{
    char text[100];
    snprintf(text, sizeof text, "tcp store at 127.0.0.1:%d: the connection to the server is lost",
             atomic_load(&server->shared->port));
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), text);
}

/* ---- The server dies ------------------------------------------------------------------------- */

TEST(every_call_reports_the_death_of_the_server)
{
    struct server server;
    server_start(&server, 0);
    enum { CALLS = 11 };
    td_store *stores[CALLS];
    for (int i = 0; i < CALLS; i++)
        stores[i] = server_open(&server);
    int last = raw_open(atomic_load(&server.shared->port), RAW_SECRET);
    server_kill(&server, last);

    const char *key = "key";
    td_bytes value;
    bool flag;
    int64_t number;
    expect_lost(td_store_set(stores[0], key, "x", 1), &server);
    expect_lost(td_store_get(stores[1], key, 0, &value), &server);
    expect_lost(td_store_add(stores[2], key, 1, NULL), &server);
    expect_lost(td_store_append(stores[3], key, "x", 1), &server);
    expect_lost(td_store_compare_set(stores[4], key, "", 0, "x", 1, &value), &server);
    expect_lost(td_store_delete_key(stores[5], key, &flag), &server);
    expect_lost(td_store_wait(stores[6], &key, 1, 0), &server);
    expect_lost(td_store_check(stores[7], &key, 1, &flag), &server);
    expect_lost(td_store_multi_get(stores[8], &key, 1, 0, &value), &server);
    expect_lost(td_store_num_keys(stores[9], &number), &server);
    for (int i = 0; i < CALLS - 1; i++) {
        expect_lost(td_store_set(stores[i], key, "x", 1), &server); /* and again */
        CHECK_OK(td_store_close(stores[i]));                        /* nothing more to report */
    }
    CHECK_OK(td_store_close(stores[CALLS - 1])); /* nothing of this one was lost */
}

static td_store *set_in_vain(struct server *server)
{
    server_start(server, 0);
    td_store *store = server_open(server);
    CHECK_OK(td_store_add(store, "confirmed", 1, NULL));
    CHECK_OK(td_store_set(store, "confirmed too", "x", 1));
    CHECK_OK(td_store_add(store, "confirmed", 1, NULL));
    int last = raw_open(atomic_load(&server->shared->port), RAW_SECRET);
    server_stop(server);
    CHECK_OK(td_store_set(store, "the first", "x", 1));
    CHECK_OK(td_store_append(store, "the second", "x", 1));
    server_kill(server, last);
    return store;
}

#define MAY_BE_LOST                                                                                \
    "what was set last may be lost with it: 2 calls without an answer, the first for "

TEST(what_may_be_lost_is_named_by_the_next_set)
{
    struct server server;
    td_store *store = set_in_vain(&server);
    expect_lost(td_store_set(store, "the third", "x", 1), &server);
    CHECK_CONTAINS(td_last_error(), MAY_BE_LOST "key \"the first\"");
    CHECK_OK(td_store_close(store)); /* was reported */
}

TEST(what_may_be_lost_is_named_by_the_next_get)
{
    struct server server;
    td_bytes value;
    td_store *store = set_in_vain(&server);
    expect_lost(td_store_get(store, "confirmed", 0, &value), &server);
    CHECK_CONTAINS(td_last_error(), MAY_BE_LOST "key \"the first\"");
    CHECK_OK(td_store_close(store));
}

TEST(what_may_be_lost_is_named_on_closing)
{
    struct server server;
    td_store *store = set_in_vain(&server);
    expect_lost(td_store_close(store), &server);
    CHECK_CONTAINS(td_last_error(), MAY_BE_LOST "key \"the first\"");
}

static void *wait_for_ever(void *arg)
{
    const char *key = "never";
    CHECK_FAILS(td_store_wait(arg, &key, 1, 0), TD_ERR_PEER,
                "the connection to the server is lost");
    return NULL;
}

TEST(the_death_of_the_server_wakes_waiters)
{
    struct server server;
    pthread_t threads[4];
    server_start(&server, 0);
    td_store *store = server_open(&server), *another = server_open(&server);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, wait_for_ever, i % 2 ? store : another), 0);
    CHECK_OK(td_store_add(store, "key", 1, NULL));
    fork_kill(server.pid, SIGKILL);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_store_close(another));
}

/* ---- The server does not answer -------------------------------------------------------------- */

TEST(a_stopped_server_is_named)
{
    struct server server;
    char message[100];
    int64_t sum;
    td_bytes value;
    server_start(&server, 0);
    td_store *store = server_open(&server);
    CHECK_OK(td_store_set_timeout(store, 300));
    CHECK_OK(td_store_add(store, "sum", 1, NULL));
    server_stop(&server);
    snprintf(message, sizeof message, "tcp store: the server at 127.0.0.1:%d does not answer",
             atomic_load(&server.shared->port));
    for (int i = 0; i < 2; i++) {
        int64_t start = td__now_ns();
        CHECK_EQ(td_store_add(store, "sum", 10, NULL), TD_ERR_TIMEOUT);
        CHECK_STR(td_last_error(), message);
        int64_t took = td__now_ns() - start;
        CHECK(took > SECOND / 4);
        CHECK_PROMPT(start);
    }
    /* One that waits for a key gives the server a little longer to name the key. */
    CHECK_EQ(td_store_get(store, "missing", 300, &value), TD_ERR_TIMEOUT);
    CHECK_STR(td_last_error(), message);

    /* It was only stopped: late answers are dropped. */
    kill(server.pid, SIGCONT);
    CHECK_OK(td_store_set_timeout(store, 20000));
    CHECK_OK(td_store_add(store, "sum", 100, &sum));
    CHECK_EQ(sum, 121); /* what was asked for was done all the same */
    CHECK_FAILS(td_store_get(store, "missing", 10, &value), TD_ERR_TIMEOUT,
                "tcp store: key \"missing\" was not set in time");
    CHECK_OK(td_store_close(store));
    fork_kill(server.pid, SIGKILL);
}

TEST(closing_does_not_wait_for_a_stopped_server_for_ever)
{
    struct server server;
    server_start(&server, 0);
    td_store *store = server_open(&server), *idle = server_open(&server);
    CHECK_OK(td_store_set_timeout(store, 300));
    server_stop(&server);
    CHECK_OK(td_store_set(store, "key", "x", 1));
    int64_t start = td__now_ns();
    CHECK_FAILS(td_store_close(store), TD_ERR_TIMEOUT, "does not answer");
    CHECK_PROMPT(start);
    CHECK_OK(td_store_close(idle)); /* has nothing to wait for */
    fork_kill(server.pid, SIGKILL);
}

TEST(a_set_that_cannot_be_sent_ends_in_time, .deadline_s = 30)
{
    struct server server;
    enum { SIZE = 16 << 20 }; /* more than the socket takes */
    char *value = calloc(1, SIZE);
    server_start(&server, 0);
    td_store *store = server_open(&server);
    CHECK_OK(td_store_set_timeout(store, 300));
    server_stop(&server);
    int64_t start = td__now_ns();
    td_status status = td_store_set(store, "large", value, SIZE);
    CHECK(status == TD_ERR_TIMEOUT || status == TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "it takes no more bytes");
    CHECK_CONTAINS(td_last_error(), "\"large\"");
    CHECK_PROMPT(start);
    td_store_close(store);
    free(value);
    fork_kill(server.pid, SIGKILL);
}

/* ---- What the server cannot do --------------------------------------------------------------- */

TEST(an_append_beyond_the_limit_is_reported_by_the_next_call, .deadline_s = 40)
{
#if defined(__SANITIZE_THREAD__)
    td_test_skip("the thread sanitizer takes minutes for copies of 256 MiB");
#endif
    td_store *store;
    int64_t sum;
    char *value = calloc(1, TD_STORE_MAX_VALUE);
    td_tcp_store_options options = {.host_server = true};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    CHECK_OK(td_store_set(store, "full", value, TD_STORE_MAX_VALUE));
    CHECK_OK(td_store_append(store, "full", "x", 1)); /* is not waited for */
    /* It was refused by the time that this is answered, and so the call after it reports it. */
    td_status status = td_store_add(store, "sum", 1, &sum);
    if (!status)
        status = td_store_add(store, "sum", 1, &sum);
    CHECK_EQ(status, TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(),
                   "an earlier call failed: append to \"full\": 268435456 bytes and "
                   "1 more exceed the 268435456 of a value");
    CHECK_OK(td_store_add(store, "sum", 1, &sum)); /* reported once, and good again */
    /* The same at the end. */
    CHECK_OK(td_store_append(store, "full", "x", 1));
    CHECK_FAILS(td_store_close(store), TD_ERR_INVALID,
                "an earlier call failed: append to \"full\"");
    free(value);
}

/* More clients than the server may have file descriptors. */
TEST(a_server_without_descriptors_recovers)
{
    struct server server;
    enum { LIMIT = 40, CLIENTS = 60 };
    int fds[CLIENTS], count = 0;
    td_store *stores[CLIENTS];
    server_start(&server, LIMIT);
    int port = atomic_load(&server.shared->port);
    td_store *good = server_open(&server);
    for (int i = 0; i < CLIENTS; i++)
        fds[i] = raw_connect(port);
    CHECK_OK(td_store_add(good, "key", 1, NULL));
    td_store *late = server_open(&server); /* a silent client is evicted for one of the job */
    CHECK_OK(td_store_close(late));
    for (int i = 0; i < CLIENTS; i++)
        close(fds[i]);

    td_tcp_store_options options = {.secret = RAW_SECRET, .timeout_ms = 500};
    td_status status = TD_OK;
    while (count < CLIENTS &&
           !(status = td_tcp_store_open("127.0.0.1", port, &options, &stores[count])))
        count++;
    CHECK_EQ(status, TD_ERR_TIMEOUT); /* full, which is no matter of secrets */
    CHECK(count > 5);
    CHECK_OK(td_store_add(good, "key", 1, NULL));
    while (count)
        CHECK_OK(td_store_close(stores[--count]));
    late = server_open(&server); /* not full any more */
    CHECK_OK(td_store_add(late, "key", 1, NULL));
    CHECK_OK(td_store_close(late));
    CHECK_OK(td_store_close(good));
    fork_kill(server.pid, SIGKILL);
}

/* ---- A client dies --------------------------------------------------------------------------- */

struct testator {
    int port;
    atomic_int *ready;
};

static void make_will(void *arg)
{
    const struct testator *testator = arg;
    td_store *store;
    td_tcp_store_options options = {.secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", testator->port, &options, &store));
    CHECK_OK(td__tcp_store_set_will(store, "will", "the first", 9));
    CHECK_OK(td__tcp_store_set_will(store, "will", "the last", 8));
    CHECK_OK(td_store_add(store, "key", 1, NULL)); /* they have arrived */
    atomic_store(testator->ready, 1);
    while (atomic_load(testator->ready) == 1)
        td__sleep_ns(1000000);
    CHECK_OK(td_store_close(store));
}

static bool has_key(td_store *store, const char *key)
{
    bool there;
    CHECK_OK(td_store_check(store, &key, 1, &there));
    return there;
}

TEST(a_will_is_carried_out_when_a_client_dies)
{
    struct server server;
    td_bytes value;
    server_start(&server, 0);
    td_store *store = server_open(&server);
    struct testator testator = {atomic_load(&server.shared->port), fork_shared(sizeof(int))};
    pid_t pid = fork_start(make_will, &testator);
    CHECK_SOON(atomic_load(testator.ready) || fork_has_ended(pid));
    CHECK(!has_key(store, "will"));
    fork_kill(pid, SIGKILL);
    int64_t start = td__now_ns();
    CHECK_OK(td_store_get(store, "will", 60000, &value)); /* the waiter is woken */
    CHECK_PROMPT(start);
    CHECK_STR(value.data, "the last");
    td_bytes_free(&value);
    CHECK_OK(td_store_close(store));
    fork_kill(server.pid, SIGKILL);
}

TEST(a_will_is_forgotten_when_a_client_closes)
{
    struct server server;
    server_start(&server, 0);
    td_store *store = server_open(&server);
    struct testator testator = {atomic_load(&server.shared->port), fork_shared(sizeof(int))};
    pid_t pid = fork_start(make_will, &testator);
    CHECK_SOON(atomic_load(testator.ready) || fork_has_ended(pid));
    atomic_store(testator.ready, 2);
    fork_join(pid);
    const char *key = "will";
    CHECK_FAILS(td_store_wait(store, &key, 1, 300), TD_ERR_TIMEOUT, "\"will\" was not set in time");
    CHECK_OK(td_store_close(store));
    fork_kill(server.pid, SIGKILL);
}

TEST(a_will_is_carried_out_when_a_client_sends_garbage)
{
    td_store *store;
    td_tcp_store_options options = {.host_server = true, .secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    td_log_set_level(TD_LOG_ERROR);
    int fd = raw_open(td_tcp_store_port(store), RAW_SECRET);
    struct td__buffer request = raw_begin(0, TD__WIRE_WILL);
    td__buffer_put_string(&request, "will", 4);
    td__buffer_put_string(&request, "x", 1);
    raw_finish(fd, &request);
    CHECK(!has_key(store, "will"));
    CHECK(raw_send(fd, "this is no request", 18));
    CHECK_SOON(has_key(store, "will"));
    close(fd);

    td_store *hash;
    CHECK_OK(td_hash_store_open(&hash));
    CHECK_FAILS(td__tcp_store_set_will(hash, "will", "x", 1), TD_ERR_UNSUPPORTED,
                "a hash store carries out no will");
    CHECK_OK(td_store_close(hash));
    CHECK_OK(td_store_close(store));
}

/* ---- Closing the server ---------------------------------------------------------------------- */

struct closer {
    td_store *store;
    atomic_bool closed;
};

static void *close_store(void *arg)
{
    struct closer *closer = arg;
    CHECK_OK(td_store_close(closer->store));
    atomic_store(&closer->closed, true);
    return NULL;
}

TEST(closing_lingers_until_the_clients_have_left)
{
    struct closer closer = {0};
    td_store *clients[3], *late;
    pthread_t thread;
    td_tcp_store_options options = {.host_server = true, .secret = RAW_SECRET, .linger_ms = 60000};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &closer.store));
    int port = td_tcp_store_port(closer.store);
    options = (td_tcp_store_options){.secret = RAW_SECRET, .timeout_ms = 200};
    for (int i = 0; i < 3; i++)
        CHECK_OK(td_tcp_store_open("127.0.0.1", port, &options, &clients[i]));
    CHECK_EQ(pthread_create(&thread, NULL, close_store, &closer), 0);
    /* No new client is admitted. */
    CHECK_SOON(td_tcp_store_open("127.0.0.1", port, &options, &late) == TD_ERR_TIMEOUT ||
               (td_store_close(late), false));
    for (int i = 0; i < 3; i++) { /* connected clients are still served */
        CHECK_OK(td_store_set_timeout(clients[i], 20000));
        for (int j = 0; j < 100; j++)
            CHECK_OK(td_store_add(clients[i], "key", 1, NULL));
        CHECK(!atomic_load(&closer.closed));
        CHECK_OK(td_store_close(clients[i]));
    }
    CHECK_SOON(atomic_load(&closer.closed));
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

TEST(lingering_ends_in_time)
{
    td_store *store, *client;
    td_tcp_store_options options = {.host_server = true, .secret = RAW_SECRET, .linger_ms = 200};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    options.host_server = false;
    CHECK_OK(td_tcp_store_open("127.0.0.1", td_tcp_store_port(store), &options, &client));
    int64_t start = td__now_ns();
    CHECK_OK(td_store_close(store));
    int64_t took = td__now_ns() - start;
    CHECK(took >= SECOND / 5);
    CHECK_PROMPT(start);
    CHECK_FAILS(td_store_add(client, "key", 1, NULL), TD_ERR_PEER,
                "the connection to the server is");
    CHECK_OK(td_store_close(client));

    /* Without lingering it is at once. */
    options = (td_tcp_store_options){.host_server = true, .secret = RAW_SECRET};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    options.host_server = false;
    CHECK_OK(td_tcp_store_open("127.0.0.1", td_tcp_store_port(store), &options, &client));
    start = td__now_ns();
    CHECK_OK(td_store_close(store));
    CHECK_PROMPT(start);
    CHECK_OK(td_store_close(client));
}

/* ---- Addresses ------------------------------------------------------------------------------- */

/* A server at `host`, and a client in another process. */
struct meeting_point {
    const char *host, *client_host;
    int port;
};

static void come_as_client(void *arg)
{
    const struct meeting_point *point = arg;
    td_store *store;
    td_tcp_store_options options = {.timeout_ms = 20000};
    CHECK_OK(td_tcp_store_open(point->client_host, point->port, &options, &store));
    CHECK_EQ(td_tcp_store_port(store), point->port);
    CHECK_OK(td_store_set(store, "from the client", "x", 1));
    const char *key = "from the server";
    CHECK_OK(td_store_wait(store, &key, 1, 0));
    CHECK_OK(td_store_close(store));
}

static void expect_meeting(const char *host, const char *client_host)
{
    struct meeting_point point = {.host = host, .client_host = client_host};
    bool local = !strncmp(host, "unix:", 5);
    td_store *store;
    td_tcp_store_options options = {.host_server = true, .linger_ms = 10000};
    point.port = local ? 0 : reserve_port();
    pid_t pid = fork_start(come_as_client, &point); /* before there is a thread here */
    CHECK_OK(td_tcp_store_open(host, point.port, &options, &store));
    CHECK_EQ(td_tcp_store_port(store), point.port);
    CHECK_OK(td_store_set(store, "from the server", "x", 1));
    const char *key = "from the client";
    CHECK_OK(td_store_wait(store, &key, 1, 20000));
    CHECK_OK(td_store_close(store));
    fork_join(pid);
}

TEST(clients_come_by_ipv4_and_ipv6)
{
    expect_meeting("127.0.0.1", "127.0.0.1");
    expect_meeting("localhost", "localhost");
    expect_meeting("127.0.0.1", "::ffff:127.0.0.1");
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        td_test_skip("this host has no IPv6");
    close(fd);
    expect_meeting("::1", "[::1]");
    expect_meeting("[::1]", "::1");
}

TEST(clients_come_by_abstract_sockets)
{
    char host[100];
    snprintf(host, sizeof host, "unix:@tandem-test-%d", (int)getpid());
    expect_meeting(host, host);
    expect_meeting(host, host); /* the name is free again */
}

TEST(a_socket_in_the_file_system_is_removed)
{
    char host[200];
    struct stat info;
    snprintf(host, sizeof host, "unix:%s/socket", td_test_temp_dir());
    for (int i = 0; i < 2; i++) {
        expect_meeting(host, host);
        if (!stat(host + strlen("unix:"), &info))
            FAIL("%s was left behind", host);
    }
}

static void serve_at(void *arg)
{
    td_store *store;
    td_tcp_store_options options = {.host_server = true};
    CHECK_OK(td_tcp_store_open(arg, 0, &options, &store));
    for (;;)
        pause();
}

TEST(a_socket_that_a_dead_server_left_is_no_obstacle)
{
    char host[200];
    td_store *store;
    td_tcp_store_options options = {.timeout_ms = 20000};
    snprintf(host, sizeof host, "unix:%s/socket", td_test_temp_dir());
    pid_t pid = fork_start(serve_at, host);
    CHECK_OK(td_tcp_store_open(host, 0, &options, &store));
    CHECK_OK(td_store_close(store));
    options.host_server = true; /* while it lives, the address is in use */
    CHECK_FAILS(td_tcp_store_open(host, 0, &options, &store), TD_ERR_SYSTEM,
                "it is in use already");
    fork_kill(pid, SIGKILL);
    CHECK_OK(td_tcp_store_open(host, 0, &options, &store));
    CHECK_OK(td_store_close(store));
}

TEST(an_address_in_use_is_named)
{
    char host[100], message[200];
    td_store *store, *second;
    td_tcp_store_options options = {.host_server = true};
    snprintf(host, sizeof host, "unix:@tandem-test-%d", (int)getpid());
    CHECK_OK(td_tcp_store_open(host, 0, &options, &store));
    snprintf(message, sizeof message, "cannot listen at %s: it is in use already", host);
    CHECK_FAILS(td_tcp_store_open(host, 0, &options, &second), TD_ERR_SYSTEM, message);
    CHECK_OK(td_store_close(store));

    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    int port = td_tcp_store_port(store);
    snprintf(message, sizeof message, "port %d is in use already", port);
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", port, &options, &second), TD_ERR_SYSTEM, message);
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_tcp_store_open("127.0.0.1", port, &options, &store)); /* free again, at once */
    CHECK_OK(td_store_close(store));
}
