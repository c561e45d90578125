/* TLS between two sockets in this process, over loopback: bytes, ends, failures, and forks. test_tls_record.c has the
 * format of records. */
#include "process_counts.h"
#include "raw_client.h"
#include "runner.h"
#include "tls_peer.h"

#include "os/socket.h"
#include "os/tls_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static td__deadline soon(void)
{
    return tls_peer_soon();
}

/* A server end with TLS, and the bare connection to it. */
static void half_pair(int *bare, int *server_end)
{
    int fds[2];
    tls_peer_tcp_pair(fds);
    CHECK_OK(td__tls_wrap(fds[1], true, tls_peer_key, soon(), NULL));
    *server_end = fds[1];
    *bare = fds[0];
}

static uint8_t byte_at(uint32_t seed, size_t at)
{
    return (uint8_t)((at * 2654435761u + seed) >> 13);
}

/* The first bytes, or the end. */
static ssize_t await_bytes(int fd, void *bytes, size_t room)
{
    ssize_t got;
    while ((got = td__sock_recv(fd, bytes, room, MSG_DONTWAIT)) < 0 && errno == EAGAIN)
        CHECK_EQ(td__wait_fd(fd, POLLIN, soon()), 0);
    return got;
}

static void expect_end(int fd)
{
    char byte;
    ssize_t got = await_bytes(fd, &byte, 1);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
}

/* ---- Bytes ----------------------------------------------------------------------------------- */

struct stream {
    int fd;
    uint32_t seed;
    size_t total, most; /* in all, and in one call */
    int64_t pause_ns;   /* now and then */
};

static void *write_stream(void *arg)
{
    const struct stream *stream = arg;
    uint8_t *bytes = malloc(stream->most);
    uint32_t state = stream->seed;
    for (size_t at = 0; at < stream->total;) {
        state = state * 1664525u + 1013904223u;
        size_t size = 1 + (state >> 8) % stream->most;
        if (size > stream->total - at)
            size = stream->total - at;
        for (size_t i = 0; i < size; i++)
            bytes[i] = byte_at(stream->seed, at + i);
        CHECK_EQ(td__send_all(stream->fd, bytes, size, soon()), 0);
        at += size;
        if (stream->pause_ns && (state >> 8) % 64 == 0)
            td__sleep_ns(stream->pause_ns);
    }
    free(bytes);
    return NULL;
}

static void *read_stream(void *arg)
{
    const struct stream *stream = arg;
    uint8_t *bytes = malloc(stream->most);
    uint32_t state = stream->seed + 1;
    for (size_t at = 0; at < stream->total;) {
        state = state * 1664525u + 1013904223u;
        size_t size = 1 + (state >> 8) % stream->most;
        if (size > stream->total - at)
            size = stream->total - at;
        CHECK_EQ(td__recv_all(stream->fd, bytes, size, soon()), 0);
        for (size_t i = 0; i < size; i++)
            if (bytes[i] != byte_at(stream->seed, at + i))
                FAIL("byte %zu is wrong", at + i);
        at += size;
        if (stream->pause_ns && (state >> 8) % 64 == 0)
            td__sleep_ns(stream->pause_ns);
    }
    free(bytes);
    return NULL;
}

/* Both directions at once, with writers and readers of their own. */
static void exchange(int ends[2], size_t total, size_t most, int64_t writer_ns, int64_t reader_ns)
{
    struct stream streams[4] = {{ends[0], 1, total, most, writer_ns},
                                {ends[1], 1, total, most, reader_ns},
                                {ends[1], 2, total, most, writer_ns},
                                {ends[0], 2, total, most, reader_ns}};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, i % 2 ? read_stream : write_stream, &streams[i]),
                 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

TEST(bytes_go_both_ways_at_once, .deadline_s = 60)
{
    static const size_t most[] = {1, 100, 5000, 70000, 1 << 20};
    int ends[2];
    tls_peer_pair(ends);
    for (size_t i = 0; i < sizeof most / sizeof *most; i++)
        exchange(ends, most[i] == 1 ? 20000 : (size_t)4 << 20, most[i], 0, 0);
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
}

