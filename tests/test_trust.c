/* Proven connections: reaching a server, and listening for clients. The servers here are made by hand, correct
 * ones and others. */
#include "network_space.h"
#include "runner.h"

#include "base/clock.h"
#include "os/socket.h"
#include "os/trust.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MS ((int64_t)1000000)

static td__deadline in_a_while(void)
{
    return td__deadline_in_ms(60000);
}

static struct td__secret make_secret(const char *text)
{
    struct td__secret secret;
    CHECK_OK(td__secret_load(text, &secret));
    return secret;
}

/* ---- Servers --------------------------------------------------------------------------------- */

enum manner {
    CORRECT,
    SILENT,       /* accepts, and says nothing */
    REFUSES,      /* takes the hello, and refuses it */
    LIES,         /* sends a challenge made of chance */
    RESETS_FIRST, /* resets the first connection, and is correct on the second */
    PROXY, /* closes the first connections without a byte, then is correct: a proxy whose server starts */
    CLOSES,       /* closes all of them */
    LIKE_REFUSED, /* sends a challenge that begins as a refusal does */
    WRONG_WORDS,  /* sends a few bytes instead of a challenge, and closes */
    WRONG_SILENT, /* sends them, and waits for more */
};

enum { CLOSED_BY_PROXY = 20 };

struct server {
    const char *secret, *purpose;
    struct td__secret key;
    enum manner manner;
    int listener;
    int port;
    pthread_t thread;
    bool agreed;      /* the proof was right */
    size_t after_lie; /* bytes received after a wrong challenge */
    atomic_int accepted;
    atomic_bool end;
};

static int accept_one(struct server *server)
{
    CHECK_EQ(td__wait_fd(server->listener, POLLIN, in_a_while()), 0);
    int fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0);
    atomic_fetch_add(&server->accepted, 1);
    return fd;
}

static void refuse(int fd)
{
    uint8_t refusal[TD__REFUSAL_SIZE];
    td__auth_refusal(refusal);
    CHECK_EQ(td__send_all(fd, refusal, sizeof refusal, in_a_while()), 0);
}

/* A proxy reads nothing, waits until the hello is there, reads its first byte, or all of it. */
static void close_as_proxies_do(int fd, int how)
{
    uint8_t bytes[TD__HELLO_SIZE];
    if (how == 1)
        CHECK_EQ(td__wait_fd(fd, POLLIN, in_a_while()), 0);
    if (how >= 2)
        CHECK_EQ(td__recv_all(fd, bytes, how == 2 ? 1 : sizeof bytes, in_a_while()), 0);
    close(fd);
}

static void be_honest(struct server *server, int fd)
{
    struct td__auth auth = {.secret = server->key, .purpose = server->purpose};
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    if (td__recv_all(fd, hello, sizeof hello, in_a_while()))
        return;
    if (!td__auth_check_hello(&auth, hello)) {
        refuse(fd);
        return;
    }
    CHECK_OK(td__auth_challenge(&auth, challenge));
    CHECK_EQ(td__send_all(fd, challenge, sizeof challenge, in_a_while()), 0);
    server->agreed = !td__recv_all(fd, proof, sizeof proof, in_a_while()) &&
                     td__auth_check_proof(&auth, proof);
}

