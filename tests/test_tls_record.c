/* Records of TLS: AES-GCM by each way against OpenSSL's, OpenSSL itself as the other side of a connection, what poll()
 * says, and records that are not valid. */
#include "runner.h"
#include "tls_peer.h"

#include "base/simd.h"
#include "os/gcm.h"
#include "os/socket.h"
#include "os/tls_internal.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

/* ---- AES-GCM --------------------------------------------------------------------------------- */

static uint32_t random_state = 1;

static uint8_t next_byte(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (uint8_t)(random_state >> 16);
}

static void fill(uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = next_byte();
}

enum { MOST = 20000 };

static void compare(struct td__gcm *one, struct td__gcm *other, size_t size)
{
    static uint8_t text[MOST], sealed[2][MOST + 17], opened[MOST];
    uint8_t header[5], type = next_byte(), found;
    struct td__gcm_record record = {.header = header};
    fill(record.nonce, sizeof record.nonce);
    fill(header, sizeof header);
    fill(text, size);
    CHECK(td__gcm_seal(one, &record, text, size, type, sealed[0]));
    CHECK(td__gcm_seal(other, &record, text, size, type, sealed[1]));
    CHECK_MEM(sealed[0], sealed[1], size + 17);
    CHECK(td__gcm_open(other, &record, sealed[0], size, &found, opened));
    CHECK_EQ(found, type);
    CHECK_MEM(opened, text, size);
    size_t at = (size_t)next_byte() * 78 % (size + 17);
    sealed[0][at] ^= (uint8_t)(1 << next_byte() % 8);
    CHECK(!td__gcm_open(other, &record, sealed[0], size, &found, opened));
    header[next_byte() % 5] ^= 1;
    CHECK(!td__gcm_open(other, &record, sealed[1], size, &found, opened));
}

TEST(both_ways_to_compute_gcm_agree)
{
    if (!td__gcm_has_avx512())
        td_test_skip("the processor has no VAES and VPCLMULQDQ");
    for (int i = 0; i < 20; i++) {
        struct td__gcm *ways = aligned_alloc(64, 2 * sizeof *ways);
        uint8_t key[TD__GCM_KEY];
        fill(key, sizeof key);
        CHECK(td__gcm_init(&ways[0], TD__GCM_OPENSSL, key));
        CHECK(td__gcm_init(&ways[1], TD__GCM_AVX512, key));
        for (size_t size = 0; size < 1100; size += i ? 37 : 1)
            compare(&ways[0], &ways[1], size + (size_t)i);
        for (int j = 0; j < 20; j++)
            compare(&ways[i % 2], &ways[!(i % 2)], (size_t)next_byte() * 78);
        td__gcm_free(&ways[0]);
        td__gcm_free(&ways[1]);
        free(ways);
    }
}

/* The specification of GCM (McGrew and Viega), test case 4 with a header of 5 bytes instead of 20 would be another text:
 * case 3 without its header is computed by OpenSSL here, so one known answer fixes both. */
TEST(gcm_known_answer)
{
    static const uint8_t key[TD__GCM_KEY] = {0xfe, 0xff, 0xe9, 0x92, 0x86, 0x65, 0x73, 0x1c,
                                             0x6d, 0x6a, 0x8f, 0x94, 0x67, 0x30, 0x83, 0x08};
    static const uint8_t text[8] = {0xd9, 0x31, 0x32, 0x25, 0xf8, 0x84, 0x06, 0xe5};
    static const uint8_t expected[8] = {0x42, 0x83, 0x1e, 0xc2, 0x21, 0x77, 0x74, 0x24};
    static const uint8_t nonce[] = {0xca, 0xfe, 0xba, 0xbe, 0xfa, 0xce,
                                    0xdb, 0xad, 0xde, 0xca, 0xf8, 0x88};
    for (int kind = TD__GCM_OPENSSL; kind <= TD__GCM_AVX512; kind++) {
        struct td__gcm *gcm = aligned_alloc(64, sizeof *gcm);
        struct td__gcm_record record = {.header = (const uint8_t *)"12345"};
        uint8_t out[sizeof text + 17];
        if (kind == TD__GCM_AVX512 && !td__gcm_has_avx512()) {
            free(gcm);
            break;
        }
        memcpy(record.nonce, nonce, sizeof nonce);
        CHECK(td__gcm_init(gcm, (enum td__gcm_kind)kind, key));
        CHECK(td__gcm_seal(gcm, &record, text, sizeof text, 0, out));
        CHECK_MEM(out, expected, sizeof expected);
        td__gcm_free(gcm);
        free(gcm);
    }
}

