/* Endpoints: links and shared descriptors between ranks of one process, and the memory of another process. */
#include "endpoint_world.h"
#include "process_counts.h"
#include "runner.h"

#include "base/arena.h"
#include "os/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

struct shown { /* what the ranks of a test share */
    atomic_size_t offset;
};

/* ---- Cards ----------------------------------------------------------------------------------- */

TEST(hosts_are_numbered_by_their_first_rank)
{
    static const char *const ids[] = {"b", "a", "b", "c", "a"};
    struct td__endpoint *endpoints[5];
    for (int shared = 0; shared < 2; shared++) {
        for (int r = 0; r < 5; r++) {
            setenv("TANDEM_HOST_ID", ids[r], 1);
            CHECK_OK(td__endpoint_open(r, 5, "127.0.0.1", shared, &endpoints[r]));
        }
        meet_all(endpoints, 5);
        for (int r = 0; r < 5; r++) {
            static const int expected[] = {0, 1, 0, 2, 1};
            for (int k = 0; k < 5; k++)
                CHECK_EQ(td__endpoint_host(endpoints[r], k), shared ? expected[k] : k);
            CHECK_EQ(td__endpoint_rank(endpoints[r]), r);
            CHECK_EQ(td__endpoint_size(endpoints[r]), 5);
            CHECK_EQ(td__endpoint_pid(endpoints[r], 4 - r), getpid());
            CHECK_CONTAINS(td__endpoint_describe(endpoints[r], 3), "rank 3 (on ");
        }
        for (int r = 0; r < 5; r++)
            td__endpoint_close(endpoints[r]);
    }
}

/* A rank that shares no memory is on a host of its own, for all ranks. */
TEST(some_share_no_memory)
{
    static const int expected[] = {0, 1, 0, 2};
    struct td__endpoint *endpoints[4];
    for (int r = 0; r < 4; r++)
        CHECK_OK(td__endpoint_open(r, 4, "127.0.0.1", r % 2 == 0, &endpoints[r]));
    meet_all(endpoints, 4);
    for (int r = 0; r < 4; r++)
        for (int k = 0; k < 4; k++)
            CHECK_EQ(td__endpoint_host(endpoints[r], k), expected[k]);
    for (int r = 0; r < 4; r++)
        td__endpoint_close(endpoints[r]);
}

/* ---- Presence -------------------------------------------------------------------------------- */

static bool no_rank_has_left(void *arg, int rank)
{
    (void)arg;
    (void)rank;
    return false;
}

static void open_all(struct td__endpoint **endpoints, int count)
{
    for (int r = 0; r < count; r++)
        CHECK_OK(td__endpoint_open(r, count, "127.0.0.1", true, &endpoints[r]));
    meet_all(endpoints, count);
}

/* `near` ranks are watched by their processes, the others by lifelines. */
static void look_out(struct td__endpoint *endpoint, bool near)
{
    td__detector_fns fns = {.has_left = near ? no_rank_has_left : NULL};
    CHECK_OK(td__endpoint_start_detector(endpoint, &fns, NULL));
}

static void see_rank_1_die(bool near, const char *how)
{
    struct td__endpoint *endpoint;
    int rank = td_test_rank();
    CHECK_OK(td__endpoint_open(rank, 3, "127.0.0.1", near, &endpoint));
    meet_by_files(endpoint);
    look_out(endpoint, near);
    for (int r = 0; r < 3; r++) {
        td__endpoint_watch(endpoint, r);
        CHECK_EQ(td__endpoint_presence(endpoint, r), TD__PRESENT);
        CHECK(!td__endpoint_exit_reason(endpoint, r));
    }
    td__sleep_ns(300000000); /* until lifelines are there */
    td_test_barrier();
    if (rank == 1)
        raise(SIGKILL);
    CHECK_SOON(td__endpoint_presence(endpoint, 1) == TD__ENDED);
    CHECK_EQ(td__endpoint_losses(endpoint), 1);
    CHECK_STR(td__endpoint_exit_reason(endpoint, 1), how);
    CHECK_EQ(td__endpoint_presence(endpoint, 0), TD__PRESENT);
    CHECK_EQ(td__endpoint_presence(endpoint, 2), TD__PRESENT);
    /* The others are still here when they look at each other. */
    struct shown *shown = map_file(sizeof *shown);
    atomic_fetch_add(&shown->offset, 1);
    CHECK_SOON(atomic_load(&shown->offset) == 2);
    td__endpoint_close(endpoint);
}

