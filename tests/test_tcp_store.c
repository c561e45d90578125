/* The TCP store: what only it does. */
#include "runner.h"
#include "store_conformance.h"
#include "store_kinds.h"

#include "base/auth.h"
#include "base/clock.h"
#include "os/socket.h"
#include "os/trust.h"
#include "store/store_ops.h"

#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- One process ----------------------------------------------------------------------------- */

/* A port that the system gives to no other socket while `fd` is open, and that has no listener. A server of the
 * test can bind it, since both sides set SO_REUSEADDR. */
static int silent_port(int *fd)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    int on = 1;
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
    CHECK_EQ(bind(*fd, (struct sockaddr *)&address, size), 0);
    CHECK_EQ(getsockname(*fd, (struct sockaddr *)&address, &size), 0);
    return ntohs(address.sin_port);
}

TEST(tcp_opens_or_says_why)
{
    td_store *store = (td_store *)1;
    td_tcp_store_options options = {.timeout_ms = 100};
    CHECK_FAILS(td_tcp_store_open(NULL, 1, &options, &store), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", -1, &options, &store), TD_ERR_INVALID, "-1");
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 65536, &options, &store), TD_ERR_INVALID, "65536");
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 0, &options, &store), TD_ERR_INVALID, "port");
    CHECK_FAILS(td_tcp_store_open("", 1, &options, &store), TD_ERR_INVALID, "host");
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 1, &options, NULL), TD_ERR_INVALID, "NULL");
    options.timeout_ms = TD_NOW;
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 1, &options, &store), TD_ERR_INVALID,
                "td_tcp_store_open: timeout_ms is -1 ms");
    options.timeout_ms = 100;
    options.linger_ms = -2;
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 1, &options, &store), TD_ERR_INVALID,
                "linger_ms is -2 ms");
    options.linger_ms = 0;
    options.reserved[3] = &options;
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 1, &options, &store), TD_ERR_INVALID,
                "td_tcp_store_open: reserved[3]");
    options.reserved[3] = NULL;

    int fd, port = silent_port(&fd);
    char where[32];
    snprintf(where, sizeof where, "127.0.0.1:%d", port);
    int64_t start = td__now_ns();
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", port, &options, &store), TD_ERR_TIMEOUT, where);
    CHECK_CONTAINS(td_last_error(), "Connection refused");
    CHECK(td__now_ns() - start >= 95000000);
    CHECK(store == (td_store *)1);

    td_store *server = open_server_at("127.0.0.1");
    char taken[32];
    snprintf(taken, sizeof taken, "port %d is in use", tcp_port);
    options.host_server = true;
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", tcp_port, &options, &store), TD_ERR_SYSTEM, taken);
    CHECK_OK(td_store_close(server));
    close(fd);
}

TEST(tcp_options_of_zero_are_the_defaults)
{
    td_store *server, *client;
    CHECK_OK(
        td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true}, &server));
    CHECK_EQ(td_store_timeout(server), TD_STORE_DEFAULT_TIMEOUT_MS);
    CHECK_OK(td_tcp_store_open("127.0.0.1", td_tcp_store_port(server), NULL, &client));
    CHECK_EQ(td_store_timeout(client), TD_STORE_DEFAULT_TIMEOUT_MS);
    CHECK_OK(td_store_close(client));
    CHECK_OK(td_tcp_store_open("127.0.0.1", td_tcp_store_port(server), &(td_tcp_store_options){0},
                               &client));
    CHECK_EQ(td_store_timeout(client), TD_STORE_DEFAULT_TIMEOUT_MS);
    CHECK_OK(td_store_close(client));
    CHECK_OK(td_store_close(server));
}

TEST(tcp_ports)
{
    td_store *hash = open_hash(), *tcp = open_tcp(), *prefix;
    CHECK_OK(td_prefix_store_open("p", tcp, &prefix));
    CHECK(td_tcp_store_port(tcp) > 0);
    CHECK_EQ(td_tcp_store_port(hash), -1);
    td_store *local = open_unix();
    CHECK_EQ(td_tcp_store_port(local), 0);
    CHECK_OK(td_store_close(local));
    CHECK_OK(td_store_close(prefix));
    CHECK_OK(td_store_close(hash));
    CHECK_OK(td_store_close(tcp));
}

TEST(tcp_listens_at_the_given_address)
{
    static const char *const hosts[] = {"localhost", "127.0.0.1", "::1", "[::1]", "127.0.0.5"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        bool v6 = strchr(hosts[i], ':');
        int fd = v6 ? socket(AF_INET6, SOCK_STREAM, 0) : -1;
        if (v6 && fd < 0)
            continue; /* a machine without IPv6 */
        close(fd);
        td_store *server = open_server_at(hosts[i]), *client = open_client_at(hosts[i]);
        store_set_text(client, "k", hosts[i]);
        store_expect_text(server, "k", hosts[i]);
        CHECK_OK(td_store_close(client));
        CHECK_OK(td_store_close(server));
    }
}

