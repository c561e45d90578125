/* Messages from inside: both ranks in one process, and what cannot be brought about from outside. */
#include "endpoint_world.h"
#include "group/work.h"
#include "os/tls.h"
#include "p2p/p2p_link.h"
#include "p2p_worlds.h"
#include "runner.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { KEY = 99 };

struct two {
    struct td__endpoint *endpoints[2];
    struct td__p2p *p2p[2];
    void *memory;
};

static td_status give_memory(void *arg, td__deadline deadline, void **memory)
{
    (void)deadline;
    *memory = arg;
    return TD_OK;
}

static void open_rank(struct two *two, int rank)
{
    static const int ranks[2] = {0, 1};
    struct td__p2p_options options = {.endpoint = two->endpoints[rank],
                                      .key = KEY,
                                      .world_ranks = ranks,
                                      .size = 2,
                                      .rank = rank,
                                      .name = "pair",
                                      .shared = give_memory,
                                      .shared_arg = two->memory};
    CHECK_OK(td__p2p_create(&options, &two->p2p[rank]));
}

static void open_two(struct two *two, bool shared)
{
    memset(two, 0, sizeof *two);
    pair_open(two->endpoints, shared);
    two->memory = mmap(NULL, td__p2p_shared_size(2), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(two->memory != MAP_FAILED);
    open_rank(two, 0);
    open_rank(two, 1);
}

static void close_two(struct two *two)
{
    td__p2p_destroy(two->p2p[0]);
    td__p2p_destroy(two->p2p[1]);
    munmap(two->memory, td__p2p_shared_size(2));
    pair_close(two->endpoints);
}

static td_work *post(struct two *two, int rank, td_op_kind kind, void *data, size_t size, int tag,
                     int64_t timeout_ms)
{
    td_call call = {.kind = kind,
                    .input = data,
                    .output = data,
                    .count = size,
                    .dtype = TD_U8,
                    .peer = 1 - rank,
                    .tag = tag,
                    .timeout_ms = timeout_ms};
    td_work *work = td__work_create(NULL, &call);
    CHECK(work);
    td_status status = td__p2p_post(two->p2p[rank], &call, work, &work->complete, NULL);
    if (status)
        td_work_complete(work, status, -1, 0);
    return work;
}

/* How a work ended, by the progress of both ranks in turn. */
static td_status outcome(struct two *two, td_work *work)
{
    for (int left = 20000; left && !atomic_load(&work->complete); left--) {
        td__p2p_progress(two->p2p[0], &work->complete, work->operation.call.peer, 1);
        td__p2p_progress(two->p2p[1], &work->complete, work->operation.call.peer, left % 2);
    }
    CHECK(atomic_load(&work->complete));
    td_status status = td_work_status(work);
    td_work_release(work);
    return status;
}

static td_status send_from(struct two *two, int rank, void *data, size_t size, int tag)
{
    return outcome(two, post(two, rank, TD_OP_SEND, data, size, tag, 20000));
}

static td_status recv_at(struct two *two, int rank, void *data, size_t size, int tag)
{
    return outcome(two, post(two, rank, TD_OP_RECV, data, size, tag, 20000));
}

/* ---- Tags of the library --------------------------------------------------------------------- */

static void check_reserved_tags(bool shared)
{
    struct two two;
    open_two(&two, shared);
    char own = 'x', other = 'y', got = 0;
    CHECK_OK(send_from(&two, 0, &own, 1, -7));
    CHECK_OK(send_from(&two, 0, &other, 1, 7));
    CHECK_OK(recv_at(&two, 1, &got, 1, TD_ANY_TAG));
    CHECK_EQ(got, 'y');
    td_work *any = post(&two, 1, TD_OP_RECV, &got, 1, TD_ANY_TAG, 20000);
    CHECK_OK(recv_at(&two, 1, &got, 1, -7));
    CHECK_EQ(got, 'x');
    CHECK(!atomic_load(&any->complete));
    CHECK_OK(send_from(&two, 0, &other, 1, 0));
    CHECK_OK(outcome(&two, any));
    CHECK_EQ(got, 'y');
    close_two(&two);
}

TEST(reserved_tags)
{
    check_reserved_tags(true);
    check_reserved_tags(false);
}

/* ---- Memory that cannot be reached ----------------------------------------------------------- */

/* Where the system does not let one process read another's memory, it goes through the ring. */
TEST(streamed)
{
    static const size_t sizes[] = {8193, 30000, 100000, 5000000};
    struct two two;
    open_two(&two, true);
    for (int readable = -1; readable <= 1; readable += 2)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            size_t size = sizes[i];
            unsigned char *out = malloc(size), *in = malloc(size);
            two.p2p[1]->peers[0].readable = (signed char)readable;
            fill(out, size, (unsigned)i);
            memset(in, 0, size);
            td_work *send = post(&two, 0, TD_OP_SEND, out, size, 1, 20000);
            CHECK_OK(recv_at(&two, 1, in, size, 1));
            CHECK_OK(outcome(&two, send));
            check_filled(in, size, (unsigned)i);
            free(out);
            free(in);
        }
    close_two(&two);
}