static void *serve(void *arg)
{
    struct server *server = arg;
    uint8_t bytes[TD__HELLO_SIZE];
    int fd = accept_one(server);
    switch (server->manner) {
    case SILENT:
        while (!atomic_load(&server->end))
            td__sleep_ns(MS);
        break;
    case REFUSES:
        CHECK_EQ(td__recv_all(fd, bytes, sizeof bytes, in_a_while()), 0);
        refuse(fd);
        break;
    case CLOSES:
        while (!atomic_load(&server->end)) {
            close_as_proxies_do(fd, 3);
            while (td__wait_fd(server->listener, POLLIN, td__deadline_in_ms(1)) &&
                   !atomic_load(&server->end))
                ;
            fd = atomic_load(&server->end) ? -1 : accept_one(server);
        }
        break;
    case LIKE_REFUSED:
        CHECK_EQ(td__recv_all(fd, bytes, sizeof bytes, in_a_while()), 0);
        refuse(fd);
        CHECK_EQ(td__send_all(fd, bytes, TD__CHALLENGE_SIZE - TD__REFUSAL_SIZE, in_a_while()), 0);
        break;
    case LIES:
        CHECK_EQ(td__recv_all(fd, bytes, sizeof bytes, in_a_while()), 0);
        CHECK_OK(td__random(bytes, sizeof bytes));
        CHECK_EQ(td__send_all(fd, bytes, TD__CHALLENGE_SIZE, in_a_while()), 0);
        while (!td__recv_all(fd, bytes, 1, in_a_while()))
            server->after_lie++;
        break;
    case RESETS_FIRST: {
        struct linger reset = {.l_onoff = 1, .l_linger = 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        CHECK_EQ(td__wait_fd(fd, POLLIN, in_a_while()), 0);
        close(fd);
        fd = accept_one(server);
        be_honest(server, fd);
        break;
    }
    case PROXY:
        for (int i = 0; i < CLOSED_BY_PROXY; i++) {
            close_as_proxies_do(fd, i % 4);
            fd = accept_one(server);
        }
        be_honest(server, fd);
        break;
    case WRONG_WORDS:
    case WRONG_SILENT:
        CHECK_EQ(td__recv_all(fd, bytes, sizeof bytes, in_a_while()), 0);
        CHECK_EQ(td__send_all(fd, "220 mail\r\n", 10, in_a_while()), 0);
        while (server->manner == WRONG_SILENT && !atomic_load(&server->end))
            td__sleep_ns(MS);
        break;
    case CORRECT:
        be_honest(server, fd);
        break;
    }
    close(fd);
    return NULL;
}

static void start_server(struct server *server, const char *host, int port)
{
    server->key = make_secret(server->secret);
    if (!server->purpose)
        server->purpose = "test";
    CHECK_OK(td__listen_trusted(host, port, server->purpose, &server->key, in_a_while(),
                                &server->listener, &server->port));
    CHECK_EQ(pthread_create(&server->thread, NULL, serve, server), 0);
}

static void stop_server(struct server *server)
{
    atomic_store(&server->end, true);
    pthread_join(server->thread, NULL);
    close(server->listener);
}

static td_status connect_with(const char *secret_text, const char *host, int port, int64_t ms,
                              int *fd)
{
    struct td__secret secret = make_secret(secret_text);
    return td__connect_trusted(host, port, "test", NULL, &secret, td__deadline_in_ms(ms), fd);
}

/* ---- Both sides agree, or do not ------------------------------------------------------------- */

TEST(trust_both_sides_agree)
{
    char path[512], abstract[64];
    snprintf(path, sizeof path, "unix:%s/socket", td_test_temp_dir());
    snprintf(abstract, sizeof abstract, "unix:@tandem test %d", (int)getpid());
    const char *const hosts[] = {"127.0.0.1", "localhost", path, abstract};
    static const char *const secrets[] = {"secret", ""};
    for (size_t i = 0; i < 4; i++) {
        for (size_t s = 0; s < 2; s++) {
            struct server server = {.secret = secrets[s]};
            int fd = -1;
            start_server(&server, hosts[i], 0);
            CHECK_EQ(server.port > 0, i < 2);
            CHECK_OK(connect_with(secrets[s], hosts[i], server.port, 60000, &fd));
            CHECK(fd >= 0);
            stop_server(&server);
            CHECK(server.agreed);
            close(fd);
            unlink(path + 5);
        }
    }
}

TEST(trust_other_secret_is_refused_at_once)
{
    static const struct {
        const char *client, *server, *says;
    } cases[] = {
        {"one", "two", "not the same"}, {"one", "", "missing"}, {"", "two", "missing here"}};
    for (size_t i = 0; i < 3; i++) {
        struct server server = {.secret = cases[i].server};
        int fd = -1;
        start_server(&server, "127.0.0.1", 0);
        int64_t start = td__now_ns();
        CHECK_FAILS(connect_with(cases[i].client, "127.0.0.1", server.port, 60000, &fd),
                    TD_ERR_AUTH, cases[i].says);
        CHECK_CONTAINS(td_last_error(), "TANDEM_SECRET");
        char where[32];
        snprintf(where, sizeof where, "127.0.0.1:%d", server.port);
        CHECK_CONTAINS(td_last_error(), where);
        CHECK_PROMPT(start);
        CHECK_EQ(fd, -1);
        stop_server(&server);
        CHECK(!server.agreed);
    }
}

TEST(trust_other_purpose_is_refused)
{
    struct server server = {.secret = "secret", .purpose = "something else"};
    int fd = -1;
    start_server(&server, "127.0.0.1", 0);
    CHECK_FAILS(connect_with("secret", "127.0.0.1", server.port, 60000, &fd), TD_ERR_AUTH, "test");
    stop_server(&server);
}

TEST(trust_a_wrong_server_learns_nothing)
{
    struct server server = {.secret = "secret", .manner = LIES};
    int fd = -1;
    start_server(&server, "127.0.0.1", 0);
    CHECK_FAILS(connect_with("secret", "127.0.0.1", server.port, 60000, &fd), TD_ERR_AUTH,
                "does not prove");
    stop_server(&server);
    CHECK_EQ(server.after_lie, 0); /* not even the proof */

    server = (struct server){.secret = "secret", .manner = REFUSES};
    start_server(&server, "127.0.0.1", 0);
    CHECK_FAILS(connect_with("secret", "127.0.0.1", server.port, 600000, &fd), TD_ERR_AUTH,
                "refused the job's secret");
    stop_server(&server);

    server = (struct server){.secret = "secret", .manner = LIKE_REFUSED};
    start_server(&server, "127.0.0.1", 0);
    CHECK_FAILS(connect_with("secret", "127.0.0.1", server.port, 600000, &fd), TD_ERR_AUTH,
                "does not prove");
    stop_server(&server);
}

TEST(trust_a_silent_server_is_left_in_time)
{
    struct server server = {.secret = "secret", .manner = SILENT};
    int fd = -1;
    char where[32];
    start_server(&server, "127.0.0.1", 0);
    snprintf(where, sizeof where, "127.0.0.1:%d", server.port);
    int64_t start = td__now_ns();
    CHECK_FAILS(connect_with("secret", "127.0.0.1", server.port, 100, &fd), TD_ERR_TIMEOUT, where);
    int64_t took = td__now_ns() - start;
    CHECK(took >= 95 * MS);
    CHECK_PROMPT(start);
    stop_server(&server);
}

TEST(trust_a_reset_is_tried_again)
{
    struct server server = {.secret = "secret", .manner = RESETS_FIRST};
    int fd = -1;
    start_server(&server, "127.0.0.1", 0);
    CHECK_OK(connect_with("secret", "127.0.0.1", server.port, 60000, &fd));
    stop_server(&server);
    CHECK(server.agreed);
    CHECK_EQ(atomic_load(&server.accepted), 2);
    close(fd);
}

TEST(trust_a_proxy_without_a_server_is_tried_again)
{
    struct server server = {.secret = "secret", .manner = PROXY};
    int fd = -1;
    start_server(&server, "127.0.0.1", 0);
    CHECK_OK(connect_with("secret", "127.0.0.1", server.port, 60000, &fd));
    stop_server(&server);
    CHECK(server.agreed);
    CHECK_EQ(atomic_load(&server.accepted), CLOSED_BY_PROXY + 1);
    close(fd);

    /* A proxy whose server never starts. */
    server = (struct server){.secret = "secret", .manner = CLOSES};
    start_server(&server, "127.0.0.1", 0);
    CHECK_FAILS(connect_with("secret", "127.0.0.1", server.port, 500, &fd), TD_ERR_TIMEOUT,
                "it closed the connection without an answer");
    CHECK(atomic_load(&server.accepted) >= 1);
    stop_server(&server);
}

TEST(trust_other_protocols_are_refused_at_once)
{
    static const enum manner manners[] = {WRONG_WORDS, WRONG_SILENT};
    for (int i = 0; i < 2; i++) {
        struct server server = {.secret = "secret", .manner = manners[i]};
        int fd = -1;
        start_server(&server, "127.0.0.1", 0);
        CHECK_FAILS(connect_with("secret", "127.0.0.1", server.port, 600000, &fd), TD_ERR_AUTH,
                    "is no test of Tandem");
        CHECK_EQ(atomic_load(&server.accepted), 1);
        stop_server(&server);
    }
}

/* ---- No listener ----------------------------------------------------------------------------- */

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

TEST(trust_lists_each_address_tried)
{
    struct td__address_list list;
    bool retry;
    int holder, port = silent_port(&holder), fd = -1;
    CHECK_OK(td__resolve("localhost", port, in_a_while(), &list, &retry));
    int64_t start = td__now_ns();
    CHECK_FAILS(connect_with("secret", "localhost", port, 100, &fd), TD_ERR_TIMEOUT, "localhost");
    CHECK(td__now_ns() - start >= 95 * MS);
    for (int i = 0; i < list.count; i++) {
        char text[TD__ADDRESS_TEXT];
        CHECK_CONTAINS(td_last_error(), td__address_text(&list.at[i], text));
    }
    CHECK_CONTAINS(td_last_error(), "Connection refused");
    CHECK_CONTAINS(td_last_error(), "test"); /* what it was looking for */
    CHECK_EQ(fd, -1);
    close(holder);

    char path[512];
    snprintf(path, sizeof path, "unix:%s/nothing", td_test_temp_dir());
    CHECK_FAILS(connect_with("secret", path, 0, 50, &fd), TD_ERR_TIMEOUT, "No such file");
    CHECK_CONTAINS(td_last_error(), path);
    CHECK_FAILS(connect_with("secret", "127.0.0.1", 65536, 60000, &fd), TD_ERR_INVALID, "65536");
    CHECK_FAILS(connect_with("secret", "", 1, 60000, &fd), TD_ERR_INVALID, "host");
}

struct connecting {
    const char *host;
    int port;
    int fd;
    td_status status;
    pthread_t thread;
    atomic_bool given_up;
};

static void *connect_patiently(void *arg)
{
    struct connecting *connecting = arg;
    connecting->status = connect_with("secret", connecting->host, connecting->port, 60000,
                                      &connecting->fd);
    if (connecting->status)
        fprintf(stderr, "connecting: %s\n", td_last_error());
    atomic_store(&connecting->given_up, connecting->status != TD_OK);
    return NULL;
}

static void appear_after(const char *host, int64_t ms)
{
    struct connecting connecting = {.host = host, .fd = -1};
    int holder;
    connecting.port = silent_port(&holder);
    CHECK_EQ(pthread_create(&connecting.thread, NULL, connect_patiently, &connecting), 0);
    td__sleep_ns(ms * MS);
    struct server server = {.secret = "secret"};
    start_server(&server, "127.0.0.1", connecting.port);
    CHECK_SOON(atomic_load(&server.accepted) || atomic_load(&connecting.given_up));
    CHECK(!atomic_load(&connecting.given_up));
    pthread_join(connecting.thread, NULL);
    CHECK_EQ(connecting.status, TD_OK);
    stop_server(&server);
    CHECK(server.agreed);
    close(connecting.fd);
    close(holder);
}

TEST(trust_waits_for_a_listener)
{
    appear_after("127.0.0.1", 100); /* refused several times by then, most likely */
    appear_after("localhost", 100);
}

/* A name is looked up for ten seconds at most, but a server that has one is waited for as long as
 * any other. */
TEST(trust_waits_long_for_a_name)
{
    appear_after("localhost", 10500);
}

/* ---- Listening ------------------------------------------------------------------------------- */

static td_status listen_with(const char *secret_text, const char *host, int port, int *fd, int *got)
{
    struct td__secret secret = make_secret(secret_text);
    return td__listen_trusted(host, port, "test", &secret, in_a_while(), fd, got);
}

TEST(listening_on_a_port_in_use_names_it)
{
    int fd = -1, port = 0, second = -1, got = -1;
    char says[64];
    CHECK_OK(listen_with("secret", "127.0.0.1", 0, &fd, &port));
    CHECK(port > 0);
    snprintf(says, sizeof says, "port %d is in use", port);
    CHECK_FAILS(listen_with("secret", "127.0.0.1", port, &second, &got), TD_ERR_SYSTEM, says);
    CHECK(second == -1 && got == -1);
    close(fd);

    char path[512];
    snprintf(path, sizeof path, "unix:%s/socket", td_test_temp_dir());
    CHECK_OK(listen_with("", path, 0, &fd, &port));
    CHECK_EQ(port, 0);
    CHECK_FAILS(listen_with("", path, 0, &second, &got), TD_ERR_SYSTEM, path);
    close(fd);
    snprintf(path, sizeof path, "unix:%s/no/such/place", td_test_temp_dir());
    CHECK_FAILS(listen_with("", path, 0, &second, &got), TD_ERR_SYSTEM, path);
}

/* A host of its own, with two ports. */
TEST(listening_without_a_free_port_says_so)
{
    int fds[2], fd = -1, port = -1;
    if (!network_space_enter() || !network_space_open_loopback() ||
        !network_space_write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40001"))
        td_test_skip("this user may not make a network of its own");
    for (int i = 0; i < 2; i++) {
        CHECK_OK(listen_with("secret", "127.0.0.1", 0, &fds[i], &port));
        CHECK(port == 40000 || port == 40001);
    }
    port = -1;
    CHECK_FAILS(listen_with("secret", "127.0.0.1", 0, &fd, &port), TD_ERR_SYSTEM,
                "no port is free for the test at 127.0.0.1");
    CHECK_CONTAINS(td_last_error(), "net.ipv4.ip_local_port_range");
    CHECK(fd == -1 && port == -1);
    close(fds[0]);
    CHECK_OK(listen_with("secret", "127.0.0.1", 0, &fd, &port));
    close(fd);
    close(fds[1]);
}

static bool listens_on_loopback_only(int fd)
{
    struct td__address address;
    td__local_address(fd, &address);
    return td__address_is_local(&address);
}

TEST(listening_where_the_host_says)
{
    static const char *const local[] = {"127.0.0.1", "localhost", "127.0.0.9"};
    int fd, port;
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(listen_with("secret", local[i], 0, &fd, &port));
        CHECK(listens_on_loopback_only(fd));
        close(fd);
        CHECK_OK(listen_with("", local[i], 0, &fd, &port));
        CHECK(listens_on_loopback_only(fd));
        close(fd);
    }
    static const char *const open_to_all[] = {"0.0.0.0", "::", "192.0.2.1"};
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(listen_with("secret", open_to_all[i], 0, &fd, &port));
        CHECK(!listens_on_loopback_only(fd));
        CHECK(port > 0);
        close(fd);
    }
    fd = -1;
    CHECK_FAILS(listen_with("secret", "127.0.0.1", 70000, &fd, &port), TD_ERR_INVALID, "70000");
    CHECK_EQ(fd, -1);
}