RANKS(death_of_a_neighbour, .ranks = 3, .may_die = 1 << 1)
{
    see_rank_1_die(true, "was killed by SIGKILL");
}

RANKS(death_at_the_end_of_a_lifeline, .ranks = 3, .may_die = 1 << 1)
{
    see_rank_1_die(false, "was killed by SIGKILL");
}

static atomic_bool is_busy, may_go_on;

static void be_busy(void *arg)
{
    (void)arg;
    atomic_store(&is_busy, true);
    while (!atomic_load(&may_go_on))
        td__sleep_ns(1000000);
}

static void *go_on_later(void *arg)
{
    td__sleep_ns(300000000);
    atomic_store(&may_go_on, true);
    return arg;
}

/* Only rank 0 sees the end of rank 1. Its failure detector is busy, and before it reports the loss, the program
 * leaves. Rank 2 must get the report all the same. */
RANKS(a_loss_report_from_a_rank_that_leaves, .ranks = 3, .may_die = 1 << 1)
{
    struct td__endpoint *endpoint;
    pthread_t later;
    int rank = td_test_rank();
    CHECK_OK(td__endpoint_open(rank, 3, "127.0.0.1", false, &endpoint));
    meet_by_files(endpoint);
    CHECK_OK(td__endpoint_start_detector(
        endpoint, &(td__detector_fns){.tick = rank == 0 ? be_busy : NULL}, NULL));
    CHECK_SOON(rank || atomic_load(&is_busy));
    td_test_barrier();
    if (rank == 1)
        raise(SIGKILL);
    if (rank == 0) {
        int process = td__process_watch(td__endpoint_pid(endpoint, 1), NULL);
        CHECK(process < 0 || td__process_has_ended(process, 10000 * td_test_slowness()));
        if (process >= 0)
            close(process);
        CHECK_EQ(pthread_create(&later, NULL, go_on_later, NULL), 0);
        td__endpoint_stop_detector(endpoint);
        pthread_join(later, NULL);
    } else {
        CHECK_SOON(td__endpoint_presence(endpoint, 1) == TD__ENDED);
    }
    td__endpoint_close(endpoint);
}

static void count_call(void *arg)
{
    atomic_fetch_add((atomic_int *)arg, 1);
}

static void answer_busily(void *arg, int rank, uint32_t topic, uint64_t group, uint64_t value,
                          struct td__buffer *answer)
{
    (void)rank, (void)topic, (void)group, (void)value, (void)answer;
    be_busy(arg);
}

static void *ask_rank_1(void *arg)
{
    struct td__buffer answer = {0};
    CHECK_OK(td__endpoint_query(arg, 1, 5, 6, 7, soon(), &answer));
    td__buffer_free(&answer);
    return NULL;
}

/* Two worlds of one process. The failure detector, and then the listener, works for one of them, while the other
 * one is closed. */
TEST(closing_an_endpoint_waits_for_no_other)
{
    struct td__endpoint *busy[2], *other[2];
    atomic_int calls = 0;
    pthread_t asker;
    for (int listener = 0; listener < 2; listener++) {
        atomic_store(&is_busy, false);
        atomic_store(&may_go_on, false);
        open_all(busy, 2);
        open_all(other, 2);
        CHECK_OK(
            td__endpoint_start_detector(other[0], &(td__detector_fns){.tick = count_call}, &calls));
        if (listener) {
            td__endpoint_answer(busy[1], answer_busily, NULL);
            CHECK_EQ(pthread_create(&asker, NULL, ask_rank_1, busy[0]), 0);
        } else {
            CHECK_SOON(atomic_load(&calls) > 0);
            CHECK_OK(
                td__endpoint_start_detector(busy[0], &(td__detector_fns){.tick = be_busy}, NULL));
        }
        CHECK_SOON(atomic_load(&is_busy));
        td__endpoint_close(other[0]); /* hangs where it waits for the busy one */
        td__endpoint_close(other[1]);
        int before = atomic_load(&calls);
        atomic_store(&may_go_on, true);
        if (listener)
            pthread_join(asker, NULL);
        td__sleep_ns(300000000); /* longer than from one tick to the next */
        CHECK_EQ(atomic_load(&calls), before);
        pair_close(busy);
    }
}