/* ---- In pieces ------------------------------------------------------------------------------- */

enum { PIECE = 1 << 20, STREAM_SIZE = 3 * PIECE + 12345 };

/* What has arrived, as it is reported. */
struct consumer {
    struct td__p2p_stream stream;
    const unsigned char *data;
    unsigned seed;
    atomic_size_t reported;
    int calls;
};

static void consume(struct td__p2p_stream *stream, size_t bytes)
{
    struct consumer *consumer = (struct consumer *)stream;
    CHECK(bytes > consumer->reported);
    if (bytes / PIECE > consumer->reported / PIECE)
        check_filled(consumer->data, bytes, consumer->seed);
    consumer->reported = bytes;
    consumer->calls++;
}

static void advance_both(struct two *two)
{
    td__p2p_progress(two->p2p[0], NULL, 1, 0);
    td__p2p_progress(two->p2p[1], NULL, 0, 0);
}

static td_work *post_stream(struct two *two, int rank, td_op_kind kind, void *data, size_t size,
                            struct td__p2p_stream *stream)
{
    td_call call = {.kind = kind,
                    .input = data,
                    .output = data,
                    .count = size,
                    .dtype = TD_U8,
                    .peer = 1 - rank,
                    .tag = 3,
                    .timeout_ms = 60000};
    td_work *work = td__work_create(NULL, &call);
    CHECK_OK(td__p2p_post(two->p2p[rank], &call, work, &work->complete, stream));
    return work;
}

/* The receiver has the first pieces before the sender has the last ones. The rest is not touched by either side: it is
 * not there yet. */
static void check_stream(struct two *two, bool consumes, bool late)
{
    unsigned char *out = malloc(STREAM_SIZE), *whole = malloc(STREAM_SIZE),
                  *in = calloc(1, STREAM_SIZE);
    struct td__p2p_stream producer = {.ready = PIECE};
    struct consumer consumer = {.stream.arrived = consume, .data = in, .seed = 5};
    struct td__p2p_stream *stream = consumes ? &consumer.stream : NULL;
    fill(whole, STREAM_SIZE, 5);
    memcpy(out, whole, PIECE);
    td_work *recv = late ? NULL : post_stream(two, 1, TD_OP_RECV, in, STREAM_SIZE, stream);
    td_work *send = post_stream(two, 0, TD_OP_SEND, out, STREAM_SIZE, &producer);
    if (late)
        recv = post_stream(two, 1, TD_OP_RECV, in, STREAM_SIZE, stream);
    if (consumes)
        while (consumer.reported < PIECE)
            advance_both(two);
    for (size_t ready = PIECE; ready < STREAM_SIZE;) {
        size_t more = STREAM_SIZE - ready < PIECE ? STREAM_SIZE - ready : PIECE;
        memcpy(out + ready, whole + ready, more);
        CHECK(!atomic_load(&send->complete) && !atomic_load(&recv->complete));
        td__p2p_supply(two->p2p[0], &producer, ready += more);
        while (consumes && ready < STREAM_SIZE && consumer.reported < ready)
            advance_both(two);
    }
    CHECK_OK(outcome(two, recv));
    CHECK_OK(outcome(two, send));
    CHECK(!producer.post && (!consumes || consumer.calls >= 3));
    check_filled(in, STREAM_SIZE, 5);
    free(out);
    free(whole);
    free(in);
}

/* The device of the sender fails after a piece. A later message arrives, unless the link had to be closed. */
static void check_failing_stream(struct two *two, bool closes)
{
    unsigned char *out = calloc(1, STREAM_SIZE), *in = calloc(1, STREAM_SIZE), byte = 7;
    struct td__p2p_stream producer = {.ready = PIECE};
    struct consumer consumer = {.stream.arrived = consume, .data = in, .seed = 5};
    fill(out, STREAM_SIZE, 5);
    td_work *recv = post_stream(two, 1, TD_OP_RECV, in, STREAM_SIZE, &consumer.stream);
    td_work *send = post_stream(two, 0, TD_OP_SEND, out, STREAM_SIZE, &producer);
    while (consumer.reported < PIECE)
        advance_both(two);
    td__p2p_fail_stream(two->p2p[0], &producer, td_fail(TD_ERR_SYSTEM, "the device has failed"));
    CHECK(!producer.post);
    td__p2p_supply(two->p2p[0], &producer, STREAM_SIZE); /* as its thread may, too late */
    CHECK_FAILS(outcome(two, send), closes ? TD_ERR_PEER : TD_ERR_SYSTEM, "device");
    CHECK_FAILS(outcome(two, recv), TD_ERR_PEER, closes ? "rank 0" : "the sender cancelled");
    if (!closes) {
        CHECK_OK(send_from(two, 0, &byte, 1, 3));
        CHECK_OK(recv_at(two, 1, in, 1, 3));
        CHECK_EQ(in[0], 7);
    }
    free(out);
    free(in);
}