TEST(slow_readers_and_slow_writers, .deadline_s = 60)
{
    int ends[2];
    tls_peer_pair(ends);
    exchange(ends, 4 << 20, 10000, 0, 2000000);
    exchange(ends, 4 << 20, 10000, 2000000, 0);
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
}

/* A reader that does not read stops the writer, after what the buffers of the kernel hold. The writer goes on when there
 * is room. */
TEST(back_pressure)
{
    int ends[2];
    static uint8_t bytes[1 << 20];
    size_t sent = 0;
    tls_peer_pair(ends);
    for (int quiet = 0; quiet < 20;) {
        ssize_t now = td__sock_send(ends[0], bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        quiet = now > 0 ? 0 : quiet + 1;
        sent += now > 0 ? (size_t)now : 0;
        td__sleep_ns(5000000);
        CHECK(sent < (size_t)64 << 20);
    }
    size_t received = 0;
    while (received < sent) {
        ssize_t got = td__sock_recv(ends[1], bytes, sizeof bytes, MSG_DONTWAIT);
        received += got > 0 ? (size_t)got : 0;
        if (got < 0 && td__sock_send(ends[0], bytes, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1)
            sent++;
    }
    CHECK_EQ(received, sent);
    td__sock_close(ends[0]);
    expect_end(ends[1]);
    td__sock_close(ends[1]);
}

TEST(keys_are_renewed, .deadline_s = 60)
{
    int ends[2];
    td__tls_key_limit = 100000;
    tls_peer_pair(ends);
    exchange(ends, 8 << 20, 70000, 0, 0);
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
}

TEST(two_hundred_connections, .deadline_s = 60)
{
    enum { COUNT = 200 };
    static int ends[COUNT][2];
    int threads = 0;
    char text[48], got[48];
    raise_file_limit(2 * COUNT + 50);
    for (int i = 0; i < COUNT; i++) {
        tls_peer_pair(ends[i]);
        if (i == 0) /* a sanitizer has made its own by now */
            threads = counts_now().threads;
    }
    CHECK_SOON(counts_now().threads <= threads);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < COUNT; i++) {
            snprintf(text, sizeof text, "message %d of %d", round, i);
            CHECK_EQ(td__send_all(ends[i][round % 2], text, sizeof text, soon()), 0);
        }
        for (int i = 0; i < COUNT; i++) {
            snprintf(text, sizeof text, "message %d of %d", round, i);
            CHECK_EQ(td__recv_all(ends[i][!(round % 2)], got, sizeof got, soon()), 0);
            CHECK_STR(got, text);
        }
    }
    for (int i = 0; i < COUNT; i++) {
        td__sock_close(ends[i][0]);
        td__sock_close(ends[i][1]);
    }
}

/* ---- Ends ------------------------------------------------------------------------------------ */

TEST(one_direction_ends_before_the_other)
{
    for (int side = 0; side < 2; side++) {
        int ends[2];
        char got[5];
        tls_peer_pair(ends);
        CHECK_EQ(td__send_all(ends[side], "last", 5, soon()), 0);
        CHECK_EQ(td__sock_shutdown(ends[side], SHUT_WR), 0);
        CHECK_EQ(td__recv_all(ends[!side], got, 5, soon()), 0);
        expect_end(ends[!side]);
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(td__send_all(ends[!side], "more", 5, soon()), 0);
            CHECK_EQ(td__recv_all(ends[side], got, 5, soon()), 0);
            CHECK_STR(got, "more");
        }
        td__sock_close(ends[!side]);
        expect_end(ends[side]);
        td__sock_close(ends[side]);
    }
}

/* What was written before close() arrives. */
TEST(a_close_loses_nothing)
{
    static uint8_t sent[150000], got[sizeof sent];
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = byte_at(7, i);
    for (int round = 0; round < 20; round++) {
        int ends[2];
        tls_peer_pair(ends);
        CHECK_EQ(td__send_all(ends[0], sent, sizeof sent, soon()), 0);
        td__sock_close(ends[0]);
        CHECK_EQ(td__recv_all(ends[1], got, sizeof got, soon()), 0);
        CHECK_MEM(got, sent, sizeof sent);
        expect_end(ends[1]);
        td__sock_close(ends[1]);
    }
}

