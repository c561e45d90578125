/* Endpoints and unauthenticated clients or invalid requests: they get no byte and no descriptor, and do not
 * disturb the ranks of the job. */
#include "endpoint_world.h"
#include "runner.h"

#include "base/auth.h"
#include "os/socket.h"
#include "peer/endpoint_internal.h"

#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LINK = 1, SHARED_FD = 2 };

/* ---- Raw clients ------------------------------------------------------------------------------ */

static int connect_host(const char *host, int port)
{
    struct td__address_list list;
    bool retry;
    CHECK_OK(td__resolve(host, port, soon(), &list, &retry));
    int fd = td__connect_to(&list.at[0], soon());
    if (fd < 0)
        FAIL("connecting to %s: %s", host, strerror(-fd));
    return fd;
}

/* At the TCP port, or at the unix socket. */
static int connect_to(const struct td__endpoint *endpoint, bool locally)
{
    char name[128];
    endpoint_local(endpoint, name);
    return locally ? connect_host(name, 0) : connect_host("127.0.0.1", endpoint_port(endpoint));
}

static void send_all(int fd, const void *data, size_t size)
{
    td__send_all(fd, data, size, soon()); /* the other side may have closed it by now */
}

/* The proof and the request behind it; false where only a refusal was received. */
static bool introduce(int fd, struct td__auth *auth, const void *request, size_t size)
{
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    CHECK_OK(td__auth_hello(auth, hello));
    send_all(fd, hello, sizeof hello);
    CHECK_EQ(td__recv_all(fd, challenge, TD__REFUSAL_SIZE, soon()), 0);
    int rest = td__recv_all(fd, challenge + TD__REFUSAL_SIZE, sizeof challenge - TD__REFUSAL_SIZE,
                            soon());
    if (rest) {
        CHECK(rest == ENODATA && td__auth_is_refusal(challenge));
        return false;
    }
    CHECK(td__auth_check_challenge(auth, challenge));
    td__auth_proof(auth, proof);
    send_all(fd, proof, sizeof proof);
    send_all(fd, request, size);
    return true;
}

static void make_request(uint8_t bytes[TD__REQUEST_SIZE], const struct td__endpoint *to,
                         uint32_t what, uint32_t rank, uint32_t group)
{
    struct td__request request = {.what = (enum td__want)what, .rank = (int)rank, .group = group};
    td__request_write(&request, to->own.number, bytes);
}

/* The endpoint still works: a link and a shared fd can be requested. */
static void check_service(struct td__endpoint *e[2])
{
    int a, b, fd;
    CHECK_OK(td__endpoint_connect(e[1], 0, 50, TD__CHANNEL_COLLECTIVE, soon(), &a));
    CHECK_OK(td__endpoint_accept(e[0], 1, 50, TD__CHANNEL_COLLECTIVE, soon(), &b));
    CHECK_OK(td__endpoint_fetch(e[1], 0, 51, soon(), NULL, &fd));
    close(a);
    close(b);
    close(fd);
}

static int open_scene(struct td__endpoint *e[2])
{
    int shared_fd = dup(STDERR_FILENO);
    pair_open(e, true);
    CHECK_OK(td__endpoint_offer(e[0], 51, shared_fd));
    return shared_fd;
}

static void close_scene(struct td__endpoint *e[2], int shared_fd)
{
    check_service(e);
    pair_close(e);
    close(shared_fd);
}

/* ---- Unauthenticated clients ----------------------------------------------------------------- */

TEST(noise_gets_no_answer)
{
    struct td__endpoint *e[2];
    uint8_t noise[3000];
    uint32_t state = 12345;
    int shared_fd = open_scene(e);
    for (int i = 0; i < 40; i++) {
        size_t size = (size_t)(i % 20) * (size_t)(i % 20) * 8;
        for (size_t k = 0; k < size; k++)
            noise[k] = (uint8_t)((state = state * 1664525u + 1013904223u) >> 24);
        int fd = connect_to(e[0], i % 2);
        send_all(fd, noise, size);
        if (size < TD__HELLO_SIZE)
            shutdown(fd, SHUT_WR);
        check_closed(fd);
    }
    close_scene(e, shared_fd);
}

TEST(a_wrong_secret_or_purpose_is_refused)
{
    static const char *const wrong[][2] = {{"another secret", "link"},
                                           {"", "link"},
                                           {ENDPOINT_SECRET, "store"},
                                           {ENDPOINT_SECRET, ""}};
    struct td__endpoint *e[2];
    uint8_t request[TD__REQUEST_SIZE];
    int shared_fd = open_scene(e);
    make_request(request, e[0], SHARED_FD, 1, 51);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        for (int locally = 0; locally < 2; locally++) {
            struct td__auth auth = endpoint_guest(e[0], wrong[i][0]);
            auth.purpose = wrong[i][1];
            int fd = connect_to(e[0], locally);
            CHECK(!introduce(fd, &auth, request, sizeof request));
            close(fd);
        }
    close_scene(e, shared_fd);
}