static void check_streams(bool shared, int readable)
{
    struct two two;
    open_two(&two, shared);
    for (int i = 0; i < 4; i++) {
        two.p2p[1]->peers[0].readable = (signed char)readable;
        check_stream(&two, i % 2, i / 2);
    }
    check_failing_stream(&two, !shared);
    close_two(&two);
}

TEST(in_pieces)
{
    check_streams(true, 1);
}

TEST(in_pieces_through_the_ring)
{
    check_streams(true, -1);
}

TEST(in_pieces_over_a_link)
{
    check_streams(false, 0);
}

/* ---- Without a work -------------------------------------------------------------------------- */

struct side {
    struct two *two;
    int rank;
};

static td_status run(const struct side *side, td_op_kind kind, void *data, size_t size, int tag,
                     size_t *received)
{
    td_call call = {.kind = kind,
                    .input = data,
                    .output = data,
                    .count = size,
                    .dtype = TD_U8,
                    .peer = 1 - side->rank,
                    .tag = tag,
                    .timeout_ms = tag == 9 ? 100 : 20000};
    int source = -1;
    td_status status = td__p2p_run(side->two->p2p[side->rank], &call, &source, received);
    CHECK(status || kind == TD_OP_SEND || source == 1 - side->rank);
    return status;
}

static void *ping_pong(void *arg)
{
    const struct side *side = arg;
    static const size_t sizes[] = {0, 1, 4096, 8192, 8193, 70000, 1000000};
    unsigned char *out = malloc(1000000), *in = malloc(1000000);
    for (int i = 0; i < 70; i++) {
        size_t size = sizes[i % 7], received = 0;
        fill(out, size, (unsigned)side->rank);
        if (side->rank)
            CHECK_OK(run(side, TD_OP_SEND, out, size, i, NULL));
        CHECK_OK(run(side, TD_OP_RECV, in, 1000000, i, &received));
        CHECK_EQ(received, size);
        check_filled(in, size, (unsigned)(1 - side->rank));
        if (!side->rank)
            CHECK_OK(run(side, TD_OP_SEND, out, size, i, NULL));
    }
    if (side->rank)
        CHECK_OK(run(side, TD_OP_SEND, out, 100000, 200, NULL));
    else
        CHECK_FAILS(run(side, TD_OP_RECV, in, 10, 200, NULL), TD_ERR_MISMATCH, "100000 bytes");
    CHECK_FAILS(run(side, TD_OP_RECV, in, 10, 9, NULL), TD_ERR_TIMEOUT, "not done within 100 ms");
    free(out);
    free(in);
    return NULL;
}

static void check_run(bool shared)
{
    struct two two;
    pthread_t thread;
    open_two(&two, shared);
    CHECK_EQ(pthread_create(&thread, NULL, ping_pong, &(struct side){&two, 1}), 0);
    ping_pong(&(struct side){&two, 0});
    CHECK_EQ(pthread_join(thread, NULL), 0);
    close_two(&two);
}

TEST(run_shared)
{
    check_run(true);
}

TEST(run_over_links)
{
    check_run(false);
}

/* ---- Giving up ------------------------------------------------------------------------------- */