/* ---- OpenSSL at the other side --------------------------------------------------------------- */

/* Sends back what comes, in reverse roles, until the end. */
static void *echo(void *arg)
{
    struct tls_peer *peer = arg;
    static _Thread_local uint8_t bytes[40000];
    tls_peer_shake(peer);
    for (size_t round = 0;; round++) {
        int got = SSL_read(peer->ssl, bytes, sizeof bytes);
        if (got <= 0) {
            CHECK_EQ(SSL_get_error(peer->ssl, got), SSL_ERROR_ZERO_RETURN); /* an announced end */
            break;
        }
        if (round % 5 == 0)
            CHECK_EQ(SSL_key_update(peer->ssl, round % 10 ? SSL_KEY_UPDATE_REQUESTED
                                                          : SSL_KEY_UPDATE_NOT_REQUESTED),
                     1);
        CHECK_EQ(SSL_write(peer->ssl, bytes, got), got);
    }
    SSL_shutdown(peer->ssl);
    return NULL;
}

static void talk_to_openssl(bool server)
{
    static uint8_t sent[100000], got[sizeof sent];
    struct tls_peer peer;
    pthread_t thread;
    int fd = tls_peer_open(&peer, !server);
    fill(sent, sizeof sent);
    CHECK_EQ(pthread_create(&thread, NULL, echo, &peer), 0);
    tls_peer_join(&peer, fd, server);
    for (size_t i = 0; i < 60; i++) {
        size_t size = i < 20 ? i + 1 : i < 40 ? 997 * i : sizeof sent - i;
        CHECK_EQ(td__send_all(fd, sent, size, tls_peer_soon()), 0);
        memset(got, 0, size);
        CHECK_EQ(td__recv_all(fd, got, size, tls_peer_soon()), 0);
        CHECK_MEM(got, sent, size);
    }
    CHECK_EQ(td__sock_shutdown(fd, SHUT_WR), 0);
    CHECK_EQ(td__recv_all(fd, got, 1, tls_peer_soon()), ENODATA);
    pthread_join(thread, NULL);
    td__sock_close(fd);
    tls_peer_close(&peer);
}

TEST(a_server_talks_to_openssl, .deadline_s = 60)
{
    td__tls_key_limit = 200000;
    talk_to_openssl(true);
}

TEST(a_client_talks_to_openssl, .deadline_s = 60)
{
    td__tls_key_limit = 200000;
    talk_to_openssl(false);
}

TEST(a_client_talks_to_openssl_without_avx512, .deadline_s = 60)
{
    td__simd_use(TD__SIMD_GENERIC);
    talk_to_openssl(false);
}

/* ---- What poll() says ------------------------------------------------------------------------ */

static bool is_readable(int fd)
{
    struct pollfd in = {.fd = fd, .events = POLLIN};
    return poll(&in, 1, 0) == 1;
}