/* ---- Names that another user holds ----------------------------------------------------------- */

/* As long as the pipe is open, in a process of another user: the first `count` of the names. */
static void hold_names(const char *name, int count, bool listening, int ready, int end)
{
    char byte = 0;
    if (setgid(65534) || setuid(65534))
        _exit(1);
    for (int i = 0; i < count; i++) {
        struct td__address_list list;
        char text[128];
        bool retry;
        snprintf(text, sizeof text, i ? "%s-%d" : "%s", name, i);
        CHECK_OK(td__resolve(text, 0, in_a_while(), &list, &retry));
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (bind(fd, &list.at[0].any, list.at[0].size) || (listening && listen(fd, 100)))
            _exit(2);
    }
    if (write(ready, &byte, 1) != 1)
        _exit(3);
    _exit(read(end, &byte, 1) != 0);
}

struct holder {
    pid_t pid;
    int end;
};

static struct holder start_holder(const char *name, int count, bool listening)
{
    int ready[2], end[2];
    char byte;
    CHECK(!pipe2(ready, O_CLOEXEC) && !pipe2(end, O_CLOEXEC));
    struct holder holder = {.pid = fork(), .end = end[1]};
    CHECK(holder.pid >= 0);
    if (!holder.pid) {
        close(end[1]);
        hold_names(name, count, listening, ready[1], end[0]);
    }
    close(ready[1]);
    close(end[0]);
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return holder;
}

