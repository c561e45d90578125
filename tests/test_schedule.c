/* Schedules: every algorithm is proven for every group size from 1 to 64 and every root; and the prover finds the
 * errors in schedules that were changed on purpose. */
#include "runner.h"

#include "collective/schedule.h"
#include "collective/simulate.h"
#include "collective/tree.h"

#include <stdio.h>
#include <string.h>

enum { LARGEST = 64 };

static bool has_root(td_op_kind op)
{
    return op == TD_OP_BROADCAST || op == TD_OP_REDUCE || op == TD_OP_SCATTER || op == TD_OP_GATHER;
}

static void prove(td_op_kind op)
{
    char why[300];
    int algorithms = 0;
    for (const struct td__algorithm *at = td__algorithms; at->name; at++) {
        if (at->op != op)
            continue;
        algorithms++;
        for (int32_t size = 1; size <= LARGEST; size++)
            for (int32_t root = 0; root < (has_root(op) ? size : 1); root++)
                if (!td__schedule_check(at, size, root, why, sizeof why))
                    CHECK_STR(why, "");
    }
    CHECK(algorithms > 0);
}

TEST(broadcast_is_right)
{
    prove(TD_OP_BROADCAST);
}
TEST(reduce_is_right)
{
    prove(TD_OP_REDUCE);
}
TEST(all_reduce_is_right)
{
    prove(TD_OP_ALL_REDUCE);
}
TEST(scatter_is_right)
{
    prove(TD_OP_SCATTER);
}
TEST(gather_is_right)
{
    prove(TD_OP_GATHER);
}
TEST(all_gather_is_right)
{
    prove(TD_OP_ALL_GATHER);
}
TEST(reduce_scatter_is_right)
{
    prove(TD_OP_REDUCE_SCATTER);
}
TEST(all_to_all_is_right)
{
    prove(TD_OP_ALL_TO_ALL);
}
TEST(barrier_is_right)
{
    prove(TD_OP_BARRIER);
}

/* ---- Spoilt schedules ------------------------------------------------------------------------ */

static const struct td__algorithm *spoilt_of;
static void (*spoil)(const struct td__plan *plan, struct td__schedule *schedule);

static void build_spoilt(const struct td__plan *plan, struct td__schedule *schedule)
{
    spoilt_of->build(plan, schedule);
    spoil(plan, schedule);
}

static int64_t no_bound(int32_t size, int32_t blocks)
{
    (void)size;
    (void)blocks;
    return INT64_MAX;
}

static void expect_found(td_op_kind op, const char *name, int32_t size, const char *says,
                         void (*how)(const struct td__plan *plan, struct td__schedule *schedule))
{
    char why[300] = "nothing";
    spoilt_of = td__algorithm_find(op, name);
    CHECK(spoilt_of != NULL);
    spoil = how;
    struct td__algorithm spoilt = *spoilt_of;
    spoilt.build = build_spoilt;
    spoilt.sent_bound = no_bound;
    CHECK(!td__schedule_check(&spoilt, size, 0, why, sizeof why));
    CHECK_CONTAINS(why, says);
}

static void drop_last_step(const struct td__plan *plan, struct td__schedule *schedule)
{
    if (plan->rank == 1)
        schedule->count--;
}

static void receive_again(const struct td__plan *plan, struct td__schedule *schedule)
{
    if (plan->rank == 0)
        td__recv(schedule, 1, TD__DATA, 0, 1);
}

static void reduce_own_again(const struct td__plan *plan, struct td__schedule *schedule)
{
    (void)plan;
    td__copy(schedule, TD__SCRATCH, 0, TD__DATA, 0, 1);
    td__reduce(schedule, TD__DATA, 0, TD__SCRATCH, 0, 1);
}

static void read_too_early(const struct td__plan *plan, struct td__schedule *schedule)
{
    (void)plan;
    schedule->scratch_blocks = 1;
    td__copy(schedule, TD__DATA, 0, TD__SCRATCH, 0, 1);
}

static void leave_the_range(const struct td__plan *plan, struct td__schedule *schedule)
{
    (void)plan;
    schedule->steps[0].block = 1000;
}

static void confuse_two_blocks(const struct td__plan *plan, struct td__schedule *schedule)
{
    struct td__step *first = NULL;
    for (size_t i = 0; plan->rank == 0 && i < schedule->count; i++) {
        struct td__step *step = &schedule->steps[i];
        if (step->kind != TD__STEP_RECV)
            continue;
        if (first) {
            int32_t block = first->block;
            first->block = step->block;
            step->block = block;
            return;
        }
        first = step;
    }
}

static void write_twice(const struct td__plan *plan, struct td__schedule *schedule)
{
    for (size_t i = 0; plan->rank == 0 && i < schedule->count; i++)
        if (schedule->steps[i].kind == TD__STEP_RECV)
            schedule->steps[i].block = 1;
}

