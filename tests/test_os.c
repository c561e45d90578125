/* Addresses, sockets with deadlines, passing descriptors, the event loop. os/trust.h: test_trust.c. */
#include "network_space.h"
#include "runner.h"

#include "base/clock.h"
#include "os/address.h"
#include "os/loop.h"
#include "os/socket.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#define MS ((int64_t)1000000)
#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

static td__deadline in_a_while(void)
{
    return td__deadline_in_ms(60000);
}

/* A wait of 50 ms took that long (less the grain of poll), and not for ever. */
static void check_waited(int64_t since)
{
    int64_t took = (td__now_ns() - since) / MS;
    if (took < 48)
        FAIL("a deadline of 50 ms took %lld ms", (long long)took);
    CHECK_PROMPT(since);
}

/* ---- Addresses ------------------------------------------------------------------------------- */

static td_status resolve(const char *host, int port, struct td__address_list *list)
{
    bool retry = true;
    td_status status = td__resolve(host, port, in_a_while(), list, &retry);
    if (status)
        CHECK(!retry); /* of all the names here, none has another answer later */
    return status;
}

static struct td__address address_of(const char *host, int port)
{
    struct td__address_list list;
    CHECK_OK(resolve(host, port, &list));
    CHECK_EQ(list.count, 1);
    return list.at[0];
}

TEST(addresses_from_and_to_text)
{
    static const struct {
        const char *host;
        int port;
        const char *text;
        int family;
    } cases[] = {
        {"127.0.0.1", 29500, "127.0.0.1:29500", AF_INET},
        {"0.0.0.0", 0, "0.0.0.0:0", AF_INET},
        {"255.255.255.255", 65535, "255.255.255.255:65535", AF_INET},
        {"::1", 29500, "[::1]:29500", AF_INET6},
        {"[::1]", 29500, "[::1]:29500", AF_INET6},
        {"::", 0, "[::]:0", AF_INET6},
        {"2001:db8:0:0:0:0:0:1", 80, "[2001:db8::1]:80", AF_INET6},
        {"::ffff:127.0.0.1", 5, "127.0.0.1:5", AF_INET},
        {"unix:/tmp/socket", 0, "unix:/tmp/socket", AF_UNIX},
        {"unix:relative", 0, "unix:relative", AF_UNIX},
        {"unix:@name", 0, "unix:@name", AF_UNIX},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct td__address address = address_of(cases[i].host, cases[i].port);
        char text[TD__ADDRESS_TEXT];
        CHECK(td__address_text(&address, text) == text);
        CHECK_STR(text, cases[i].text);
        CHECK_EQ(address.any.sa_family, cases[i].family);
        CHECK_EQ(td__address_port(&address), cases[i].port);
    }
    struct td__address odd = {.any = {.sa_family = AF_PACKET}, .size = sizeof odd.any};
    char text[TD__ADDRESS_TEXT];
    CHECK_CONTAINS(td__address_text(&odd, text), "family");
    CHECK_EQ(td__address_port(&odd), 0);
    CHECK(!td__address_is_local(&odd));
}

TEST(addresses_with_a_zone)
{
    struct td__address address = address_of("fe80::1%lo", 80);
    CHECK_EQ(address.any.sa_family, AF_INET6);
    CHECK_EQ(address.v6.sin6_scope_id, if_nametoindex("lo"));
    address = address_of("[fe80::1%lo]", 80);
    CHECK_EQ(address.v6.sin6_scope_id, if_nametoindex("lo"));
    CHECK_EQ(td__address_port(&address), 80);
}

TEST(malformed_addresses)
{
    struct td__address_list list;
    char text[400];
    CHECK_FAILS(resolve("127.0.0.1", -1, &list), TD_ERR_INVALID, "port -1 is outside 0 to 65535");
    CHECK_FAILS(resolve("127.0.0.1", 65536, &list), TD_ERR_INVALID, "port 65536");
    CHECK_FAILS(resolve("localhost", 70000, &list), TD_ERR_INVALID, "port 70000");
    CHECK_FAILS(resolve("", 80, &list), TD_ERR_INVALID, "host");
    memset(text, 'h', 256);
    text[256] = '\0';
    CHECK_FAILS(resolve(text, 80, &list), TD_ERR_INVALID, "255 characters");
    CHECK_EQ(list.count, 0);
    CHECK_FAILS(resolve("unix:", 0, &list), TD_ERR_INVALID, "unix");
    snprintf(text, sizeof text, "unix:/%0*d", 107, 0); /* 108 bytes: one too many */
    CHECK_FAILS(resolve(text, 0, &list), TD_ERR_INVALID, "107");
    snprintf(text, sizeof text, "unix:/%0*d", 106, 0);
    struct td__address longest = address_of(text, 0);
    char back[TD__ADDRESS_TEXT];
    CHECK_STR(td__address_text(&longest, back), text);
    text[5] = '@';
    longest = address_of(text, 0);
    CHECK_STR(td__address_text(&longest, back), text);
}