TEST(tcp_refuses_another_secret)
{
    td_store *server = open_tcp(), *store = NULL; /* secret: conformance */
    td_tcp_store_options options = {.timeout_ms = 60000, .secret = "another"};
    int64_t start = td__now_ns();
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", tcp_port, &options, &store), TD_ERR_AUTH, "secret");
    options.secret = NULL;
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", tcp_port, &options, &store), TD_ERR_AUTH, "secret");
    CHECK_PROMPT(start);
    setenv("TANDEM_SECRET", "conformance", 1);
    CHECK_OK(td_tcp_store_open("127.0.0.1", tcp_port, &options, &store));
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_store_close(server));
}

TEST(tcp_stays_on_this_host_without_a_secret)
{
    td_store *store = NULL;
    td_tcp_store_options options = {.timeout_ms = 2000};
    CHECK_FAILS(td_tcp_store_open("192.0.2.1", 9, &options, &store), TD_ERR_AUTH, "TANDEM_SECRET");
    options.host_server = true;
    CHECK_FAILS(td_tcp_store_open("0.0.0.0", 0, &options, &store), TD_ERR_AUTH, "TANDEM_SECRET");
    CHECK(store == NULL);
}

static void *open_late(void *arg)
{
    td_tcp_store_options options = {.timeout_ms = 60000, .secret = "conformance"};
    td_store *store = NULL;
    CHECK_OK(td_tcp_store_open("127.0.0.1", *(int *)arg, &options, &store));
    store_expect_text(store, "k", "v");
    CHECK_OK(td_store_close(store));
    return NULL;
}

TEST(tcp_clients_wait_for_their_server)
{
    int fd, port = silent_port(&fd);
    pthread_t clients[3];
    for (int i = 0; i < 3; i++)
        pthread_create(&clients[i], NULL, open_late, &port);
    td__sleep_ns(50000000); /* so that they have been refused, most likely */
    td_store *server = NULL;
    td_tcp_store_options options = {
        .host_server = true, .secret = "conformance", .linger_ms = 10000};
    CHECK_OK(td_tcp_store_open("127.0.0.1", port, &options, &server));
    store_set_text(server, "k", "v");
    for (int i = 0; i < 3; i++)
        pthread_join(clients[i], NULL);
    CHECK_OK(td_store_close(server));
    close(fd);
}

static void *set_and_close_slowly(void *arg)
{
    td_store *client = arg;
    td__sleep_ns(100000000);
    store_set_text(client, "k", "v");
    CHECK_OK(td_store_close(client));
    return NULL;
}

TEST(tcp_server_lingers_for_its_clients)
{
    td_store *server = NULL;
    td_tcp_store_options options = {
        .host_server = true, .secret = "conformance", .linger_ms = 60000};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &server));
    tcp_port = td_tcp_store_port(server);
    td_store *client = open_tcp_again();
    pthread_t thread;
    pthread_create(&thread, NULL, set_and_close_slowly, client);
    CHECK_OK(td_store_close(server)); /* returns when the client has closed, and before 60 s */
    pthread_join(thread, NULL);
}

TEST(tcp_says_when_the_server_is_gone)
{
    td_store *server = open_tcp(), *client = open_tcp_again();
    store_set_text(client, "k", "v");
    store_settle(client);
    CHECK_OK(td_store_close(server));
    td_bytes value = {0};
    CHECK_FAILS(td_store_get(client, "k", 5000, &value), TD_ERR_PEER, "");
    CHECK(td_last_error()[0] != '\0');
    CHECK(value.data == NULL);
    int64_t sum = 99;
    CHECK_FAILS(td_store_add(client, "n", 1, &sum), TD_ERR_PEER, "");
    CHECK_EQ(sum, 99);
    CHECK_OK(td_store_close(client)); /* nothing that was set is lost */
}

TEST(tcp_lost_values_are_reported)
{
    td_store *server = open_tcp(), *client = open_tcp_again();
    store_settle(client);
    CHECK_OK(td_store_close(server));
    td_status status = td_store_set(client, "lost key", "v", 1);
    if (!status)
        CHECK_FAILS(td_store_close(client), TD_ERR_PEER, "lost key");
    else
        td_store_close(client);
}