/* Of the job, but at the wrong listener. */
TEST(a_client_of_another_listener_is_refused)
{
    struct td__endpoint *e[2];
    uint8_t request[TD__REQUEST_SIZE];
    int shared_fd = open_scene(e);
    make_request(request, e[0], SHARED_FD, 1, 51);
    for (int locally = 0; locally < 2; locally++) {
        struct td__auth right = endpoint_guest(e[0], ENDPOINT_SECRET), other = right, none = right;
        other.identity[TD__IDENTITY_SIZE - 1] ^= 1;
        memset(none.identity, 0, sizeof none.identity);
        int fd = connect_to(e[0], locally);
        CHECK(!introduce(fd, &other, request, sizeof request));
        close(fd);
        fd = connect_to(e[0], locally);
        CHECK(!introduce(fd, &none, request, sizeof request));
        close(fd);
        fd = connect_to(e[0], locally);
        CHECK(introduce(fd, &right, request, sizeof request));
        close(fd);
    }
    close_scene(e, shared_fd);
}

/* Rank 0 reaches rank 2 where it looks for rank 1, as on a network that leads connections elsewhere. They listen at
 * different addresses, so each has a listener of its own. */
static void check_swapped(bool shared)
{
    struct td__endpoint *e[3];
    int fd;
    setenv("TANDEM_SECRET", ENDPOINT_SECRET, 1);
    for (int i = 0; i < 3; i++) {
        static const char *const hosts[] = {"127.0.0.1", "127.0.0.2", "127.0.0.3"};
        CHECK_OK(td__endpoint_open(i, 3, hosts[i], shared, &e[i]));
    }
    meet_all(e, 3);
    struct td__card *one = td__peer(e[0], 1), *two = td__peer(e[0], 2);
    one->port = two->port;
    memcpy(one->address, two->address, sizeof one->address);
    memcpy(one->local, two->local, sizeof one->local);
    CHECK_FAILS(td__endpoint_connect(e[0], 1, 50, TD__CHANNEL_MESSAGES, soon(), &fd), TD_ERR_AUTH,
                "rank 1 (on ");
    CHECK(strstr(td_last_error(), "is not the one that is meant"));
    CHECK_OK(td__endpoint_connect(e[0], 2, 50, TD__CHANNEL_MESSAGES, soon(), &fd));
    close(fd);
    for (int i = 0; i < 3; i++)
        td__endpoint_close(e[i]);
}

TEST(a_link_to_the_wrong_rank_fails)
{
    check_swapped(true);
    check_swapped(false);
    setenv("TANDEM_TLS", "1", 1);
    check_swapped(false);
}

TEST(a_wrong_proof_gets_nothing)
{
    struct td__endpoint *e[2];
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE];
    uint8_t proof[TD__PROOF_SIZE + TD__REQUEST_SIZE] = {1};
    int shared_fd = open_scene(e);
    struct td__auth auth = endpoint_guest(e[0], ENDPOINT_SECRET);
    for (int locally = 0; locally < 2; locally++) {
        CHECK_OK(td__auth_hello(&auth, hello));
        int fd = connect_to(e[0], locally);
        send_all(fd, hello, sizeof hello);
        CHECK_EQ(td__recv_all(fd, challenge, sizeof challenge, soon()), 0);
        make_request(proof + TD__PROOF_SIZE, e[0], SHARED_FD, 1, 51);
        send_all(fd, proof, sizeof proof);
        check_closed(fd);

        fd = connect_to(e[0], locally); /* a hello that was overheard gets no second challenge */
        send_all(fd, hello, sizeof hello);
        check_closed(fd);
    }
    close_scene(e, shared_fd);
}

/* Clients of the job with invalid requests. */
TEST(wrong_requests_get_nothing)
{
    static const struct {
        uint32_t what, rank;
        bool locally;
    } wrong[] = {
        {0, 1, true},      {7, 1, true},           {UINT32_MAX, 1, false}, {LINK, 2, false},
        {LINK, -1u, true}, {SHARED_FD, -2u, true}, {SHARED_FD, 7, true},   {SHARED_FD, 1, false},
    };
    struct td__endpoint *e[2];
    uint8_t request[TD__REQUEST_SIZE];
    int shared_fd = open_scene(e);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        int fd = connect_to(e[0], wrong[i].locally);
        make_request(request, e[0], wrong[i].what, wrong[i].rank, 51);
        struct td__auth auth = endpoint_guest(e[0], ENDPOINT_SECRET);
        CHECK(introduce(fd, &auth, request, sizeof request));
        check_closed(fd);
    }
    close_scene(e, shared_fd);
}