/* They get a loss report like all others, and there may be many. */
TEST(loss_reports_to_ranks_that_have_left)
{
    struct td__endpoint *e[2];
    int fd;
    for (int shared = 0; shared < 2; shared++) {
        pair_open(e, shared);
        look_out(e[0], false);
        td__endpoint_close(e[1]);
        int64_t before = td__now_ns();
        for (int i = 0; i < 50; i++)
            CHECK_FAILS(td__endpoint_connect_briefly(e[0], 1, 3, TD__CHANNEL_MESSAGES, soon(), &fd),
                        TD_ERR_PEER, "rank 1 (on ");
        CHECK(td__now_ns() - before < 5000000000ll * td_test_slowness());
        td__endpoint_close(e[0]);
    }
}

TEST(leaving_in_order_is_no_loss)
{
    struct td__endpoint *e[3];
    open_all(e, 3);
    for (int r = 0; r < 3; r++)
        look_out(e[r], false);
    td__endpoint_watch(e[2], 1);
    td__sleep_ns(100000000);
    td__endpoint_close(e[1]);
    CHECK_SOON(td__endpoint_presence(e[0], 1) == TD__LEFT);
    CHECK_SOON(td__endpoint_presence(e[2], 1) == TD__LEFT);
    CHECK_STR(td__endpoint_exit_reason(e[0], 1), "has left");
    CHECK_EQ(td__endpoint_losses(e[0]), 0);
    td__endpoint_close(e[0]);
    td__endpoint_close(e[2]);
}

/* A rank of this process that is not watched from the start: its listener lives on, and says that it has left. */
static void add_rank(struct td__endpoint *endpoint, int rank, const struct td__endpoint *other)
{
    struct td__buffer card = {0};
    td__endpoint_card(other, &card);
    td_bytes bytes = {.data = (char *)card.data, .size = card.size};
    CHECK_OK(td__endpoint_add_rank(endpoint, rank, &bytes));
    td__buffer_free(&card);
}

/* Ranks far apart, which know each other one by one; only those that are watched are lost. */
TEST(a_world_that_grows)
{
    static const int ranks[] = {5, 70000, TD__MAX_RANKS - 1};
    struct td__endpoint *e[3];
    int fd, other;
    setenv("TANDEM_SECRET", ENDPOINT_SECRET, 1);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(td__endpoint_open(ranks[i], 0, "127.0.0.1", i != 1, &e[i]));
        CHECK_EQ(td__endpoint_size(e[i]), 0);
        add_rank(e[i], ranks[i], e[i]);
        CHECK_OK(td__endpoint_start_detector(e[i], &(td__detector_fns){0}, NULL));
        CHECK_EQ(td__endpoint_size(e[i]), ranks[i] + 1);
    }
    add_rank(e[0], ranks[2], e[2]);
    add_rank(e[0], ranks[2], e[1]); /* known: does nothing */
    CHECK(td__endpoint_knows(e[0], ranks[2]) && !td__endpoint_knows(e[0], ranks[1]));
    CHECK_EQ(td__endpoint_host(e[0], ranks[2]), td__endpoint_host(e[0], ranks[0]));
    add_rank(e[0], ranks[1], e[1]);
    CHECK(td__endpoint_host(e[0], ranks[1]) != td__endpoint_host(e[0], ranks[0]));

    /* A rank that does not know the one that connects accepts the link. */
    CHECK_OK(td__endpoint_connect(e[0], ranks[2], 7, TD__CHANNEL_RPC, soon(), &fd));
    CHECK_OK(td__endpoint_accept(e[2], ranks[0], 7, TD__CHANNEL_RPC, soon(), &other));
    close(fd);
    close(other);
    td__endpoint_watch(e[0], ranks[2]);
    CHECK(!td__endpoint_find_out(e[0], ranks[2], td__deadline_in_ms(100)));
    td__endpoint_close(e[2]);
    CHECK_SOON(td__endpoint_presence(e[0], ranks[2]) != TD__PRESENT);
    CHECK_STR(td__endpoint_exit_reason(e[0], ranks[2]), "has left");
    CHECK_EQ(td__endpoint_presence(e[0], ranks[1]), TD__PRESENT);
    td_bytes garbage = {.data = "garbage", .size = 7};
    CHECK_FAILS(td__endpoint_add_rank(e[0], 6, &garbage), TD_ERR_MISMATCH, "card of rank 6");
    CHECK(!td__endpoint_knows(e[0], 6));
    td__endpoint_close(e[0]);
    td__endpoint_close(e[1]);
}