TEST(addresses_that_stay_on_the_host)
{
    static const struct {
        const char *host;
        bool local;
    } cases[] = {
        {"127.0.0.1", true},        {"127.255.0.9", true},       {"::1", true},
        {"::ffff:127.0.0.1", true}, {"unix:/x", true},           {"unix:@x", true},
        {"128.0.0.1", false},       {"0.0.0.0", false},          {"::", false},
        {"192.0.2.1", false},       {"::ffff:192.0.2.1", false}, {"2001:db8::1", false},
        {"fe80::1", false},         {"::ffff:128.0.0.1", false}, {"::127.0.0.1", false},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct td__address address = address_of(cases[i].host, 0);
        if (td__address_is_local(&address) != cases[i].local)
            FAIL("%s is %slocal", cases[i].host, cases[i].local ? "not " : "");
        CHECK_EQ(td__host_is_loopback(cases[i].host), cases[i].local);
    }
    CHECK(td__host_is_loopback("localhost"));
    CHECK(td__host_is_loopback("[::1]"));
    CHECK(!td__host_is_loopback("localhost.example.org")); /* a name may lead anywhere */
    CHECK(!td__host_is_loopback("127.0.0.1.example.org"));
    CHECK(!td__host_is_loopback(""));
}

TEST(host_and_port)
{
    static const struct {
        const char *text;
        bool ok;
        const char *host;
        int port; /* 7: left alone */
    } cases[] = {
        {"host:80", true, "host", 80},
        {"host", true, "host", 7},
        {"127.0.0.1:0", true, "127.0.0.1", 0},
        {"a.b-c.d:65535", true, "a.b-c.d", 65535},
        {"[::1]:80", true, "::1", 80},
        {"[::1]", true, "::1", 7},
        {"::1", true, "::1", 7},
        {"fe80::1%eth0", true, "fe80::1%eth0", 7},
        {"[fe80::1%eth0]:80", true, "fe80::1%eth0", 80},
        {"", false, NULL, 7},
        {":80", false, NULL, 7},
        {"[]:80", false, NULL, 7},
        {"[]", false, NULL, 7},
        {"host:", false, NULL, 7},
        {"host:80x", false, NULL, 7},
        {"host:-1", false, NULL, 7},
        {"host:65536", false, NULL, 7},
        {"host: 80", false, NULL, 7},
        {"[::1", false, NULL, 7},
        {"[::1]x:80", false, NULL, 7},
        {"[::1]:x", false, NULL, 7},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char host[32] = "untouched";
        int port = 7;
        if (td__split_host_port(cases[i].text, host, sizeof host, &port) != cases[i].ok)
            FAIL("\"%s\" was %s", cases[i].text, cases[i].ok ? "refused" : "accepted");
        CHECK_STR(host, cases[i].ok ? cases[i].host : "untouched");
        if (port != cases[i].port)
            FAIL("\"%s\" gives port %d instead of %d", cases[i].text, port, cases[i].port);
    }
    char host[5] = "old";
    int port = 7;
    CHECK(td__split_host_port("four:1", host, sizeof host, &port));
    CHECK_STR(host, "four");
    CHECK(!td__split_host_port("three+2:1", host, sizeof host, &port)); /* no room */
    CHECK_STR(host, "four");
}

/* ---- Names ----------------------------------------------------------------------------------- */

TEST(localhost_resolves)
{
    struct td__address_list list;
    CHECK_OK(resolve("localhost", 1234, &list));
    CHECK(list.count >= 1 && list.count <= TD__ADDRESS_LIST);
    for (int i = 0; i < list.count; i++) {
        CHECK(td__address_is_local(&list.at[i]));
        CHECK_EQ(td__address_port(&list.at[i]), 1234);
    }
}