/* Whatever an unauthenticated client sends, it gets at most a refusal, and other clients do not notice. */
TEST(tcp_unauthenticated_clients_get_nothing)
{
    char bytes[64];
    static const char *const texts[] = {
        "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "TDM\1 and then not what it should be, for as long as a hello would be, and longer",
        "\x16\x03\x01\x02", ""};
    td_store *server = open_tcp(), *client = open_tcp_again();
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr = {htonl(INADDR_LOOPBACK)},
                                  .sin_port = htons((uint16_t)tcp_port)};
    int fds[40];
    for (int i = 0; i < 40; i++) {
        const char *text = texts[i % 4];
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK_EQ(connect(fds[i], (struct sockaddr *)&address, sizeof address), 0);
        CHECK_EQ(send(fds[i], text, strlen(text), MSG_NOSIGNAL), strlen(text));
        CHECK_OK(td_store_add(client, "n", 1, NULL)); /* served beside them */
    }
    td_store *late = open_tcp_again();
    store_expect_text(late, "n", "40");
    for (int i = 0; i < 40; i++) {
        if (i % 4 == 1) /* as long as a hello: it was refused */
            CHECK(recv(fds[i], bytes, sizeof bytes, MSG_WAITALL) <= TD__REFUSAL_SIZE);
        else /* may still become one */
            CHECK(recv(fds[i], bytes, sizeof bytes, MSG_DONTWAIT) <= 0);
        close(fds[i]);
    }
    CHECK_EQ(store_count(late), 1);
    CHECK_OK(td_store_close(late));
    CHECK_OK(td_store_close(client));
    CHECK_OK(td_store_close(server));
}

/* A client that has the secret and sends garbage is disconnected; the others go on. */
TEST(tcp_garbage_of_a_client_harms_no_other)
{
    td_store *server = open_tcp();
    struct td__secret secret;
    CHECK_OK(td__secret_load("conformance", &secret));
    store_set_text(server, "k", "v");
    td_log_set_level(TD_LOG_ERROR);
    for (uint32_t seed = 0; seed < 100; seed++) {
        unsigned char bytes[200];
        int fd = -1;
        CHECK_OK(td__connect_trusted("127.0.0.1", tcp_port, "store", NULL, &secret,
                                     td__deadline_in_ms(60000), &fd));
        store_pattern(bytes, sizeof bytes, seed);
        if (seed % 2) { /* a header that may be right: a small body, a low operation */
            memset(bytes, 0, 12);
            bytes[0] = (unsigned char)(seed % 40);
            bytes[4] = 1;
            bytes[8] = (unsigned char)(seed / 2 % 16);
        }
        td__send_all(fd, bytes, 1 + seed * 2 % sizeof bytes, td__deadline_in_ms(60000));
        close(fd);
        store_expect_text(server, "k", "v");
    }
    CHECK_OK(td_store_close(server));
}

static void use_of_the_parents(void *arg)
{
    td_store **stores = arg;
    td_bytes value = {0};
    for (int i = 0; i < 2; i++) {
        CHECK_FAILS(td_store_set(stores[i], "k", "child", 5), TD_ERR_STATE, "fork");
        CHECK_FAILS(td_store_get(stores[i], "k", 10, &value), TD_ERR_STATE, "fork");
    }
    td_store *mine = open_tcp_again(); /* a connection of its own is fine */
    store_set_text(mine, "of the child", "x");
    CHECK_OK(td_store_close(mine));
    td_store_close(stores[1]); /* and these are the parent's: it does not notice */
    td_store_close(stores[0]);
}

TEST(tcp_after_fork)
{
#if defined(__SANITIZE_THREAD__)
    td_test_skip("ThreadSanitizer knows no threads of a fork that had some");
#endif
    td_store *stores[2] = {open_tcp(), open_tcp_again()};
    store_set_text(stores[1], "k", "v");
    struct td_test_child child = td_test_fork(use_of_the_parents, stores);
    CHECK_EQ(child.status, 0);
    free(child.output);
    store_expect_text(stores[0], "of the child", "x");
    store_expect_text(stores[1], "k", "v");
    CHECK_EQ(store_count(stores[0]), 2);
    CHECK_OK(td_store_close(stores[1]));
    CHECK_OK(td_store_close(stores[0]));
}

TEST(tcp_timeout_of_the_options)
{
    td_store *store = NULL;
    td_tcp_store_options options = {.host_server = true, .timeout_ms = 4321};
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    CHECK_EQ(td_store_timeout(store), 4321);
    CHECK_OK(td_store_close(store));
    CHECK_OK(
        td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true}, &store));
    CHECK_EQ(td_store_timeout(store), TD_STORE_DEFAULT_TIMEOUT_MS);
    CHECK_OK(td_store_close(store));
}

/* ---- A rank dies, or stops ------------------------------------------------------------------- */

