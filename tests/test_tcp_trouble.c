/* Failing collectives over sockets: ranks that call different operations, leave, are late, or send what no rank
 * would send. Every rank must fail soon, and name the rank. */
#include "tcp_world.h"

#include "base/fail.h"
#include "runner.h"

#include <string.h>
#include <sys/socket.h>

enum { RANKS_HERE = 5, MANY = 300000 };

#define LENGTH(array) (sizeof(array) / sizeof *(array))

static td_status call(struct seat *seat, struct td__operation operation)
{
    size_t bytes = (operation.call.count * (size_t)seat->size + 1) *
                   td__operation_element(&operation);
    void *input = calloc(1, bytes), *output = calloc(1, bytes);
    operation.call.input = operation.call.kind == TD_OP_BROADCAST ? output : input;
    operation.call.output = output;
    td_status status = td__tcp_comm_run(seat->comm, &operation);
    free(input);
    free(output);
    return status;
}

static td_status barrier(struct seat *seat)
{
    return call(seat, seat_call(seat, TD_OP_BARRIER, 0, TD_F32));
}

static void leave(struct seat *seat)
{
    td__tcp_comm_destroy(seat->comm);
    seat->comm = NULL;
}

/* Opens all links. */
static void meet_all(struct seat *seat)
{
    CHECK_OK(call(seat, seat_call(seat, TD_OP_ALL_TO_ALL, 4096, TD_F32)));
}

/* ---- Different calls ------------------------------------------------------------------------- */

struct difference {
    struct td__operation usual, odd; /* what rank 2 calls, and what all others do */
    const char *says;
};

static struct td__operation numbered(struct seat *seat, struct td__operation operation)
{
    struct td__operation fresh = seat_call(seat, operation.call.kind, operation.call.count,
                                           operation.reduction.dtype);
    fresh.reduction = operation.reduction;
    fresh.call.root = fresh.called_root = operation.call.root;
    return fresh;
}

/* A rank that had nothing to receive may not have noticed; it does in one of the next calls. */
static void differ(struct seat *seat)
{
    const struct difference *difference = seat->arg;
    td_status status = call(seat,
                            numbered(seat, seat->rank == 2 ? difference->odd : difference->usual));
    for (int i = 0; !status && i < 3; i++)
        status = barrier(seat);
    if (status != TD_ERR_MISMATCH)
        FAIL("rank %d: %s: %s", seat->rank, td_status_name(status), td_last_error());
    CHECK_CONTAINS(td_last_error(), difference->says);
    CHECK_CONTAINS(td_last_error(), "rank 2 (thread)");
    CHECK_FAILS(barrier(seat), TD_ERR_MISMATCH, difference->says);
}

static struct td__operation plain(td_op_kind kind, size_t count)
{
    return (struct td__operation){.call.kind = kind, .call.count = count};
}

TEST(different_arguments_are_named)
{
    struct difference count = {plain(TD_OP_ALL_REDUCE, 1024), plain(TD_OP_ALL_REDUCE, 1000),
                               "every rank must pass the same"};
    struct difference many = {plain(TD_OP_ALL_REDUCE, MANY), plain(TD_OP_ALL_REDUCE, MANY + 1),
                              "every rank must pass the same"};
    struct difference dtype = count, op = count, root = count;
    dtype.odd.call.count = 1024;
    dtype.odd.reduction.dtype = TD_I32;
    dtype.says = "1024 i32 (sum)";
    op.odd.call.count = 1024;
    op.odd.reduction.op = TD_MAX;
    op.says = "1024 f32 (max)";
    root.usual = root.odd = plain(TD_OP_BROADCAST, 8);
    root.odd.call.root = 1;
    root.says = "8 f32 and root 1";
    tcp_world_run(RANKS_HERE, NULL, differ, &count);
    tcp_world_run(RANKS_HERE, NULL, differ, &many);
    tcp_world_run(RANKS_HERE, NULL, differ, &dtype);
    tcp_world_run(RANKS_HERE, NULL, differ, &op);
    tcp_world_run(RANKS_HERE, NULL, differ, &root);
}

static void different_kinds(size_t count)
{
    for (int usual = 0; usual < TD__COLLECTIVES; usual++)
        for (int odd = 0; odd < TD__COLLECTIVES; odd++) {
            struct difference difference = {plain(usual, usual == TD_OP_BARRIER ? 0 : count),
                                            plain(odd, odd == TD_OP_BARRIER ? 0 : count),
                                            "every rank must make the same calls"};
            if (usual != odd)
                tcp_world_run(RANKS_HERE, NULL, differ, &difference);
        }
}

TEST(different_operations_are_named, .deadline_s = 90)
{
    different_kinds(3);
}

TEST(different_large_operations_are_named, .deadline_s = 90)
{
    different_kinds(MANY);
}