TEST(a_closed_endpoint_of_a_living_process_has_left)
{
    struct td__endpoint *e[3];
    open_all(e, 3);
    td__endpoint_close(e[1]);
    look_out(e[2], false);
    td__endpoint_watch(e[2], 1);
    CHECK_SOON(td__endpoint_presence(e[2], 1) == TD__LEFT);
    CHECK_EQ(td__endpoint_losses(e[2]), 0);
    CHECK_EQ(td__endpoint_presence(e[2], 0), TD__PRESENT);
    td__endpoint_close(e[0]);
    td__endpoint_close(e[2]);
}

/* The same where nothing listens any more: the process may have ended. */
RANKS(a_rank_without_a_listener_is_lost, .ranks = 3)
{
    struct td__endpoint *endpoint;
    int rank = td_test_rank();
    CHECK_OK(td__endpoint_open(rank, 3, "127.0.0.1", true, &endpoint));
    meet_by_files(endpoint);
    td_test_barrier();
    if (rank == 1)
        td__endpoint_close(endpoint);
    td_test_barrier();
    if (rank == 2) {
        look_out(endpoint, false);
        td__endpoint_watch(endpoint, 1);
        CHECK_SOON(td__endpoint_presence(endpoint, 1) == TD__GONE);
        CHECK_EQ(td__endpoint_losses(endpoint), 0);
        CHECK_EQ(td__endpoint_presence(endpoint, 0), TD__PRESENT);
    }
    td_test_barrier();
    if (rank != 1)
        td__endpoint_close(endpoint);
}

/* ---- Questions ------------------------------------------------------------------------------- */

static void repeat(void *arg, int rank, uint32_t topic, uint64_t group, uint64_t value,
                   struct td__buffer *answer)
{
    td__buffer_put_string(answer, arg, strlen(arg));
    td__buffer_put_u32(answer, (uint32_t)rank);
    td__buffer_put_u32(answer, topic);
    td__buffer_put_u64(answer, group);
    td__buffer_put_u64(answer, value);
}

TEST(queries_are_answered)
{
    struct td__endpoint *e[2];
    struct td__buffer answer = {0};
    open_all(e, 2);
    CHECK_FAILS(td__endpoint_query(e[0], 1, 5, 6, 7, soon(), &answer), TD_ERR_PEER,
                "does not answer");
    td__endpoint_answer(e[1], repeat, "well");
    CHECK_OK(td__endpoint_query(e[0], 1, 5, 1ull << 40, 1ull << 63 | 7, soon(), &answer));
    struct td__reader reader = td__reader_of(answer.data, answer.size);
    struct td__span text = td__reader_string(&reader, 100);
    CHECK(text.size == 4 && !memcmp(text.data, "well", 4));
    CHECK_EQ(td__reader_u32(&reader), 0);
    CHECK_EQ(td__reader_u32(&reader), 5);
    CHECK(td__reader_u64(&reader) == 1ull << 40);
    CHECK(td__reader_u64(&reader) == (1ull << 63 | 7));
    CHECK(td__reader_done(&reader));
    td__buffer_free(&answer);
    td__endpoint_answer(e[1], NULL, NULL);
    CHECK_FAILS(td__endpoint_query(e[0], 1, 5, 6, 7, soon(), &answer), TD_ERR_PEER,
                "does not answer");
    td__buffer_free(&answer);
    td__endpoint_close(e[0]);
    td__endpoint_close(e[1]);
}

TEST(malformed_cards)
{
    struct td__endpoint *endpoint;
    struct td__buffer card = {0};
    CHECK_OK(td__endpoint_open(0, 2, "127.0.0.1", true, &endpoint));
    td__endpoint_card(endpoint, &card);
    for (size_t size = 0; size < card.size; size++) { /* any shorter one */
        td_bytes cards[2] = {{(char *)card.data, card.size}, {(char *)card.data, size}};
        CHECK_FAILS(td__endpoint_connect_all(endpoint, cards), TD_ERR_MISMATCH, "rank 1");
    }
    char *longer = malloc(card.size + 1);
    memcpy(longer, card.data, card.size);
    longer[card.size] = 0;
    CHECK_FAILS(td__endpoint_connect_all(
                    endpoint, (td_bytes[]){{longer, card.size}, {longer, card.size + 1}}),
                TD_ERR_MISMATCH, "version");
    CHECK_OK(
        td__endpoint_connect_all(endpoint, (td_bytes[]){{longer, card.size}, {longer, card.size}}));
    free(longer);
    td__buffer_free(&card);
    td__endpoint_close(endpoint);
}