/* As long as a byte is not taken, the socket is readable, and MSG_PEEK sees it. */
TEST(a_record_is_taken_in_parts)
{
    uint8_t sent[1000], got[sizeof sent], peeked[40];
    int ends[2];
    tls_peer_pair(ends);
    fill(sent, sizeof sent);
    CHECK_EQ(td__send_all(ends[0], sent, sizeof sent, tls_peer_soon()), 0);
    CHECK_EQ(td__send_all(ends[0], sent, 10, tls_peer_soon()), 0);
    for (size_t at = 0; at < sizeof sent; at += 50) {
        CHECK_EQ(td__wait_fd(ends[1], POLLIN, tls_peer_soon()), 0);
        CHECK_EQ(td__sock_recv(ends[1], peeked, sizeof peeked, MSG_PEEK | MSG_DONTWAIT), 40);
        CHECK_MEM(peeked, sent + at, sizeof peeked);
        CHECK_EQ(td__recv_all(ends[1], got + at, 50, tls_peer_soon()), 0);
    }
    CHECK_MEM(got, sent, sizeof sent);
    CHECK_EQ(td__wait_fd(ends[1], POLLIN, tls_peer_soon()), 0);
    CHECK_EQ(td__recv_all(ends[1], got, 10, tls_peer_soon()), 0);
    CHECK(!is_readable(ends[1]));
    CHECK_EQ(td__sock_recv(ends[1], got, 1, MSG_DONTWAIT), -1);
    CHECK_EQ(errno, EAGAIN);
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
}

/* Several parts of memory, with boundaries at other places than those of the records. */
TEST(parts_of_memory)
{
    static uint8_t sent[60000], got[sizeof sent];
    struct iovec out[5] = {{sent, 40}, {sent + 40, 0}, {sent + 40, 30000}, {sent + 30040, 1}},
                 in[3] = {{got, 100}, {got + 100, 20000}, {got + 20100, 39900}};
    struct msghdr message = {.msg_iov = out, .msg_iovlen = 5}, answer = {.msg_iov = in};
    int ends[2];
    tls_peer_pair(ends);
    fill(sent, sizeof sent);
    out[4] = (struct iovec){sent + 30041, sizeof sent - 30041};
    CHECK_EQ(td__sock_sendmsg(ends[0], &message, MSG_DONTWAIT), (ssize_t)sizeof sent);
    answer.msg_iovlen = 3;
    for (size_t done = 0; done < sizeof sent;) {
        CHECK_EQ(td__wait_fd(ends[1], POLLIN, tls_peer_soon()), 0);
        ssize_t part = td__sock_recvmsg(ends[1], &answer, MSG_DONTWAIT);
        CHECK(part > 0 || errno == EAGAIN);
        for (size_t left = part > 0 ? (size_t)part : 0; left; done++, left--) {
            while (!answer.msg_iov->iov_len)
                answer.msg_iov++, answer.msg_iovlen--;
            answer.msg_iov->iov_base = (uint8_t *)answer.msg_iov->iov_base + 1;
            answer.msg_iov->iov_len--;
        }
    }
    CHECK_MEM(got, sent, sizeof sent);
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
}

/* Where the socket takes a part only, the caller is told of all but the last byte, which it sends again. */
TEST(a_full_socket_takes_no_more_than_was_said)
{
    static uint8_t sent[8 << 20], got[sizeof sent];
    int ends[2];
    size_t at = 0, taken = 0;
    tls_peer_pair(ends);
    fill(sent, sizeof sent);
    while (taken < sizeof sent) {
        size_t most = sizeof sent - at < 300000 ? sizeof sent - at : 300000;
        ssize_t part = most ? td__sock_send(ends[0], sent + at, most, MSG_DONTWAIT) : 0;
        CHECK(part >= 0 || errno == EAGAIN);
        at += part > 0 ? (size_t)part : 0;
        if (part > 0 && next_byte() % 4)
            continue;
        part = td__sock_recv(ends[1], got + taken, 1 + (size_t)next_byte() * 1000, MSG_DONTWAIT);
        CHECK(part > 0 || errno == EAGAIN);
        taken += part > 0 ? (size_t)part : 0;
        CHECK(taken <= at + 1);
    }
    CHECK_EQ(at, sizeof sent);
    CHECK(!memcmp(got, sent, sizeof sent));
    td__sock_close(ends[0]);
    td__sock_close(ends[1]);
}

/* ---- Records that are not valid -------------------------------------------------------------- */

