/* The stores: which kinds pass the conformance suite, what only one kind does, and several
 * processes at one store. */
#include "runner.h"
#include "store_conformance.h"

#include "base/auth.h"
#include "base/clock.h"
#include "os/socket.h"
#include "os/trust.h"
#include "store/tcp_store.h"

#include <tandem/store.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- The kinds ------------------------------------------------------------------------------- */

static td_store *open_hash(void)
{
    td_store *store = NULL;
    CHECK_OK(td_hash_store_open(&store));
    return store;
}

static const char *file_path(void)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/store", td_test_temp_dir());
    return path;
}

static td_store *open_file(void)
{
    td_store *store = NULL;
    CHECK_OK(td_file_store_open(file_path(), &store));
    return store;
}

/* The server of this test. A handle that hosts it must be closed last, or wait for the others. */
static int tcp_port;

static td_store *open_server_at(const char *host)
{
    td_store *store = NULL;
    td_tcp_store_options options = {.host_server = true, .secret = "conformance"};
    CHECK_OK(td_tcp_store_open(host, 0, &options, &store));
    tcp_port = td_tcp_store_port(store);
    return store;
}

static td_store *open_client_at(const char *host)
{
    td_store *store = NULL;
    td_tcp_store_options options = {.secret = "conformance"};
    CHECK_OK(td_tcp_store_open(host, tcp_port, &options, &store));
    return store;
}

static td_store *open_tcp(void)
{
    return open_server_at("127.0.0.1");
}

static td_store *open_tcp_again(void)
{
    return open_client_at("127.0.0.1");
}

static td_store *open_unix(void)
{
    char host[600];
    snprintf(host, sizeof host, "unix:%s/socket", td_test_temp_dir());
    return open_server_at(host);
}

static td_store *open_unix_again(void)
{
    char host[600];
    snprintf(host, sizeof host, "unix:%s/socket", td_test_temp_dir());
    return open_client_at(host);
}

/* Keeps nothing of the base but what the prefix store keeps. */
static td_store *view(td_store *base)
{
    td_store *store = NULL;
    CHECK_OK(td_prefix_store_open("pre", base, &store));
    CHECK_OK(td_store_close(base));
    return store;
}

static td_store *open_prefix_hash(void)
{
    td_store *base = open_hash();
    store_set_text(base, "outside", "is not seen");
    return view(base);
}

static td_store *open_prefix_tcp(void)
{
    return view(open_tcp());
}

static td_store *open_prefix_tcp_again(void)
{
    return view(open_tcp_again());
}

static const struct store_factory factories[] = {
    {.name = "hash", .open = open_hash},
    {.name = "file", .open = open_file, .open_again = open_file},
    {.name = "tcp", .open = open_tcp, .open_again = open_tcp_again},
    {.name = "unix", .open = open_unix, .open_again = open_unix_again},
    {.name = "prefix_hash", .open = open_prefix_hash, .prefix_size = 4},
    {.name = "prefix_tcp",
     .open = open_prefix_tcp,
     .open_again = open_prefix_tcp_again,
     .prefix_size = 4},
};

__attribute__((constructor)) static void register_kinds(void)
{
    for (size_t i = 0; i < sizeof factories / sizeof *factories; i++)
        store_conformance_register(&factories[i]);
}

/* ---- Prefix stores --------------------------------------------------------------------------- */

static int64_t count_keys(td_store *store)
{
    int64_t count = -1;
    CHECK_OK(td_store_num_keys(store, &count));
    return count;
}

TEST(prefixes_nest)
{
    td_store *base = open_hash(), *outer, *inner, *sibling;
    CHECK_OK(td_prefix_store_open("outer", base, &outer));
    CHECK_OK(td_prefix_store_open("inner", outer, &inner));
    CHECK_OK(td_prefix_store_open("inne", outer, &sibling));
    store_set_text(inner, "k", "1");
    store_set_text(outer, "k", "2");
    store_set_text(base, "k", "3");
    store_set_text(sibling, "r/k", "4");
    store_expect_text(base, "outer/inner/k", "1");
    store_expect_text(outer, "inner/k", "1");
    store_expect_text(base, "outer/k", "2");
    store_expect_text(base, "outer/inne/r/k", "4");
    CHECK_EQ(count_keys(inner), 1);
    CHECK_EQ(count_keys(sibling), 1);
    CHECK_EQ(count_keys(outer), 3);
    CHECK_EQ(count_keys(base), 4);
    store_set_text(base, "outer/inner/direct", "5");
    store_expect_text(inner, "direct", "5");

    td_bytes value = {0};
    CHECK_FAILS(td_store_get(inner, "missing", 10, &value), TD_ERR_TIMEOUT, "missing");
    CHECK_OK(td_store_close(base));
    CHECK_OK(td_store_close(outer)); /* the base before what stands on it, twice over */
    store_expect_text(inner, "k", "1");
    CHECK_OK(td_store_close(inner));
    store_expect_text(sibling, "r/k", "4");
    CHECK_OK(td_store_close(sibling));
}