/* A valid request for an endpoint that its listener does not have: the reply says that the endpoint has left. */
TEST(a_request_for_a_closed_endpoint)
{
    static const uint32_t kinds[] = {TD__WANT_LINK, TD__WANT_SHARED_FD, TD__WANT_ANSWER,
                                     TD__WANT_LIFELINE, TD__WANT_HAND_OVER};
    struct td__endpoint *e[2];
    uint8_t request[TD__REQUEST_SIZE];
    int shared_fd = open_scene(e);
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof *kinds; i++) {
        char reply;
        int fd = connect_to(e[0], i % 2);
        make_request(request, e[0], kinds[i / 2], 1, 51);
        td__store_u32(request + 28, i < 4 ? 0 : e[0]->own.number + 100 + (uint32_t)i);
        struct td__auth auth = endpoint_guest(e[0], ENDPOINT_SECRET);
        CHECK(introduce(fd, &auth, request, sizeof request));
        CHECK_EQ(td__recv_all(fd, &reply, 1, soon()), 0);
        CHECK_EQ(reply, TD__REPLY_LEFT);
        check_closed(fd);
    }
    close_scene(e, shared_fd);
}

/* A link whose request arrives byte by byte, with the first bytes of the link right behind it. */
TEST(slow_clients_are_served)
{
    struct td__endpoint *e[2];
    uint8_t bytes[TD__PROOF_SIZE + TD__REQUEST_SIZE + 3], hello[TD__HELLO_SIZE];
    uint8_t challenge[TD__CHALLENGE_SIZE];
    int shared_fd = open_scene(e), fd = connect_to(e[0], false), link;
    struct td__auth auth = endpoint_guest(e[0], ENDPOINT_SECRET);
    CHECK_OK(td__auth_hello(&auth, hello));
    for (size_t i = 0; i < sizeof hello; i++) {
        send_all(fd, hello + i, 1);
        if (i % 16 == 0)
            td__sleep_ns(1000000);
    }
    CHECK_EQ(td__recv_all(fd, challenge, sizeof challenge, soon()), 0);
    CHECK(td__auth_check_challenge(&auth, challenge));
    td__auth_proof(&auth, bytes);
    make_request(bytes + TD__PROOF_SIZE, e[0], LINK, 1, 60);
    memcpy(bytes + sizeof bytes - 3, "abc", 3);
    send_all(fd, bytes, 10);
    td__sleep_ns(5000000);
    send_all(fd, bytes + 10, sizeof bytes - 10);
    CHECK_OK(td__endpoint_accept(e[0], 1, 60, TD__CHANNEL_COLLECTIVE, soon(), &link));
    char there[3];
    CHECK_EQ(td__recv_all(link, there, 3, soon()), 0);
    CHECK_MEM(there, "abc", 3);
    close(link);
    close(fd);
    close_scene(e, shared_fd);
}

TEST(no_secret_no_links_beyond_this_host)
{
    struct td__endpoint *endpoint;
    unsetenv("TANDEM_SECRET");
    CHECK_FAILS(td__endpoint_open(0, 2, "192.0.2.1", true, &endpoint), TD_ERR_AUTH,
                "needs the job's secret");
    CHECK_OK(td__endpoint_open(0, 2, "127.0.0.1", true, &endpoint));
    td__endpoint_close(endpoint);
    setenv("TANDEM_INSECURE", "1", 1);
    CHECK_OK(td__endpoint_open(0, 2, "192.0.2.1", true, &endpoint));
    td__endpoint_close(endpoint);
}

/* More silent clients than the limit: the oldest are evicted, and ranks of the job can still connect. */
TEST(many_silent_unauthenticated_clients, .deadline_s = 60)
{
    enum { CLIENTS = 2200 }; /* unauthenticated clients get a quarter of the descriptors */
    static int fds[CLIENTS];
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_max < 3 * CLIENTS)
        td_test_skip("only %lu descriptors", (unsigned long)limit.rlim_max);
    limit.rlim_cur = limit.rlim_max < 8192 ? limit.rlim_max : 8192;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    struct td__endpoint *e[2];
    int shared_fd = open_scene(e);
    uint8_t hello[TD__HELLO_SIZE];
    struct td__auth auth = endpoint_guest(e[0], "another secret");
    CHECK_OK(td__auth_hello(&auth, hello));
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = connect_to(e[0], i % 2);
        if (i % 3)
            send_all(fds[i], hello, (size_t)(i % (TD__HELLO_SIZE - 1))); /* half a hello */
        if (i % 100 == 0)
            check_service(e);
    }
    check_service(e);
    check_closed(fds[0]); /* the first one had to go */
    for (int i = 1; i < CLIENTS; i++)
        close(fds[i]);
    close_scene(e, shared_fd);
}