static void expect_changed(int fd)
{
    uint8_t byte;
    ssize_t got;
    while ((got = td__sock_recv(fd, &byte, 1, MSG_DONTWAIT)) < 0 && errno == EAGAIN)
        CHECK_EQ(td__wait_fd(fd, POLLIN, tls_peer_soon()), 0);
    CHECK_EQ(got, -1);
    CHECK_EQ(errno, EBADMSG);
    CHECK(td__tls_complaint(fd) != NULL);
    CHECK_EQ(td__sock_recv(fd, &byte, 1, MSG_DONTWAIT), -1); /* and stays so */
    CHECK_EQ(errno, EBADMSG);
}

TEST(what_is_no_record_ends_the_connection)
{
    static const struct {
        uint8_t bytes[8];
        size_t zeros; /* after them */
    } cases[] = {
        {{23, 3, 3, 0x41, 0x01}, 0},  /* longer than a record may be */
        {{23, 3, 3, 0, 16}, 0},       /* shorter */
        {{23, 3, 1, 0, 40}, 0},       /* of another version */
        {{21, 3, 3, 0, 2, 1, 0}, 0},  /* an alert in clear */
        {{22, 3, 3, 0, 40}, 40},      /* a handshake in clear */
        {{20, 3, 3, 0, 1, 1}, 0},     /* as in the handshake */
        {{23, 3, 3, 0, 40}, 40},      /* a wrong tag */
        {{23, 3, 3, 0x41, 0}, 16640}, /* the longest, with a wrong tag */
        {{'G', 'E', 'T', ' ', '/'}, 40},
    };
    static uint8_t zeros[20000];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int ends[2];
        tls_peer_pair(ends);
        CHECK_EQ(send(ends[0], cases[i].bytes, 5, MSG_NOSIGNAL), 5);
        CHECK_EQ(send(ends[0], cases[i].zeros ? zeros : cases[i].bytes + 5,
                      cases[i].zeros ? cases[i].zeros : 3, MSG_NOSIGNAL),
                 (ssize_t)(cases[i].zeros ? cases[i].zeros : 3));
        expect_changed(ends[1]);
        expect_changed(ends[0]); /* it is told */
        td__sock_close(ends[0]);
        td__sock_close(ends[1]);
    }
}

/* A record that came before, and one that is left out. */
TEST(replayed_and_missing_records_are_found)
{
    for (int replay = 0; replay < 2; replay++) {
        int ends[2];
        tls_peer_pair(ends);
        if (replay)
            td__tls_of(ends[0])->out.number = 5;
        CHECK_EQ(td__send_all(ends[0], "abc", 3, tls_peer_soon()), 0);
        if (replay) {
            expect_changed(ends[1]);
        } else {
            uint8_t got[3];
            CHECK_EQ(td__recv_all(ends[1], got, 3, tls_peer_soon()), 0);
            td__tls_of(ends[0])->out.number = 0;
            CHECK_EQ(td__send_all(ends[0], "abc", 3, tls_peer_soon()), 0);
            expect_changed(ends[1]);
        }
        td__sock_close(ends[0]);
        td__sock_close(ends[1]);
    }
}

/* Data that end within a record are not the end of a stream. */
TEST(a_record_that_is_cut)
{
    for (size_t size = 1; size < 40; size += 19) {
        int ends[2];
        uint8_t byte;
        static const uint8_t start[40] = {23, 3, 3, 0, 60};
        tls_peer_pair(ends);
        CHECK_EQ(send(ends[0], start, size, MSG_NOSIGNAL), (ssize_t)size);
        CHECK_EQ(td__wait_fd(ends[1], POLLIN, tls_peer_soon()), 0);
        CHECK_EQ(td__sock_recv(ends[1], &byte, 1, MSG_DONTWAIT), -1);
        CHECK_EQ(errno, EAGAIN);
        CHECK(!is_readable(ends[1])); /* and nobody spins until the rest comes */
        shutdown(ends[0], SHUT_WR);
        CHECK_EQ(td__recv_all(ends[1], &byte, 1, tls_peer_soon()), ECONNRESET);
        td__sock_close(ends[0]);
        td__sock_close(ends[1]);
    }
}