TEST(a_name_that_cannot_exist)
{
    struct td__address_list list;
    char name[100];
    bool retry = false;
    memset(name, 'n', 70); /* longer than a label may be: no name server is asked */
    strcpy(name + 70, ".invalid");
    int64_t start = td__now_ns();
    td_status status = td__resolve(name, 80, in_a_while(), &list, &retry);
    CHECK_EQ(status, TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), name);
    CHECK_EQ(list.count, 0);
    CHECK(retry); /* names may appear later */
    CHECK_PROMPT(start);
}

/* Becomes a host of its own whose only name server never answers; false where that is not allowed. */
static bool enter_silent_network(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s/resolv.conf", td_test_temp_dir());
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    fputs("nameserver 127.0.0.1\noptions timeout:10 attempts:3\n", file);
    fclose(file);
    if (geteuid() != 0 || unshare(CLONE_NEWNET | CLONE_NEWNS) ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount(path, "/etc/resolv.conf", NULL, MS_BIND, NULL))
        return false;
    int server = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_port = htons(53)};
    /* `server` stays open, and silent, until the process ends. */
    return network_space_open_loopback() &&
           !bind(server, (struct sockaddr *)&address, sizeof address);
}

TEST(a_name_server_that_does_not_answer)
{
    if (!enter_silent_network())
        td_test_skip("this user may not make a network of its own");
    struct td__address_list list;
    bool retry = true;
    int64_t start = td__now_ns();
    CHECK_FAILS(td__resolve("nobody.invalid", 80, td__deadline_in_ms(50), &list, &retry),
                TD_ERR_TIMEOUT, "nobody.invalid");
    check_waited(start);
    CHECK(!retry);
    CHECK_EQ(list.count, 0);
    CHECK_OK(resolve("127.0.0.1", 80, &list)); /* a numeric one needs no name server */
    _exit(0); /* the look-up goes on, and would delay an orderly exit */
}

/* ---- Sockets --------------------------------------------------------------------------------- */

static void make_pair(int pair[2])
{
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
}

static int listen_at(const char *host, struct td__address *where)
{
    struct td__address address = address_of(host, 0);
    int fd = td__listen_on(&address);
    if (fd < 0)
        FAIL("listening at %s: %s", host, strerror(-fd));
    td__local_address(fd, where);
    return fd;
}

/* An abstract name that no other run of this test uses. */
static const char *abstract_name(void)
{
    static char name[64];
    snprintf(name, sizeof name, "unix:@tandem test %d", (int)getpid());
    return name;
}

static void check_flags(int fd)
{
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK(fcntl(fd, F_GETFL) & O_NONBLOCK);
}

TEST(connecting_and_listening)
{
    char path[512];
    snprintf(path, sizeof path, "unix:%s/socket", td_test_temp_dir());
    const char *const hosts[] = {"127.0.0.1", "::1", path, abstract_name()};
    for (size_t i = 0; i < COUNT_OF(hosts); i++) {
        struct td__address where, seen;
        char one[TD__ADDRESS_TEXT], two[TD__ADDRESS_TEXT];
        if (!strcmp(hosts[i], "::1")) {
            where = address_of("::1", 0);
            int probe = td__listen_on(&where);
            if (probe < 0)
                continue; /* a machine without IPv6 */
            close(probe);
        }
        int listener = listen_at(hosts[i], &where);
        check_flags(listener);
        int client = td__connect_to(&where, in_a_while());
        CHECK(client >= 0);
        check_flags(client);
        CHECK_EQ(td__wait_fd(listener, POLLIN, in_a_while()), 0);
        int server = accept(listener, NULL, NULL);
        CHECK(server >= 0);
        td__remote_address(client, &seen);
        CHECK_STR(td__address_text(&seen, one), td__address_text(&where, two));
        if (where.any.sa_family == AF_UNIX) {
            CHECK(td__peer_is_us(client) && td__peer_is_us(server));
        } else {
            CHECK(td__address_port(&where) > 0);
            td__local_address(client, &where);
            td__remote_address(server, &seen);
            CHECK_STR(td__address_text(&seen, one), td__address_text(&where, two));
        }
        CHECK_EQ(td__send_all(client, "ping", 4, in_a_while()), 0);
        char text[4];
        CHECK_EQ(td__recv_all(server, text, 4, in_a_while()), 0);
        CHECK_MEM(text, "ping", 4);
        close(client);
        close(server);
        close(listener);
    }
}