static void another_algorithm(struct seat *seat)
{
    seat->comm->forced[TD_OP_ALL_REDUCE] = seat->rank == 1 ? "ring" : "halving";
    CHECK_FAILS(call(seat, seat_call(seat, TD_OP_ALL_REDUCE, 1000, TD_F32)), TD_ERR_MISMATCH,
                "uses algorithm ring");
}

TEST(different_algorithms_are_named)
{
    tcp_world_run(4, NULL, another_algorithm, NULL);
}

/* Rank 0 expects more than rank 1 sends. */
static void wrong_counts(struct seat *seat)
{
    struct td__operation operation = seat_call(seat, TD_OP_ALL_TO_ALL, 0, TD_I32);
    size_t two[] = {2, 2, 2}, wrong[] = {2, 3, 2};
    int32_t data[2][8] = {0};
    operation.call.input = data[0];
    operation.call.output = data[1];
    operation.call.input_counts = two;
    operation.call.output_counts = seat->rank == 0 ? wrong : two;
    td_status status = td__tcp_comm_run(seat->comm, &operation);
    if (seat->rank == 0)
        CHECK_CONTAINS(td_last_error(), "rank 1 (thread) sends 8 bytes, but rank 0 (thread) "
                                        "expects 12");
    if (seat->rank == 0 || status)
        CHECK_EQ(status, TD_ERR_MISMATCH);
}

TEST(wrong_uneven_counts_are_named)
{
    tcp_world_run(3, NULL, wrong_counts, NULL);
}

/* ---- Ranks that leave or are late ------------------------------------------------------------ */

static void one_leaves(struct seat *seat)
{
    const struct td__operation *operation = seat->arg;
    meet_all(seat);
    if (seat->rank == 2) {
        leave(seat);
        return;
    }
    td_status status = call(seat, numbered(seat, *operation));
    for (int i = 0; !status && i < 3; i++)
        status = barrier(seat);
    if (status != TD_ERR_PEER)
        FAIL("rank %d: %s: %s", seat->rank, td_status_name(status), td_last_error());
    CHECK_CONTAINS(td_last_error(), "rank 2 (thread) closed its connection");
    CHECK_CONTAINS(td_last_error(), " on group \"test\": ");
}

TEST(a_rank_that_leaves_is_named, .deadline_s = 60)
{
    static const size_t counts[] = {3, MANY};
    for (size_t i = 0; i < LENGTH(counts); i++)
        for (int kind = 0; kind < TD__COLLECTIVES; kind++) {
            struct td__operation operation = plain(kind, kind == TD_OP_BARRIER ? 0 : counts[i]);
            operation.call.root = 1;
            tcp_world_run(RANKS_HERE, NULL, one_leaves, &operation);
        }
    struct td__operation ring = plain(TD_OP_ALL_REDUCE, MANY);
    tcp_world_run(RANKS_HERE, "ring", one_leaves, &ring);
}

/* Sends the beginning of its message and leaves. */
static void half_a_message(struct seat *seat)
{
    struct td__operation operation = seat_call(seat, TD_OP_ALL_REDUCE, MANY, TD_F32);
    meet_all(seat);
    operation.call.sequence = ++seat->sequence;
    if (seat->rank == 1) {
        static char bytes[100000];
        const struct td__algorithm *algorithm = td__algorithm_find(TD_OP_ALL_REDUCE, "halving");
        struct td__call_header header = td__header_of(&operation, MANY,
                                                      (int)(algorithm - td__algorithms), 2);
        header.payload = MANY / 2 * sizeof(float);
        td__header_write(&header, (uint8_t *)bytes);
        CHECK(send(seat->comm->links.at[0].fd, bytes, sizeof bytes, 0) > 0);
        leave(seat);
        return;
    }
    CHECK_FAILS(call(seat, operation), TD_ERR_PEER, "rank 1 (thread) closed its connection");
}

TEST(a_rank_that_leaves_in_the_middle_is_named)
{
    tcp_world_run(2, NULL, half_a_message, NULL);
}

/* Rank 1 is late for every call, linked or not. */
static atomic_int timed_out;

static void one_is_late(struct seat *seat)
{
    struct td__operation operation = plain(*(const int *)seat->arg, 50);
    bool linked = operation.call.kind != TD_OP_BARRIER;
    if (linked)
        meet_all(seat);
    operation = numbered(seat, operation);
    /* Rank 2 waits for rank 0, and would name that if it timed out first. */
    operation.deadline = td__deadline_in_ms(seat->rank ? 5000 : 300);
    int64_t start = td__now_ns();
    if (seat->rank == 1) {
        CHECK_SOON(atomic_load(&timed_out) == 3);
        return;
    }
    td_status status = call(seat, operation);
    atomic_fetch_add(&timed_out, 1);
    CHECK_EQ(status, TD_ERR_TIMEOUT);
    CHECK_PROMPT(start);
    if (seat->rank != 3 || !linked)
        CHECK_CONTAINS(td_last_error(), "waiting for rank ");
    if (seat->rank == 0 && linked)
        CHECK_CONTAINS(td_last_error(), "waiting for rank 1 (thread)");
}