TEST(prefixes_of_all_kinds)
{
    td_store *base = open_hash(), *empty, *slash, *internal, *store;
    CHECK_OK(td_prefix_store_open("", base, &empty));
    store_set_text(empty, "k", "1");
    store_expect_text(base, "/k", "1");
    CHECK_EQ(count_keys(empty), 1);
    CHECK_OK(td_prefix_store_open("a/", base, &slash));
    store_set_text(slash, "k", "2");
    store_expect_text(base, "a//k", "2");
    CHECK_OK(td_prefix_store_open("\1own", base, &internal)); /* Tandem's own do not count … */
    store_set_text(internal, "k", "3");
    CHECK_EQ(count_keys(base), 2);
    CHECK_EQ(count_keys(internal), 1); /* … except to the one that asks for them */

    CHECK_FAILS(td_prefix_store_open(NULL, base, &store), TD_ERR_INVALID, "prefix is NULL");
    CHECK_FAILS(td_prefix_store_open("p", NULL, &store), TD_ERR_INVALID, "base store is NULL");
    CHECK_FAILS(td_prefix_store_open("p", base, NULL), TD_ERR_INVALID, "output is NULL");
    CHECK_OK(td_store_close(internal));
    CHECK_OK(td_store_close(slash));
    CHECK_OK(td_store_close(empty));
    CHECK_OK(td_store_close(base));
}

TEST(a_prefix_leaves_less_room)
{
    td_store *base = open_hash(), *outer = NULL;
    char *prefix = calloc(1, TD_STORE_MAX_KEY + 1);
    memset(prefix, 'p', TD_STORE_MAX_KEY);
    CHECK_FAILS(td_prefix_store_open(prefix, base, &outer), TD_ERR_INVALID, "4096");
    CHECK(outer == NULL);
    prefix[TD_STORE_MAX_KEY - 6] = '\0';
    CHECK_OK(td_prefix_store_open(prefix, base, &outer));
    store_set_text(outer, "12345", "fits");
    CHECK_FAILS(td_store_set(outer, "123456", "x", 1), TD_ERR_INVALID, "longer than 4096");

    CHECK_EQ(count_keys(base), 1);
    CHECK_OK(td_store_close(outer));
    CHECK_OK(td_store_close(base));
    free(prefix);
}

TEST(nested_prefixes_leave_less_room)
{
    td_store *base = open_hash(), *outer = NULL, *inner;
    char *prefix = calloc(1, TD_STORE_MAX_KEY + 1);
    memset(prefix, 'p', TD_STORE_MAX_KEY - 6);
    CHECK_OK(td_prefix_store_open(prefix, base, &outer));
    CHECK_OK(td_prefix_store_open("in", outer, &inner));
    store_set_text(inner, "ab", "fits");
    store_expect_text(outer, "in/ab", "fits");
    CHECK_EQ(td_store_set(inner, "abc", "x", 1), TD_ERR_INVALID);
    CHECK_EQ(count_keys(base), 1);
    CHECK_OK(td_store_close(inner));
    CHECK_OK(td_store_close(outer));
    CHECK_OK(td_store_close(base));
    free(prefix);
}

TEST(a_prefix_store_has_its_own_timeout)
{
    td_store *base = open_hash(), *store;
    CHECK_OK(td_store_set_timeout(base, 1234));
    CHECK_OK(td_prefix_store_open("p", base, &store));
    CHECK_EQ(td_store_timeout(store), 1234);
    CHECK_OK(td_store_set_timeout(store, 5));
    CHECK_EQ(td_store_timeout(base), 1234);
    td_bytes value = {0};
    CHECK_FAILS(td_store_get(store, "k", 0, &value), TD_ERR_TIMEOUT, "k");
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_store_close(base));
}

/* ---- Only TCP -------------------------------------------------------------------------------- */

/* A port on which nobody listens: taken, so that nobody else gets it, but not listened on. */
static int silent_port(int *fd)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
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
    options.timeout_ms = -1;
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 1, &options, &store), TD_ERR_INVALID, "negative");
    options.timeout_ms = 100;

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