TEST(the_prover_finds_mistakes)
{
    expect_found(TD_OP_ALL_REDUCE, "ring", 4, "stuck", drop_last_step);
    expect_found(TD_OP_ALL_REDUCE, "ring", 4, "stuck", receive_again);
    expect_found(TD_OP_ALL_REDUCE, "doubling", 4, "a second time", reduce_own_again);
    expect_found(TD_OP_BROADCAST, "tree", 4, "never written", read_too_early);
    expect_found(TD_OP_ALL_GATHER, "ring", 4, "out of range", leave_the_range);
    expect_found(TD_OP_ALL_TO_ALL, "direct", 4, "wrong block", confuse_two_blocks);
    expect_found(TD_OP_GATHER, "direct", 4, "overlap", write_twice);
}

TEST(the_prover_knows_the_order)
{
    char why[300];
    struct td__algorithm ring = *td__algorithm_find(TD_OP_ALL_REDUCE, "ring");
    ring.ordered = true; /* which it is not */
    CHECK(!td__schedule_check(&ring, 4, 0, why, sizeof why));
    CHECK_CONTAINS(why, "another order");
}

static int64_t too_little(int32_t size, int32_t blocks)
{
    return 2 * (int64_t)(blocks - 1) - (size > 1);
}

TEST(the_prover_counts_bytes)
{
    char why[300];
    struct td__algorithm ring = *td__algorithm_find(TD_OP_ALL_REDUCE, "ring");
    ring.sent_bound = too_little;
    CHECK(!td__schedule_check(&ring, 8, 0, why, sizeof why));
    CHECK_CONTAINS(why, "sends 14 blocks");
}

/* ---- The tree -------------------------------------------------------------------------------- */

TEST(tree_of_six)
{
    CHECK_EQ(td__tree_levels(1), 0);
    CHECK_EQ(td__tree_levels(2), 1);
    CHECK_EQ(td__tree_levels(6), 3);
    CHECK_EQ(td__tree_levels(8), 3);
    struct td__tree_node node = td__tree_node(5, 6, 2);
    CHECK_EQ(node.low, 0);
    CHECK_EQ(node.left_size, 4);
    CHECK_EQ(node.right_size, 2);
    CHECK(!node.is_left);
    CHECK_EQ(node.index, 1);
    CHECK_EQ(td__tree_node(4, 6, 1).right_size, 0);
    CHECK_EQ(td__reverse_bits(1, 3), 4);
    CHECK_EQ(td__tree_holder(4, 2, 5), 5);
    CHECK_EQ(td__tree_holder(4, 2, 1), 4);
}

/* ---- Prices ---------------------------------------------------------------------------------- */

static const struct td__network network = {
    .latency = 1e-5, .transfer = 1e-6, .byte = 1e-10, .reduce_byte = 5e-11, .copy_byte = 2e-11};

static struct td__price price_of(td_op_kind op, const char *name, int32_t size, double bytes)
{
    struct td__price price;
    const struct td__algorithm *algorithm = td__algorithm_find(op, name);
    CHECK(algorithm && td__simulate(algorithm, size, bytes, &network, &price));
    return price;
}

TEST(ring_costs_what_it_should)
{
    struct td__price price = price_of(TD_OP_ALL_REDUCE, "ring", 8, 8e6);
    CHECK_EQ(price.rounds, 14);
    CHECK_EQ((int64_t)(price.sent + 0.5), 14000000); /* 2B(n-1)/n */
    CHECK_EQ((int64_t)price.transfers, 14);
    double expected = 14 * (1e-5 + 1e6 * 1e-10) + 7 * 1e6 * 5e-11;
    CHECK(price.seconds > expected * 0.999 && price.seconds < expected * 1.001);
}

TEST(short_messages_want_few_rounds_long_ones_few_bytes)
{
    for (int32_t size = 4; size <= 256; size *= 2) {
        double doubling = price_of(TD_OP_ALL_REDUCE, "doubling", size, 8).seconds;
        CHECK(doubling < price_of(TD_OP_ALL_REDUCE, "ring", size, 8).seconds);
        CHECK(doubling < price_of(TD_OP_ALL_REDUCE, "halving", size, 8).seconds);
        CHECK(price_of(TD_OP_ALL_REDUCE, "halving", size, 1e9).seconds <
              price_of(TD_OP_ALL_REDUCE, "doubling", size, 1e9).seconds);
    }
}

TEST(a_hundred_thousand_ranks_are_priced)
{
    for (const struct td__algorithm *at = td__algorithms; at->name; at++) {
        struct td__price price;
        CHECK(td__simulate(at, 100000, 1e6, &network, &price));
        CHECK(price.seconds > 0 && price.rounds > 0);
    }
    CHECK_EQ(price_of(TD_OP_BARRIER, "dissemination", 100000, 0).rounds, 17);
}

TEST(names)
{
    for (int op = 0; op < TD__COLLECTIVES; op++)
        CHECK(strlen(td_op_kind_name((td_op_kind)op)) > 3);
    CHECK(td__algorithm_find(TD_OP_BARRIER, "ring") == NULL);
}