static void stop_holder(struct holder holder)
{
    int ending;
    close(holder.end);
    CHECK_EQ(waitpid(holder.pid, &ending, 0), holder.pid);
    CHECK_EQ(ending, 0);
}

TEST(trust_another_user_holds_the_name)
{
    char name[64];
    int fd, port;
    if (geteuid() != 0)
        td_test_skip("only root can be another user");
    snprintf(name, sizeof name, "unix:@tandem test names %d", (int)getpid());
    for (int round = 0; round < 3; round++) {
        struct holder holder = start_holder(name, round ? 3 : 1, round < 2);
        CHECK_FAILS(connect_with("secret", name, 0, 50, &fd), TD_ERR_TIMEOUT, name);
        if (round < 2)
            CHECK_CONTAINS(td_last_error(), "another user listens there");
        struct server server = {.secret = "secret"};
        start_server(&server, name, 0);
        if (round == 1)
            stop_holder(holder); /* the server stays where it is */
        CHECK_OK(connect_with("secret", name, 0, 60000, &fd));
        close(fd);
        if (round != 1)
            CHECK_FAILS(listen_with("secret", name, 0, &fd, &port), TD_ERR_SYSTEM,
                        "in use already");
        stop_server(&server);
        CHECK(server.agreed);
        if (round != 1)
            stop_holder(holder);
    }
    struct holder holder = start_holder(name, 16, true);
    CHECK_FAILS(listen_with("secret", name, 0, &fd, &port), TD_ERR_SYSTEM, "in use already");
    stop_holder(holder);
}