TEST(tcp_listens_where_it_was_told)
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
    td_tcp_store_options options = {.timeout_ms = 5000, .secret = "another"};
    int64_t start = td__now_ns();
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", tcp_port, &options, &store), TD_ERR_AUTH, "secret");
    options.secret = NULL;
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", tcp_port, &options, &store), TD_ERR_AUTH, "secret");
    CHECK(td__now_ns() - start < (int64_t)4000000000 * td_test_slowness()); /* at once */
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
    close(fd);
    td_store *server = NULL;
    td_tcp_store_options options = {
        .host_server = true, .secret = "conformance", .linger_ms = 10000};
    CHECK_OK(td_tcp_store_open("127.0.0.1", port, &options, &server));
    store_set_text(server, "k", "v");
    for (int i = 0; i < 3; i++)
        pthread_join(clients[i], NULL);
    CHECK_OK(td_store_close(server));
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

/* Whatever a stranger sends, it gets not one byte, and the others do not notice. */
TEST(tcp_strangers_get_nothing)
{
    static const char *const texts[] = {
        "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "TDM\1 and then not what it should be, for as long as a hello would be, and longer",
        "\x16\x03\x01\x02",
        ""};
    td_store *server = open_tcp(), *client = open_tcp_again();
    char byte;
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
            CHECK(recv(fds[i], &byte, 1, 0) <= 0);
        else /* may still become one */
            CHECK(recv(fds[i], &byte, 1, MSG_DONTWAIT) <= 0);
        close(fds[i]);
    }
    CHECK_EQ(count_keys(late), 1);
    CHECK_OK(td_store_close(late));
    CHECK_OK(td_store_close(client));
    CHECK_OK(td_store_close(server));
}

/* One that has the secret and sends nonsense is shut out; the others go on. */
TEST(tcp_nonsense_of_a_client_harms_nobody)
{
    td_store *server = open_tcp();
    struct td__secret secret;
    CHECK_OK(td__secret_load("conformance", &secret));
    store_set_text(server, "k", "v");
    td_log_set_level(TD_LOG_ERROR);
    for (uint32_t seed = 0; seed < 100; seed++) {
        unsigned char bytes[200];
        int fd = -1;
        CHECK_OK(td__connect_trusted("127.0.0.1", tcp_port, "store", &secret,
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
    CHECK_EQ(count_keys(stores[0]), 2);
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
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true},
                               &store));
    CHECK_EQ(td_store_timeout(store), TD_STORE_DEFAULT_TIMEOUT_MS);
    CHECK_OK(td_store_close(store));
}

/* ---- Only file ------------------------------------------------------------------------------- */