TEST(connecting_in_vain)
{
    struct td__address where = address_of("127.0.0.1", 0);
    int holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* has a port, does not listen */
    CHECK_EQ(bind(holder, &where.any, where.size), 0);
    td__local_address(holder, &where);
    CHECK_EQ(td__connect_to(&where, in_a_while()), -ECONNREFUSED);
    close(holder);
    int listener = listen_at("127.0.0.1", &where);
    CHECK_EQ(td__listen_on(&where), -EADDRINUSE);
    close(listener);
    char path[512];
    snprintf(path, sizeof path, "unix:%s/nothing", td_test_temp_dir());
    where = address_of(path, 0);
    CHECK_EQ(td__connect_to(&where, in_a_while()), -ENOENT);
    where = address_of(abstract_name(), 0);
    CHECK_EQ(td__connect_to(&where, in_a_while()), -ECONNREFUSED);

    struct td__address nowhere;
    td__remote_address(-1, &nowhere);
    CHECK_EQ(nowhere.size, 0);
    int pipe_fds[2];
    CHECK_EQ(pipe(pipe_fds), 0);
    CHECK(!td__peer_is_us(pipe_fds[0]));
    CHECK(!td__peer_is_us(-1));
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

/* A full queue of a listener that never accepts: the deadline counts. */
TEST(connecting_to_a_listener_that_does_not_accept)
{
    struct td__address where = address_of(abstract_name(), 0);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), fds[64], count = 0;
    CHECK_EQ(bind(listener, &where.any, where.size), 0);
    CHECK_EQ(listen(listener, 0), 0);
    int64_t start = td__now_ns();
    int fd = 0;
    while (count < 64 && (fd = td__connect_to(&where, td__deadline_in_ms(50))) >= 0)
        fds[count++] = fd;
    CHECK(fd < 0); /* EAGAIN at once, or ETIMEDOUT */
    CHECK_PROMPT(start);
    while (count)
        close(fds[--count]);
    close(listener);
}

TEST(waiting_has_a_deadline)
{
    int pair[2];
    char buffer[16];
    make_pair(pair);
    int64_t start = td__now_ns();
    CHECK_EQ(td__wait_fd(pair[0], POLLIN, td__deadline_in_ms(50)), ETIMEDOUT);
    check_waited(start);
    start = td__now_ns();
    CHECK_EQ(td__recv_all(pair[0], buffer, sizeof buffer, td__deadline_in_ms(50)), ETIMEDOUT);
    check_waited(start);
    CHECK_EQ(td__recv_all(pair[0], buffer, sizeof buffer, 0), ETIMEDOUT); /* long ago */
    CHECK_EQ(td__send_all(pair[1], "half of it", 8, in_a_while()), 0);
    start = td__now_ns();
    CHECK_EQ(td__recv_all(pair[0], buffer, sizeof buffer, td__deadline_in_ms(50)), ETIMEDOUT);
    check_waited(start);

    char *much = calloc(1, 8 << 20); /* more than the socket takes */
    start = td__now_ns();
    CHECK_EQ(td__send_all(pair[0], much, 8 << 20, td__deadline_in_ms(50)), ETIMEDOUT);
    check_waited(start);
    free(much);
    CHECK_EQ(td__recv_all(pair[0], buffer, 0, 0), 0); /* nothing to wait for */
    CHECK_EQ(td__send_all(pair[0], buffer, 0, 0), 0);
    close(pair[0]);
    close(pair[1]);
}

TEST(the_other_side_closes)
{
    int pair[2];
    char buffer[8];
    make_pair(pair);
    CHECK_EQ(td__send_all(pair[1], "abc", 3, in_a_while()), 0);
    close(pair[1]);
    CHECK_EQ(td__recv_all(pair[0], buffer, 8, in_a_while()), ENODATA); /* after three bytes */
    CHECK_EQ(td__recv_all(pair[0], buffer, 8, in_a_while()), ENODATA);
    CHECK_EQ(td__send_all(pair[0], "x", 1, in_a_while()), EPIPE); /* and no SIGPIPE */
    close(pair[0]);
    CHECK_EQ(td__recv_all(-1, buffer, 8, in_a_while()), EBADF);
    CHECK_EQ(td__send_all(-1, buffer, 8, in_a_while()), EBADF);
}

struct transfer {
    int fd;
    unsigned char *data;
    size_t size;
};