/* A process that writes, closes, and exits at once … */
static void write_and_go(int fd)
{
    static uint8_t bytes[150000];
    struct td__tls_failure failure;
    CHECK_OK(td__tls_wrap(fd, false, tls_peer_key, soon(), &failure));
    CHECK_EQ(td__send_all(fd, bytes, sizeof bytes, soon()), 0);
    td__sock_close(fd);
    _exit(0);
}

/* … and one that just exits, with the socket still open. */
static void write_and_exit(int fd)
{
    static uint8_t bytes[150000];
    struct td__tls_failure failure;
    CHECK_OK(td__tls_wrap(fd, false, tls_peer_key, soon(), &failure));
    CHECK_EQ(td__send_all(fd, bytes, sizeof bytes, soon()), 0);
    _exit(0);
}

TEST(sent_bytes_outlive_their_process)
{
    void (*const ways[])(int) = {write_and_exit, write_and_go};
    for (int i = 0; i < 2; i++) {
        int fds[2];
        static uint8_t bytes[150000];
        tls_peer_tcp_pair(fds);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            close(fds[1]);
            ways[i](fds[0]);
        }
        close(fds[0]);
        CHECK_OK(td__tls_wrap(fds[1], true, tls_peer_key, soon(), NULL));
        int end = fds[1];
        CHECK_EQ(td__recv_all(end, bytes, sizeof bytes, soon()), 0);
        expect_end(end);
        td__sock_close(end);
        int status;
        CHECK_EQ(waitpid(pid, &status, 0), pid);
        CHECK_EQ(status, 0);
    }
}

static void write_and_die(void *arg)
{
    int fd = *(int *)arg;
    struct td__tls_failure failure;
    CHECK_OK(td__tls_wrap(fd, false, tls_peer_key, soon(), &failure));
    CHECK_EQ(td__send_all(fd, "x", 1, soon()), 0);
    for (;;)
        pause();
}

TEST(a_death_is_an_end)
{
    int fds[2], status;
    char byte;
    tls_peer_tcp_pair(fds);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(fds[1]);
        write_and_die(&fds[0]);
    }
    close(fds[0]);
    CHECK_OK(td__tls_wrap(fds[1], true, tls_peer_key, soon(), NULL));
    int end = fds[1];
    CHECK_EQ(td__recv_all(end, &byte, 1, soon()), 0);
    CHECK_EQ(kill(pid, SIGKILL), 0);
    expect_end(end);
    CHECK_SOON(td__send_all(end, "x", 1, soon()) == EPIPE);
    td__sock_close(end);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
}

/* ---- Failures -------------------------------------------------------------------------------- */

/* A client in a thread of its own, since neither side gets on without the other. */
struct client {
    int fd;
    const uint8_t *key;
    td_status status;
    struct td__tls_failure failure;
};

static void *shake_as_client(void *arg)
{
    struct client *client = arg;
    client->status = td__tls_wrap(client->fd, false, client->key, soon(), &client->failure);
    return NULL;
}

TEST(another_key_is_refused_on_both_sides)
{
    static const uint8_t other_key[TD__MAC_SIZE] = "a key that one has made up";
    int fds[2];
    pthread_t thread;
    char byte;
    tls_peer_tcp_pair(fds);
    struct client client = {.fd = fds[0], .key = other_key};
    CHECK_OK(td__tls_wrap(fds[1], true, tls_peer_key, soon(), NULL));
    CHECK_EQ(pthread_create(&thread, NULL, shake_as_client, &client), 0);
    CHECK(await_bytes(fds[1], &byte, 1) <= 0);
    CHECK_EQ(td__send_all(fds[1], "x", 1, soon()), ENOTCONN); /* nothing goes out in clear */
    td__sock_close(fds[1]);
    pthread_join(thread, NULL);
    CHECK_EQ(client.status, TD_ERR_AUTH);
    CHECK(*client.failure.reason && !client.failure.error);
    CHECK_EQ(fcntl(fds[0], F_GETFD), -1);
}