/* A client that is killed takes nothing with it. */
RANKS(tcp_client_dies, .ranks = 3, .may_die = 1 << 2)
{
    td_store *store = open_of_ranks("tcp");
    count_in(store, 0);
    td_bytes value = {0};
    if (td_test_rank() == 2) {
        CHECK_OK(td_store_set(store, "last words", "x", 1));
        store_settle(store);
        td_test_barrier();
        td_store_get(store, "never", 0, &value); /* waits when it is killed */
        FAIL("rank 2 should be dead");
    }
    td_test_barrier();
    if (td_test_rank() == 0) {
        td_test_kill(2, SIGKILL);
        store_set_text(store, "killed", "yes");
    }
    store_expect_text(store, "killed", "yes");
    store_expect_text(store, "last words", "x");
    CHECK_OK(td_store_close(store));
}

/* The process that hosts the store dies: waiters fail at once. */
RANKS(tcp_host_dies, .ranks = 3, .may_die = 1 << 0)
{
    td_store *meeting = open_of_ranks("tcp"), *store = NULL;
    if (td_test_rank() == 0) {
        store = open_server_at("127.0.0.1");
        char port[16];
        snprintf(port, sizeof port, "%d", tcp_port);
        store_set_text(meeting, "port", port);
        count_in(meeting, 0);
        for (;;)
            pause();
    }
    td_bytes port = {0}, value = {0};
    CHECK_OK(td_store_get(meeting, "port", 60000, &port));
    tcp_port = atoi(port.data);
    td_bytes_free(&port);
    store = open_tcp_again();
    count_in(meeting, 0);
    if (td_test_rank() == 1)
        td_test_kill(0, SIGKILL);
    int64_t start = td__now_ns();
    CHECK_FAILS(td_store_get(store, "never", 60000, &value), TD_ERR_PEER, "");
    CHECK_PROMPT(start);
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_store_close(meeting));
}

static void *send_without_end(void *arg)
{
    char *much = calloc(1, 64 << 20); /* more than any socket takes */
    td_store_set(arg, "much", much, 64 << 20);
    free(much);
    return NULL;
}

static bool is_stopped(int pid)
{
    char path[64], state = '?';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
    fclose(file);
    return state == 'T';
}

/* The process that hosts the store stops: every call returns soon after its own timeout, whatever another thread
 * is waiting for. */
RANKS(tcp_host_stops, .ranks = 2, .may_die = 1 << 0, .deadline_s = 60)
{
    td_store *meeting = open_of_ranks("tcp"), *store;
    td_bytes value = {0};
    if (td_test_rank() == 0) {
        store = open_server_at("127.0.0.1");
        char port[32];
        snprintf(port, sizeof port, "%d %d", tcp_port, (int)getpid());
        store_set_text(meeting, "port and pid", port);
        for (;;)
            pause();
    }
    int pid;
    CHECK_OK(td_store_get(meeting, "port and pid", 60000, &value));
    CHECK_EQ(sscanf(value.data, "%d %d", &tcp_port, &pid), 2);
    td_bytes_free(&value);
    store = open_tcp_again();
    store_set_text(store, "k", "v");
    store_settle(store);
    td_test_kill(0, SIGSTOP);
    CHECK_SOON(is_stopped(pid));

    int64_t start = td__now_ns(), sum;
    CHECK_OK(td_store_set_timeout(store, 100));
    CHECK_FAILS(td_store_add(store, "n", 1, &sum), TD_ERR_TIMEOUT, "");
    CHECK_PROMPT(start);

    CHECK_OK(td_store_set_timeout(store, 15000));
    pthread_t sender;
    CHECK_EQ(pthread_create(&sender, NULL, send_without_end, store), 0);
    td__sleep_ns(200000000); /* it is at it by now, most likely */
    start = td__now_ns();
    CHECK(td_store_get(store, "k", 100, &value) != TD_OK);
    CHECK_PROMPT(start);
    td_test_kill(0, SIGKILL);
    pthread_join(sender, NULL);
    td_store_close(store);
    CHECK_OK(td_store_close(meeting));
}

/* The will of a client: set by the server when it dies, and not when it closes. */
RANKS(tcp_last_will, .ranks = 3, .may_die = 1 << 1)
{
    td_store *store = open_of_ranks("tcp");
    char key[32];
    snprintf(key, sizeof key, "will of %d", td_test_rank());
    CHECK_OK(td__tcp_store_set_will(store, key, "first", 5));
    CHECK_OK(td__tcp_store_set_will(store, key, "dead", 4));
    store_settle(store);
    td_test_barrier();
    if (td_test_rank() == 1)
        raise(SIGKILL);
    if (td_test_rank() == 2) {
        CHECK_OK(td_store_close(store));
        return;
    }
    store_expect_text(store, "will of 1", "dead");
    CHECK_EQ(store_count(store), 1);
    CHECK_OK(td_store_close(store));
}