static void *send_in_pieces(void *arg)
{
    struct transfer *transfer = arg;
    size_t at = 0;
    for (size_t piece = 1; at < transfer->size; piece = piece * 7 % 100003) {
        size_t size = piece < transfer->size - at ? piece : transfer->size - at;
        CHECK_EQ(td__send_all(transfer->fd, transfer->data + at, size, in_a_while()), 0);
        at += size;
    }
    return NULL;
}

static void do_nothing(int signal_number)
{
    (void)signal_number;
}

TEST(much_is_sent_whole)
{
    struct sigaction action = {.sa_handler = do_nothing}; /* interrupts, without SA_RESTART */
    sigaction(SIGUSR1, &action, NULL);
    int pair[2];
    make_pair(pair);
    struct transfer transfer = {.fd = pair[1], .size = 20 << 20};
    transfer.data = malloc(transfer.size);
    for (size_t i = 0; i < transfer.size; i++)
        transfer.data[i] = (unsigned char)(i * 31 >> 4);
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, send_in_pieces, &transfer), 0);
    unsigned char *got = malloc(transfer.size);
    for (size_t at = 0; at < transfer.size; at += 1 << 20) {
        pthread_kill(thread, SIGUSR1);
        CHECK_EQ(td__recv_all(pair[0], got + at, 1 << 20, in_a_while()), 0);
    }
    pthread_join(thread, NULL);
    CHECK_MEM(got, transfer.data, transfer.size);
    free(got);
    free(transfer.data);
    close(pair[0]);
    close(pair[1]);
}

/* ---- Passing descriptors --------------------------------------------------------------------- */

static int open_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    int count = -3; /* ".", ".." and the directory itself */
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* Sends `count` descriptors and some bytes. */
static void send_descriptors(int socket, const int *fds, int count, const char *data, size_t size)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int) * 8)];
    } control = {0};
    struct iovec part = {(void *)data, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)count);
    }
    CHECK_EQ(sendmsg(socket, &message, MSG_NOSIGNAL), size);
}

TEST(descriptors_are_passed)
{
    int pair[2], pipe_fds[2], passed = -1;
    char data[8], byte;
    make_pair(pair);
    CHECK_EQ(pipe(pipe_fds), 0);
    CHECK_EQ(td__send_fd(pair[0], pipe_fds[1], "12345678", 8, in_a_while()), 0);
    CHECK_EQ(td__recv_fd(pair[1], &passed, data, 8, in_a_while()), 0);
    CHECK_MEM(data, "12345678", 8);
    CHECK(passed >= 0 && passed != pipe_fds[1]);
    CHECK(fcntl(passed, F_GETFD) & FD_CLOEXEC);
    CHECK_EQ(write(passed, "x", 1), 1);
    CHECK_EQ(read(pipe_fds[0], &byte, 1), 1);
    close(passed);

    send_descriptors(pair[0], pipe_fds, 1, "12", 2); /* the bytes may arrive later */
    CHECK_EQ(td__send_all(pair[0], "345678", 6, in_a_while()), 0);
    CHECK_EQ(td__recv_fd(pair[1], &passed, data, 8, in_a_while()), 0);
    CHECK_MEM(data, "12345678", 8);
    close(passed);
    for (int i = 0; i < 2; i++) {
        close(pair[i]);
        close(pipe_fds[i]);
    }
}

TEST(descriptors_that_do_not_come)
{
    int pair[2], passed = -77, before;
    char data[8];
    make_pair(pair);
    before = open_descriptors();
    int64_t start = td__now_ns();
    CHECK_EQ(td__recv_fd(pair[1], &passed, data, 8, td__deadline_in_ms(50)), ETIMEDOUT);
    check_waited(start);
    send_descriptors(pair[0], NULL, 0, "12345678", 8);
    CHECK_EQ(td__recv_fd(pair[1], &passed, data, 8, in_a_while()), EPROTO);
    send_descriptors(pair[0], pair, 1, "12", 2); /* half of the bytes, and then none */
    CHECK_EQ(td__recv_fd(pair[1], &passed, data, 8, td__deadline_in_ms(50)), ETIMEDOUT);
    CHECK_EQ(open_descriptors(), before); /* the one that had arrived was closed */
    close(pair[0]);
    CHECK_EQ(td__recv_fd(pair[1], &passed, data, 8, in_a_while()), ENODATA);
    CHECK_EQ(passed, -77);
    close(pair[1]);
    CHECK_EQ(td__send_fd(-1, 0, "x", 1, in_a_while()), EBADF);
}