TEST(noise_instead_of_tls_ends_the_connection)
{
    static const char *const noises[] = {"GET / HTTP/1.0\r\n\r\n", "\x16\x03\x01\xff\xff noise",
                                         ""};
    for (size_t i = 0; i < sizeof noises / sizeof *noises; i++) {
        int bare, server_end;
        half_pair(&bare, &server_end);
        CHECK_EQ(td__send_all(bare, noises[i], strlen(noises[i]), soon()), 0);
        shutdown(bare, SHUT_WR);
        expect_end(server_end);
        td__sock_close(server_end);
        close(bare);
    }
}

TEST(a_silent_peer_is_left_in_time)
{
    int fds[2];
    struct td__tls_failure failure = {0};
    tls_peer_tcp_pair(fds);
    CHECK_FAILS(td__tls_wrap(fds[0], false, tls_peer_key, td__deadline_in_ms(100), &failure),
                TD_ERR_AUTH, "TLS");
    CHECK_EQ(failure.error, ETIMEDOUT);
    close(fds[1]);
}

/* A man in the middle: forwards and records all bytes; from the byte `break_at` of one direction on it changes or
 * drops things. */
struct middle {
    int left, right;
    size_t break_at;
    bool cut; /* instead of changing a byte */
    uint8_t *seen;
    size_t seen_size;
};

static void *stand_between(void *arg)
{
    struct middle *middle = arg;
    size_t passed = 0;
    for (bool open = true; open;) {
        struct pollfd fds[2] = {{middle->left, POLLIN, 0}, {middle->right, POLLIN, 0}};
        CHECK(poll(fds, 2, 20000) > 0);
        for (int i = 0; i < 2; i++) {
            uint8_t bytes[4096];
            ssize_t got = fds[i].revents ? recv(fds[i].fd, bytes, sizeof bytes, MSG_DONTWAIT) : -1;
            if (fds[i].revents && got <= 0)
                open = false;
            if (got <= 0)
                continue;
            if (i == 0 && middle->break_at && passed + (size_t)got > middle->break_at) {
                if (middle->cut)
                    open = false;
                else if (passed <= middle->break_at)
                    bytes[middle->break_at - passed] ^= 1;
            }
            if (i == 0)
                passed += (size_t)got;
            middle->seen = realloc(middle->seen, middle->seen_size + (size_t)got);
            memcpy(middle->seen + middle->seen_size, bytes, (size_t)got);
            middle->seen_size += (size_t)got;
            if (open)
                td__send_all(fds[1 - i].fd, bytes, (size_t)got, soon());
        }
    }
    close(middle->left);
    close(middle->right);
    return NULL;
}

static void open_with_middle(struct middle *middle, pthread_t *thread, int ends[2])
{
    int left[2], right[2];
    tls_peer_tcp_pair(left);
    tls_peer_tcp_pair(right);
    middle->left = left[1];
    middle->right = right[0];
    CHECK_EQ(pthread_create(thread, NULL, stand_between, middle), 0);
    struct client client = {.fd = left[0], .key = tls_peer_key};
    pthread_t shaking;
    char byte;
    CHECK_OK(td__tls_wrap(right[1], true, tls_peer_key, soon(), NULL));
    CHECK_EQ(pthread_create(&shaking, NULL, shake_as_client, &client), 0);
    while (td__sock_recv(right[1], &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN &&
           !atomic_load(&td__tls_of(right[1])->open))
        CHECK_EQ(td__wait_fd(right[1], POLLIN, soon()), 0);
    pthread_join(shaking, NULL);
    CHECK_OK(client.status);
    ends[0] = left[0];
    ends[1] = right[1];
}

TEST(nothing_is_to_be_seen_on_the_way)
{
    static const char text[] = "not readable on the network";
    struct middle middle = {0};
    pthread_t thread;
    int ends[2];
    char got[sizeof text];
    open_with_middle(&middle, &thread, ends);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(td__send_all(ends[i], text, sizeof text, soon()), 0);
        CHECK_EQ(td__recv_all(ends[!i], got, sizeof text, soon()), 0);
        CHECK_STR(got, text);
    }
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
    pthread_join(thread, NULL);
    CHECK(middle.seen_size > 2 * sizeof text);
    CHECK(!memmem(middle.seen, middle.seen_size, text, 8));
    free(middle.seen);
}