TEST(a_rank_that_is_late_is_named)
{
    static const int kinds[] = {TD_OP_ALL_REDUCE, TD_OP_ALL_GATHER, TD_OP_BARRIER};
    for (size_t i = 0; i < LENGTH(kinds); i++) {
        atomic_store(&timed_out, 0);
        tcp_world_run(4, NULL, one_is_late, &kinds[i]);
    }
}

/* Late, but not too late: no queries or reports of the others are left. */
static void one_is_slow(struct seat *seat)
{
    for (int i = 0; i < 3; i++) {
        if (seat->rank == i)
            td__sleep_ns(700000000);
        CHECK_OK(call(seat, seat_call(seat, TD_OP_GATHER, 50, TD_F32)));
        CHECK_OK(call(seat, seat_call(seat, TD_OP_ALL_REDUCE, MANY, TD_F32)));
        CHECK_OK(call(seat, seat_call(seat, TD_OP_SCATTER, 50, TD_F32)));
        CHECK_OK(barrier(seat));
    }
}

TEST(a_slow_rank_is_waited_for)
{
    tcp_world_run(4, NULL, one_is_slow, NULL);
}

/* ---- Garbage --------------------------------------------------------------------------------- */

/* Rank 1 sends bytes that are not a frame, and returns true. */
static bool sends_garbage(struct seat *seat)
{
    char bytes[200];
    meet_all(seat);
    if (seat->rank != 1)
        return false;
    memset(bytes, *(const int *)seat->arg, sizeof bytes);
    CHECK(send(seat->comm->links.at[0].fd, bytes, sizeof bytes, 0) > 0);
    td__sleep_ns(200000000);
    return true;
}

static void garbage(struct seat *seat)
{
    if (sends_garbage(seat))
        return;
    CHECK_FAILS(call(seat, seat_call(seat, TD_OP_BROADCAST, 8 * MANY, TD_F32)), TD_ERR_MISMATCH,
                "not a frame of a collective");
}

static void garbage_instead(struct seat *seat)
{
    if (sends_garbage(seat))
        return;
    CHECK_FAILS(call(seat, seat_call(seat, TD_OP_ALL_REDUCE, 8, TD_F32)), TD_ERR_MISMATCH,
                "not a frame of a collective");
}

TEST(garbage_is_detected)
{
    static const int bytes[] = {0, 'T', 255};
    for (size_t i = 0; i < LENGTH(bytes); i++) {
        tcp_world_run(2, NULL, garbage, &bytes[i]);
        tcp_world_run(2, NULL, garbage_instead, &bytes[i]);
    }
}

/* ---- Compiled schedules ---------------------------------------------------------------------- */

/* The blocks that `compiled` sends to, or receives from, `peer` in `round` of the schedule. */
static int32_t blocks_in(const struct td__compiled_schedule *compiled, int32_t round, int32_t peer,
                         bool sends)
{
    for (uint32_t i = 0; i < compiled->round_count; i++) {
        const struct td__compiled_round *at = &compiled->rounds[i];
        if (compiled->schedule.steps[at->first_local].round != round)
            continue;
        int32_t blocks = 0;
        for (uint32_t m = sends ? at->first_send : at->first_recv;
             m < (sends ? at->first_recv : at->end); m++)
            for (uint32_t s = 0;
                 compiled->transfers[m].peer == peer && s < compiled->transfers[m].count; s++)
                blocks += 1 + compiled->segments[compiled->transfers[m].first + s].count;
        return blocks;
    }
    return 0;
}

TEST(transfers_match_on_both_sides)
{
    enum { SIZES = 12 };
    for (const struct td__algorithm *at = td__algorithms; at->name; at++)
        for (int32_t size = 1; size <= SIZES; size++) {
            struct td__compiled_schedule *programs[SIZES];
            int32_t rounds = 0;
            for (int32_t rank = 0; rank < size; rank++) {
                struct td__plan plan = {.rank = rank, .size = size, .root = size / 2};
                CHECK(programs[rank] = td__compiled_schedule_create(at, &plan));
                rounds = programs[rank]->schedule.rounds;
            }
            for (int32_t round = 0; round < rounds; round++)
                for (int32_t a = 0; a < size; a++)
                    for (int32_t b = 0; b < size; b++)
                        CHECK_EQ(blocks_in(programs[a], round, b, true),
                                 blocks_in(programs[b], round, a, false));
            for (int32_t rank = 0; rank < size; rank++)
                td__compiled_schedule_destroy(programs[rank]);
        }
}