/* ---- Beyond this host without a secret ------------------------------------------------------- */

TEST(trust_needs_a_secret_beyond_this_host)
{
    static const char *const hosts[] = {"0.0.0.0", "::", "192.0.2.1", "2001:db8::1",
                                        "::ffff:192.0.2.1"};
    int fd = -1, port = -1;
    int64_t start = td__now_ns();
    for (size_t i = 0; i < 5; i++) {
        CHECK_FAILS(listen_with("", hosts[i], 0, &fd, &port), TD_ERR_AUTH, hosts[i]);
        CHECK_CONTAINS(td_last_error(), "TANDEM_SECRET");
        CHECK_CONTAINS(td_last_error(), "TANDEM_INSECURE=1");
        /* Refused before a socket is made: no time passes, however long it may take. */
        CHECK_FAILS(connect_with("", hosts[i], 9, 60000, &fd), TD_ERR_AUTH, hosts[i]);
        CHECK_CONTAINS(td_last_error(), "TANDEM_SECRET");
    }
    static const char *const not_one[] = {"", "0"};
    for (size_t i = 0; i < 2; i++) {
        setenv("TANDEM_INSECURE", not_one[i], 1);
        CHECK_FAILS(listen_with("", "0.0.0.0", 0, &fd, &port), TD_ERR_AUTH, "TANDEM_SECRET");
        CHECK_FAILS(connect_with("", "192.0.2.1", 9, 60000, &fd), TD_ERR_AUTH, "TANDEM_SECRET");
    }
    CHECK_PROMPT(start);
    CHECK(fd == -1 && port == -1);
    static const char *const wrong[] = {"yes", "true", "11", " 1"};
    for (size_t i = 0; i < 4; i++) {
        struct td__secret secret;
        setenv("TANDEM_INSECURE", wrong[i], 1);
        CHECK_FAILS(td__secret_load("", &secret), TD_ERR_INVALID, wrong[i]);
        CHECK_CONTAINS(td_last_error(), "TANDEM_INSECURE is \"");
        CHECK_CONTAINS(td_last_error(), "must be 1 (no secret is needed beyond this host) or 0");
    }
    setenv("TANDEM_INSECURE", "1", 1);
    CHECK_OK(listen_with("", "0.0.0.0", 0, &fd, &port));
    CHECK(!listens_on_loopback_only(fd));
    close(fd);
}