static void note_line(td_log_level level, const char *line, void *arg)
{
    atomic_int *lines = arg;
    (void)level;
    CHECK_CONTAINS(line, "the connection with 127.0.0.1:");
    CHECK_CONTAINS(line, "bytes were changed on the way");
    atomic_fetch_add(lines, 1);
}

/* One changed bit, or a cut, after some data: the reader gets a true beginning, and an end; of a change it
 * can learn. */
TEST(changes_on_the_way_end_the_connection)
{
    for (int cut = 0; cut < 2; cut++) {
        struct middle middle = {.break_at = 30000, .cut = cut};
        pthread_t thread;
        int ends[2];
        static uint8_t sent[100000], got[sizeof sent];
        size_t size = 0;
        atomic_int lines = 0;
        for (size_t i = 0; i < sizeof sent; i++)
            sent[i] = byte_at(9, i);
        td_log_set_sink(note_line, &lines);
        open_with_middle(&middle, &thread, ends);
        td__send_all(ends[0], sent, sizeof sent, soon());
        for (ssize_t part = 1; part > 0; size += (size_t)part) {
            part = await_bytes(ends[1], got + size, sizeof got - size);
            CHECK(part >= 0 || errno == (cut ? ECONNRESET : EBADMSG));
            if (part < 0)
                part = 0;
        }
        CHECK(size < 30000 + 16384);
        CHECK_MEM(got, sent, size);
        const char *complaint = td__tls_complaint(ends[1]);
        CHECK(cut ? !complaint : strstr(complaint, "changed on the way") != NULL);
        td__sock_close(ends[0]);
        td__sock_close(ends[1]);
        pthread_join(thread, NULL);
        free(middle.seen);
        td_log_set_sink(NULL, NULL);
        CHECK(cut ? lines == 0 : lines >= 1);
    }
}

/* ---- Forks ----------------------------------------------------------------------------------- */

/* A child has TLS of its own, and no hold on its parent's: it cannot use up the numbers of records. */
static void use_tls_in_child(void *arg)
{
    int *inherited = arg, ends[2];
    char got[3];
    for (int i = 0; i < 2; i++)
        CHECK(td__sock_send(inherited[i], "abc", 3, MSG_NOSIGNAL) < 0);
    tls_peer_pair(ends);
    CHECK_EQ(td__send_all(ends[0], "abc", 3, soon()), 0);
    CHECK_EQ(td__recv_all(ends[1], got, 3, soon()), 0);
    CHECK_MEM(got, "abc", 3);
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
    td__sock_close(inherited[0]);
    td__sock_close(inherited[1]);
}

TEST(a_fork_leaves_the_parents_connections_alone)
{
#if defined(__SANITIZE_THREAD__)
    td_test_skip("the thread sanitizer allows no threads in a fork of a process with threads");
#endif
    int ends[2];
    char got[3];
    tls_peer_pair(ends);
    for (int i = 0; i < 3; i++) {
        struct td_test_child child = td_test_fork(use_tls_in_child, ends);
        if (child.status)
            FAIL("%s", child.output);
        free(child.output);
        CHECK_EQ(td__send_all(ends[1], "xyz", 3, soon()), 0);
        CHECK_EQ(td__recv_all(ends[0], got, 3, soon()), 0);
        CHECK_MEM(got, "xyz", 3);
    }
    int before = counts_now().descriptors;
    td__sock_close(ends[0]);
    expect_end(ends[1]);
    td__sock_close(ends[1]);
    CHECK_EQ(counts_now().descriptors, before - 2);
}