static int entries_in(const char *path)
{
    DIR *directory = opendir(path);
    CHECK(directory != NULL);
    int count = -2; /* without . and .. */
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

TEST(file_leaves_nothing)
{
    td_store *first = open_file(), *second = open_file();
    store_set_text(first, "k", "v");
    CHECK_OK(td_store_close(first));
    store_expect_text(second, "k", "v");
    CHECK_OK(td_store_close(second));
    CHECK_EQ(entries_in(td_test_temp_dir()), 0);
    first = open_file(); /* nothing of it is left: it starts empty */
    CHECK_EQ(count_keys(first), 0);
    CHECK_OK(td_store_close(first));
    CHECK_EQ(entries_in(td_test_temp_dir()), 0);
}

static void write_and_die(void *arg)
{
    (void)arg;
    td_store *store = open_file();
    store_set_text(store, "stale", "from an earlier job");
    raise(SIGKILL);
}

TEST(file_of_an_earlier_job_is_emptied)
{
    struct td_test_child child = td_test_fork(write_and_die, NULL);
    CHECK_EQ(child.status, SIGKILL);
    free(child.output);
    CHECK(entries_in(td_test_temp_dir()) > 0); /* it was left behind */
    td_store *store = open_file();
    CHECK_EQ(count_keys(store), 0);
    store_set_text(store, "k", "v");
    CHECK_OK(td_store_close(store));
    CHECK_EQ(entries_in(td_test_temp_dir()), 0);
}

TEST(file_that_is_something_else)
{
    td_store *store = NULL;
    char path[600];
    CHECK_FAILS(td_file_store_open(NULL, &store), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_file_store_open(file_path(), NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_file_store_open("", &store), TD_ERR_INVALID, "");
    snprintf(path, sizeof path, "%s/no/such/directory", td_test_temp_dir());
    CHECK_FAILS(td_file_store_open(path, &store), TD_ERR_SYSTEM, path);
    CHECK_FAILS(td_file_store_open(td_test_temp_dir(), &store), TD_ERR_INVALID, "directory");
    CHECK(store == NULL);
}

/* ---- Several processes ----------------------------------------------------------------------- */

static td_store *open_of_ranks(const char *kind)
{
    td_store *store = NULL;
    if (!strcmp(kind, "file")) {
        store = open_file();
        td_test_barrier(); /* else one may have closed it, and removed the file, before another came */
    } else {
        CHECK_OK(td_tcp_store_open("127.0.0.1", atoi(getenv("MASTER_PORT")), NULL, &store));
    }
    if (!strcmp(kind, "prefix"))
        store = view(store);
    return store;
}

/* All ranks have come here: each counts itself, and waits for the one that completes the count. */
static void count_in(td_store *store, int round)
{
    char key[64];
    int64_t arrived = 0;
    snprintf(key, sizeof key, "barrier %d", round);
    CHECK_OK(td_store_add(store, key, 1, &arrived));
    CHECK(arrived >= 1 && arrived <= td_test_size());
    strcat(key, " is complete");
    if (arrived == td_test_size())
        store_set_text(store, key, "yes");
    store_expect_text(store, key, "yes");
}

/* A token goes round: rank r adds its number to what it got from rank r-1. */
static void go_round(td_store *store, int round)
{
    int rank = td_test_rank(), size = td_test_size();
    char mine[64], from[64], text[64];
    int64_t sum = 0;
    snprintf(mine, sizeof mine, "ring %d/%d", round, rank);
    snprintf(from, sizeof from, "ring %d/%d", round, (rank + size - 1) % size);
    if (rank != 0) {
        td_bytes value = {0};
        CHECK_OK(td_store_get(store, from, 60000, &value));
        sum = atoll(value.data);
        td_bytes_free(&value);
    }
    snprintf(text, sizeof text, "%lld", (long long)sum + rank);
    store_set_text(store, mine, text);
    if (rank == 0) {
        snprintf(text, sizeof text, "%d", size * (size - 1) / 2);
        store_expect_text(store, from, text);
    }
}

static void work_together(const char *kind)
{
    td_store *store = open_of_ranks(kind);
    int rank = td_test_rank(), size = td_test_size();
    for (int i = 0; i < 50; i++)
        CHECK_OK(td_store_add(store, "sum", rank, NULL));
    for (int round = 0; round < 10; round++) {
        count_in(store, round);
        go_round(store, round);
    }
    count_in(store, 10);
    int64_t sum;
    CHECK_OK(td_store_add(store, "sum", 0, &sum));
    CHECK_EQ(sum, 50 * size * (size - 1) / 2);

    char key[64], *large = malloc(1 << 20);
    snprintf(key, sizeof key, "large %d", rank);
    store_pattern(large, 1 << 20, (uint32_t)rank);
    CHECK_OK(td_store_set(store, key, large, 1 << 20));
    int next = (rank + 1) % size;
    snprintf(key, sizeof key, "large %d", next);
    store_pattern(large, 1 << 20, (uint32_t)next);
    store_expect(store, key, large, 1 << 20);
    free(large);
    CHECK_OK(td_store_append(store, "roll", "x", 1));
    count_in(store, 11);
    td_bytes roll = {0};
    CHECK_OK(td_store_get(store, "roll", 60000, &roll));
    CHECK_EQ(roll.size, size);
    td_bytes_free(&roll);
    CHECK_OK(td_store_close(store));
    td_test_barrier();
    if (!strcmp(kind, "file"))
        CHECK_EQ(entries_in(td_test_temp_dir()), 0);
}

RANKS(tcp_4_ranks, .ranks = 4)
{
    work_together("tcp");
}

RANKS(tcp_8_ranks, .ranks = 8)
{
    work_together("tcp");
}

RANKS(prefix_4_ranks, .ranks = 4)
{
    work_together("prefix");
}

RANKS(file_4_ranks, .ranks = 4)
{
    work_together("file");
}

RANKS(file_8_ranks, .ranks = 8)
{
    work_together("file");
}

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

/* A process that dies while it uses the file blocks nobody, and the last one still removes it. */
RANKS(file_user_dies, .ranks = 4, .may_die = 1 << 3)
{
    td_store *store = open_of_ranks("file");
    count_in(store, 0);
    if (td_test_rank() == 3)
        for (;;)
            CHECK_OK(td_store_add(store, "busy", 1, NULL));
    if (td_test_rank() == 0) {
        CHECK_OK(td_store_wait(store, &(const char *){"busy"}, 1, 60000));
        td_test_kill(3, SIGKILL);
    }
    for (int i = 0; i < 20; i++)
        CHECK_OK(td_store_add(store, "sum", 1, NULL));
    CHECK_OK(td_store_add(store, "done", 1, NULL));
    int64_t done = 0;
    CHECK_SOON((CHECK_OK(td_store_add(store, "done", 0, &done)), done == 3));
    store_expect_text(store, "sum", "60");
    CHECK_OK(td_store_close(store));
}

/* The process that hosts the store dies: those that wait are told at once. */
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
    CHECK(td__now_ns() - start < (int64_t)10000000000);
    CHECK_OK(td_store_close(store));
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
    CHECK_EQ(count_keys(store), 1);
    CHECK_OK(td_store_close(store));
}