/* ---- Links ----------------------------------------------------------------------------------- */

/* Bytes go both ways, and the socket is what links are said to be. */
static void check_link(int a, int b, int family)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    char byte = 0;
    CHECK_EQ(getsockname(a, (struct sockaddr *)&address, &size), 0);
    CHECK_EQ(address.ss_family, family);
    CHECK(fcntl(a, F_GETFL) & O_NONBLOCK);
    CHECK(fcntl(b, F_GETFL) & O_NONBLOCK);
    CHECK_EQ(recv(a, &byte, 1, 0), -1);
    CHECK_EQ(errno, EAGAIN);
    for (int i = 0; i < 2; i++) {
        struct pollfd there = {.fd = i ? a : b, .events = POLLIN};
        CHECK_EQ(send(i ? b : a, "x", 1, MSG_NOSIGNAL), 1);
        CHECK_EQ(poll(&there, 1, 5000), 1);
        CHECK_EQ(recv(i ? a : b, &byte, 1, 0), 1);
        CHECK_EQ(byte, 'x');
    }
    close(a);
    close(b);
}

TEST(links_go_both_ways)
{
    for (int shared = 0; shared < 2; shared++) {
        struct td__endpoint *e[2];
        int a, b;
        pair_open(e, shared);
        for (int from = 0; from < 2; from++) {
            CHECK_OK(td__endpoint_connect(e[from], !from, 77, TD__CHANNEL_COLLECTIVE, soon(), &a));
            CHECK_OK(td__endpoint_accept(e[!from], from, 77, TD__CHANNEL_COLLECTIVE, soon(), &b));
            check_link(a, b, shared ? AF_UNIX : AF_INET);
        }
        pair_close(e);
    }
}

TEST(links_wait_until_they_are_taken)
{
    struct td__endpoint *e[2];
    int first, second, other, channel, got[4];
    pair_open(e, true);
    CHECK_OK(td__endpoint_connect(e[1], 0, 5, TD__CHANNEL_COLLECTIVE, soon(), &first));
    CHECK_OK(td__endpoint_connect(e[1], 0, 5, TD__CHANNEL_COLLECTIVE, soon(), &second));
    CHECK_OK(td__endpoint_connect(e[1], 0, 6, TD__CHANNEL_COLLECTIVE, soon(), &other));
    CHECK_OK(td__endpoint_connect(e[1], 0, 5, TD__CHANNEL_MESSAGES, soon(), &channel));
    send(first, "1", 1, 0);
    send(second, "2", 1, 0);
    /* Links match by group, channel and rank; matching ones are taken in order. */
    CHECK_OK(td__endpoint_accept(e[0], 1, 6, TD__CHANNEL_COLLECTIVE, soon(), &got[0]));
    CHECK_OK(td__endpoint_accept(e[0], 1, 5, TD__CHANNEL_MESSAGES, soon(), &got[1]));
    CHECK_OK(td__endpoint_accept(e[0], 1, 5, TD__CHANNEL_COLLECTIVE, soon(), &got[2]));
    CHECK_OK(td__endpoint_accept(e[0], 1, 5, TD__CHANNEL_COLLECTIVE, soon(), &got[3]));
    char byte;
    CHECK_EQ(recv(got[2], &byte, 1, 0), 1);
    CHECK_EQ(byte, '1');
    CHECK_EQ(recv(got[3], &byte, 1, 0), 1);
    check_link(got[0], other, AF_UNIX);
    check_link(got[1], channel, AF_UNIX);
    check_link(got[2], first, AF_UNIX);
    check_link(got[3], second, AF_UNIX);
    CHECK_FAILS(
        td__endpoint_accept(e[0], 1, 5, TD__CHANNEL_COLLECTIVE, td__deadline_in_ms(50), &got[0]),
        TD_ERR_TIMEOUT, "rank 1");
    pair_close(e);
}

struct taken {
    atomic_int count;
    int rank, fd;
};