/* More than one: refused, and none of them is left open. */
TEST(descriptors_that_are_too_many)
{
    for (int count = 2; count <= 8; count++) {
        int pair[2], passed = -77, fds[8] = {0, 1, 2, 0, 1, 2, 0, 1};
        char data[4];
        make_pair(pair);
        int before = open_descriptors();
        send_descriptors(pair[0], fds, count, "1234", 4);
        CHECK_EQ(td__recv_fd(pair[1], &passed, data, 4, in_a_while()), EPROTO);
        CHECK_EQ(passed, -77);
        if (open_descriptors() != before)
            FAIL("of %d descriptors that came along, %d were left open", count,
                 open_descriptors() - before);
        close(pair[0]);
        close(pair[1]);
    }
}

TEST(descriptors_wait_for_buffer_space)
{
    int pair[2];
    char *much = calloc(1, 8 << 20);
    make_pair(pair);
    CHECK_EQ(td__send_all(pair[0], much, 8 << 20, td__deadline_in_ms(1)), ETIMEDOUT);
    int64_t start = td__now_ns();
    CHECK_EQ(td__send_fd(pair[0], 0, "x", 1, td__deadline_in_ms(50)), ETIMEDOUT);
    check_waited(start);
    free(much);
    close(pair[0]);
    close(pair[1]);
}

/* ---- The loop -------------------------------------------------------------------------------- */

struct shared_count {
    struct td__loop loop;
    int count; /* only touched on the loop's thread */
    pthread_t thread;
    bool seen_thread;
};

static void count_up(void *arg)
{
    struct shared_count *shared = arg;
    if (shared->seen_thread)
        CHECK(pthread_equal(shared->thread, pthread_self()));
    shared->thread = pthread_self();
    shared->seen_thread = true;
    shared->count++;
}

static void *call_often(void *arg)
{
    struct shared_count *shared = arg;
    for (int i = 0; i < 200; i++)
        td__loop_run(&shared->loop, count_up, shared);
    return NULL;
}

TEST(loop_runs_calls_of_many_threads)
{
    static struct shared_count shared;
    pthread_t threads[8];
    CHECK_OK(td__loop_start(&shared.loop, "td-test-loop"));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, call_often, &shared), 0);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(shared.count, 1600);
    CHECK(!pthread_equal(shared.thread, pthread_self()));
    td__loop_run(&shared.loop, count_up, &shared);
    CHECK_EQ(shared.count, 1601); /* it has run when the call returns */
    td__loop_stop(&shared.loop);
}

struct ticking {
    struct td__loop loop;
    uv_timer_t timer;
    atomic_int ticks;
    atomic_bool closed;
};

static void on_tick(uv_timer_t *timer)
{
    struct ticking *ticking = timer->data;
    atomic_fetch_add(&ticking->ticks, 1);
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct ticking *ticking = handle->data;
    atomic_store(&ticking->closed, true);
}

static void start_ticking(void *arg)
{
    struct ticking *ticking = arg;
    uv_timer_init(&ticking->loop.uv, &ticking->timer);
    ticking->timer.data = ticking;
    uv_timer_start(&ticking->timer, on_tick, 1, 1);
}

static void stop_ticking(void *arg)
{
    struct ticking *ticking = arg;
    uv_close((uv_handle_t *)&ticking->timer, on_timer_closed);
}

TEST(loop_runs_handles_beside_calls)
{
    static struct ticking ticking;
    CHECK_OK(td__loop_start(&ticking.loop, "td-test-loop"));
    td__loop_run(&ticking.loop, start_ticking, &ticking);
    CHECK_SOON(atomic_load(&ticking.ticks) >= 3);
    td__loop_run(&ticking.loop, stop_ticking, &ticking);
    td__loop_stop(&ticking.loop);
    CHECK(atomic_load(&ticking.closed)); /* what was being closed is closed */
}

TEST(loop_stops_and_leaves_nothing)
{
    static struct shared_count shared;
    CHECK_OK(td__loop_start(&shared.loop, "td-test-loop"));
    td__loop_stop(&shared.loop);
    int before = open_descriptors();
    for (int i = 0; i < 50; i++) {
        shared.seen_thread = false;
        CHECK_OK(td__loop_start(&shared.loop, "td-test-loop"));
        if (i % 2)
            td__loop_run(&shared.loop, count_up, &shared);
        td__loop_stop(&shared.loop);
    }
    CHECK_EQ(shared.count, 25);
    CHECK_EQ(open_descriptors(), before);
}