/* A large send that was given up leaves nothing behind, whatever its way was to be. */
static void check_given_up(bool shared)
{
    enum { SIZE = 100000, COUNT = 200 }; /* more than there are descriptors */
    struct two two;
    open_two(&two, shared);
    char *data = malloc(SIZE), *in = malloc(SIZE), got = 0;
    td_work *works[COUNT];
    CHECK_OK(send_from(&two, 0, data, 1, 3));
    CHECK_OK(recv_at(&two, 1, &got, 1, 3));
    for (int i = 0; i < COUNT; i++)
        works[i] = post(&two, 0, TD_OP_SEND, data, SIZE, 3, 30);
    for (int i = 0; i < COUNT; i++)
        CHECK_FAILS(outcome(&two, works[i]), TD_ERR_TIMEOUT, "send of 100000 bytes to rank 1");
    free(data);
    data = calloc(1, SIZE);
    data[0] = 'z';
    for (int i = 0; i < 10; i++) /* it learns that some were taken back */
        td__p2p_progress(two.p2p[1], NULL, TD_ANY_SOURCE, 2);
    CHECK_OK(send_from(&two, 0, data, 1, 3));
    CHECK_OK(recv_at(&two, 1, &got, 1, 3));
    CHECK_EQ(got, 'z');
    for (int i = 0; i < COUNT; i++) {
        works[i] = post(&two, 0, TD_OP_SEND, data, SIZE, 3, 20000);
        CHECK_OK(recv_at(&two, 1, in, SIZE, 3));
        CHECK_OK(outcome(&two, works[i]));
        CHECK_MEM(in, data, SIZE);
    }
    CHECK_FAILS(outcome(&two, post(&two, 1, TD_OP_RECV, in, SIZE, 3, 30)), TD_ERR_TIMEOUT,
                "no such message has arrived");
    free(data);
    free(in);
    close_two(&two);
}

TEST(given_up_shared)
{
    check_given_up(true);
}

TEST(given_up_over_links)
{
    check_given_up(false);
}

/* ---- Nonsense on a link ---------------------------------------------------------------------- */

struct nonsense {
    enum td__frame_kind kind;
    uint64_t size, id;
    uint8_t flip; /* of the first byte */
    const char *exit_reason;
};

static void check_nonsense(const struct nonsense *nonsense)
{
    struct two two = {0};
    pair_open(two.endpoints, false);
    open_rank(&two, 0);
    two.p2p[1] = two.p2p[0];
    char got = 0, good[TD__WIRE_HEADER + 1], bad[TD__WIRE_HEADER];
    int fd;
    CHECK_OK(td__endpoint_connect(two.endpoints[1], 0, KEY, TD__CHANNEL_MESSAGES, soon(), &fd));
    td__wire_header((uint8_t *)good, TD__FRAME_EAGER, 5, 1, 0);
    good[TD__WIRE_HEADER] = 'g';
    td__wire_header((uint8_t *)bad, nonsense->kind, 5, nonsense->size, nonsense->id);
    bad[3] ^= (char)nonsense->flip;
    CHECK_EQ(td__sock_send(fd, good, sizeof good, 0), sizeof good);
    CHECK_EQ(td__sock_send(fd, bad, sizeof bad, 0), sizeof bad);
    CHECK_OK(recv_at(&two, 0, &got, 1, 5));
    CHECK_EQ(got, 'g');
    td_work *work = post(&two, 0, TD_OP_RECV, &got, 1, 5, 20000);
    if (nonsense->kind == TD__FRAME_BYE || nonsense->kind == TD__FRAME_NONE)
        shutdown(fd, SHUT_WR);
    CHECK_FAILS(outcome(&two, work), TD_ERR_PEER, nonsense->exit_reason);
    CHECK_CONTAINS(td_last_error(), "rank 1 (on ");
    td_call later = {.kind = TD_OP_SEND, .dtype = TD_U8, .peer = 1, .timeout_ms = 1000};
    CHECK_FAILS(td__p2p_post(two.p2p[0], &later, NULL, NULL, NULL), TD_ERR_PEER,
                nonsense->exit_reason);
    td__sock_close(fd);
    td__p2p_destroy(two.p2p[0]);
    pair_close(two.endpoints);
}

TEST(nonsense_on_a_link, .deadline_s = 40)
{
    static const struct nonsense all[] = {
        {TD__FRAME_EAGER, 1, 0, 1, "not valid"},
        {TD__FRAME_EAGER, TD__WIRE_EAGER + 1, 0, 0, "not valid"},
        {TD__FRAME_EAGER, UINT64_MAX, 0, 0, "not valid"},
        {TD__FRAME_NONE, 0, 0, 0, "not valid"},
        {TD__FRAME_LARGE, 1, 1, 0, "not valid"},
        {TD__FRAME_WRAP, 0, 0, 0, "not valid"},
        {TD__FRAME_GO, 0, 1, 0, "not valid"},
        {TD__FRAME_DROP, 0, 1, 0, "not valid"},
        {TD__FRAME_DATA, 1, 0, 0, "not valid"},
        {TD__FRAME_REQUEST, 100000, 0, 0, "not valid"},
        {TD__FRAME_KINDS, 0, 1, 0, "not valid"},
        {TD__FRAME_BYE, 0, 0, 0, "has left the group"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        check_nonsense(&all[i]);
}