static void take(void *arg, int rank, int fd)
{
    struct taken *taken = arg;
    taken->rank = rank;
    taken->fd = fd;
    atomic_fetch_add(&taken->count, 1);
}

TEST(links_are_handed_to_a_listener)
{
    struct td__endpoint *e[2];
    struct taken taken = {0};
    int fd, fds[3];
    pair_open(e, false);
    CHECK_OK(td__endpoint_connect(e[1], 0, 9, TD__CHANNEL_MESSAGES, soon(), &fds[0]));
    CHECK_OK(td__endpoint_connect(e[1], 0, 9, TD__CHANNEL_COLLECTIVE, soon(), &fds[1]));
    /* Links that have arrived at once; later ones on arrival. */
    struct pollfd quiet = {.fd = fds[0], .events = POLLIN};
    poll(&quiet, 1, 100);
    td__endpoint_listen(e[0], 9, TD__CHANNEL_MESSAGES, take, &taken);
    CHECK_SOON(atomic_load(&taken.count) == 1);
    CHECK_EQ(taken.rank, 1);
    check_link(taken.fd, fds[0], AF_INET);
    CHECK_OK(td__endpoint_connect(e[1], 0, 9, TD__CHANNEL_MESSAGES, soon(), &fds[0]));
    CHECK_SOON(atomic_load(&taken.count) == 2);
    check_link(taken.fd, fds[0], AF_INET);
    /* The other channel is not touched by this. */
    CHECK_OK(td__endpoint_accept(e[0], 1, 9, TD__CHANNEL_COLLECTIVE, soon(), &fd));
    check_link(fd, fds[1], AF_INET);
    /* After the end of it they are closed. */
    td__endpoint_listen(e[0], 9, TD__CHANNEL_MESSAGES, NULL, NULL);
    CHECK_OK(td__endpoint_connect(e[1], 0, 9, TD__CHANNEL_MESSAGES, soon(), &fds[0]));
    check_closed(fds[0]);
    CHECK_EQ(taken.count, 2);
    /* A group that is forgotten: waiting links are closed, and new ones may arrive. */
    CHECK_OK(td__endpoint_connect(e[1], 0, 10, TD__CHANNEL_MESSAGES, soon(), &fds[0]));
    CHECK_SOON((quiet.fd = fds[0], poll(&quiet, 1, 20) == 0));
    td__endpoint_forget(e[0], 10);
    check_closed(fds[0]);
    td__endpoint_forget(e[0], 9);
    CHECK_OK(td__endpoint_connect(e[1], 0, 9, TD__CHANNEL_MESSAGES, soon(), &fds[0]));
    CHECK_OK(td__endpoint_accept(e[0], 1, 9, TD__CHANNEL_MESSAGES, soon(), &fd));
    check_link(fd, fds[0], AF_INET);
    pair_close(e);
}

TEST(a_rank_that_has_left_cannot_be_reached)
{
    for (int shared = 0; shared < 2; shared++) {
        struct td__endpoint *e[2];
        int fd;
        pair_open(e, shared);
        CHECK_OK(td__endpoint_connect(e[0], 1, 3, TD__CHANNEL_MESSAGES, soon(), &fd));
        td__endpoint_close(e[1]);
        check_closed(fd); /* links that were not taken */
        td_status status = td__endpoint_connect(e[0], 1, 3, TD__CHANNEL_MESSAGES,
                                                td__deadline_in_ms(200), &fd);
        CHECK(status == TD_ERR_TIMEOUT || status == TD_ERR_PEER);
        CHECK_CONTAINS(td_last_error(), "rank 1 (on ");
        td__endpoint_close(e[0]);
    }
}

/* ---- Shared descriptors ---------------------------------------------------------------------------------- */

static int make_shared_fd(const char *text)
{
    int fd = memfd_create("shared", MFD_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, text, strlen(text)), strlen(text));
    return fd;
}

static void check_paper(int fd, const char *text)
{
    char there[64] = "";
    CHECK_EQ(pread(fd, there, sizeof there - 1, 0), strlen(text));
    CHECK_STR(there, text);
    close(fd);
}

struct offer {
    struct td__endpoint *endpoint;
    int fd;
};

static void *offer_later(void *arg)
{
    struct offer *offer = arg;
    td__sleep_ns(100000000);
    CHECK_OK(td__endpoint_offer(offer->endpoint, 22, offer->fd));
    return NULL;
}

TEST(descriptors_before_and_after_they_are_requested)
{
    struct td__endpoint *e[2];
    pthread_t thread;
    int early = make_shared_fd("early"), late = make_shared_fd("late"), fd;
    pair_open(e, true);
    CHECK_OK(td__endpoint_offer(e[0], 21, early));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(td__endpoint_fetch(e[1], 0, 21, soon(), NULL, &fd));
        check_paper(fd, "early");
    }
    struct offer offer = {e[0], late};
    CHECK_EQ(pthread_create(&thread, NULL, offer_later, &offer), 0);
    CHECK_OK(td__endpoint_fetch(e[1], 0, 22, soon(), NULL, &fd));
    check_paper(fd, "late");
    pthread_join(thread, NULL);
    CHECK_OK(td__endpoint_fetch(e[0], 0, 22, soon(), NULL, &fd)); /* even this rank's */
    check_paper(fd, "late");
    td__endpoint_forget(e[0], 21);
    CHECK_FAILS(td__endpoint_fetch_now(e[1], 0, 21, soon(), &fd), TD_ERR_PEER, "share its memory");
    CHECK_FAILS(td__endpoint_fetch(e[1], 0, 21, td__deadline_in_ms(100), NULL, &fd), TD_ERR_TIMEOUT,
                "rank 0");
    close(early);
    close(late);
    pair_close(e);
}

TEST(nothing_is_left_behind)
{
    struct td__endpoint *e[2];
    struct counts before = {0};
    for (int i = 0; i < 20; i++) {
        int fd, shared = make_shared_fd("x");
        pair_open(e, i % 2);
        CHECK_OK(td__endpoint_offer(e[0], 1, shared));
        CHECK_OK(td__endpoint_connect(e[1], 0, 1, TD__CHANNEL_MESSAGES, soon(), &fd));
        close(fd);
        if (i % 2) {
            CHECK_OK(td__endpoint_fetch(e[1], 0, 1, soon(), NULL, &fd));
            close(fd);
        }
        close(shared);
        pair_close(e);
        if (i == 2)
            before = counts_now();
    }
    struct counts after = counts_now();
    CHECK_EQ(after.descriptors, before.descriptors);
    CHECK_SOON(counts_now().threads <= before.threads); /* its entry goes after the join */
}

/* ---- The memory of another process ----------------------------------------------------------- */

RANKS(memory_that_grows, .ranks = 2)
{
    struct td__endpoint *endpoint;
    int rank = td_test_rank();
    CHECK_OK(td__endpoint_open(rank, 2, "127.0.0.1", true, &endpoint));
    meet_by_files(endpoint);
    struct shown *shown = map_file(sizeof *shown);
    void *address, *first = NULL;
    for (int step = 1; step <= 6; step++) {
        size_t size = (size_t)100000 << (2 * step - 2); /* to 100 MB */
        if (rank == 1) {
            struct td__arena *arena;
            size_t offset;
            char *memory = td_alloc(size);
            CHECK(td__arena_resolve(memory, &arena, &offset));
            memory[0] = (char)step;
            memory[size - 1] = (char)(step + 100);
            atomic_store(&shown->offset, offset);
            td_test_barrier();
            td_test_barrier();
            CHECK_EQ(memory[1], step); /* the other one can write, too */
        } else {
            td_test_barrier();
            CHECK_OK(td__endpoint_map(endpoint, 1, shown->offset, size, soon(), &address));
            char *there = address;
            CHECK_EQ(there[0], step);
            CHECK_EQ(there[size - 1], step + 100);
            there[1] = (char)step;
            first = first ? first : address;
            CHECK_EQ(*(char *)first, 1); /* earlier addresses stay good */
            td_test_barrier();
        }
    }
    if (rank == 0) {
        CHECK_FAILS(td__endpoint_map(endpoint, 1, (size_t)1 << 45, 1, soon(), &address),
                    TD_ERR_PEER, "rank 1");
        CHECK_FAILS(td__endpoint_map(endpoint, 1, 0, (size_t)1 << 45, soon(), &address),
                    TD_ERR_PEER, "named memory outside its arena");
        CHECK_FAILS(td__endpoint_map(endpoint, 1, SIZE_MAX, 2, soon(), &address), TD_ERR_PEER,
                    "named memory outside its arena");
    }
    td_test_barrier();
    td__endpoint_close(endpoint);
}
