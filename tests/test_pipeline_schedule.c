/* Schedules of pipelines: every one is proven for 1 to 16 ranks, 1 to 32 micro-batches and 1 to 4 chunks; the prover
 * finds the errors in lists that were changed on purpose; the bubble is that of the formula; and small ones are drawn. */
#include "runner.h"

#include "parallel/pipeline_schedule.h"

#include <stdio.h>
#include <string.h>

enum { RANKS_MAX = 16, MICRO_BATCHES_MAX = 32, CHUNKS_MAX = 4 };

static const td_pipeline_schedule kinds[] = {TD_PIPELINE_GPIPE, TD_PIPELINE_1F1B,
                                             TD_PIPELINE_INTERLEAVED};

static void for_all_plans(td_pipeline_schedule kind,
                          void (*fn)(const struct td__pipeline_plan *plan))
{
    int chunks_max = kind == TD_PIPELINE_INTERLEAVED ? CHUNKS_MAX : 1;
    for (int p = 1; p <= RANKS_MAX; p++)
        for (int v = 1; v <= chunks_max; v++)
            for (int m = 1; m <= MICRO_BATCHES_MAX; m++)
                fn(&(struct td__pipeline_plan){
                    .kind = kind, .ranks = p, .chunks = v, .micro_batches = m});
}

/* ---- Proofs ------------------------------------------------------------------------------------ */

static void prove(const struct td__pipeline_plan *plan)
{
    for (int forward_only = 0; forward_only < 2; forward_only++) {
        struct td__pipeline_plan now = *plan;
        now.forward_only = forward_only;
        struct td__actions *ranks = td__actions_build_all(&now);
        CHECK(ranks != NULL);
        char why[300] = "";
        if (!td__pipeline_check(&now, ranks, why, sizeof why))
            CHECK_STR(why, "");
        td__actions_free_all(ranks, now.ranks);
    }
}

TEST(gpipe_is_right)
{
    for_all_plans(TD_PIPELINE_GPIPE, prove);
}
TEST(one_forward_one_backward_is_right)
{
    for_all_plans(TD_PIPELINE_1F1B, prove);
}
static void prove_ahead(const struct td__pipeline_plan *plan)
{
    struct td__pipeline_plan now = *plan;
    for (now.ahead = 1; now.ahead <= 4; now.ahead += 3)
        prove(&now);
}
TEST(one_forward_one_backward_ahead_is_right)
{
    for_all_plans(TD_PIPELINE_1F1B, prove_ahead);
}
TEST(interleaved_is_right)
{
    for_all_plans(TD_PIPELINE_INTERLEAVED, prove);
}

/* What the schedules promise, in numbers that do not come from the code. */
TEST(stored_micro_batches_are_bounded)
{
    for (int p = 1; p <= RANKS_MAX; p++)
        for (int m = 1; m <= MICRO_BATCHES_MAX; m++)
            for (int r = 0; r < p; r++) {
                struct td__pipeline_plan plan = {
                    .kind = TD_PIPELINE_GPIPE, .ranks = p, .chunks = 1, .micro_batches = m};
                CHECK_EQ(td__pipeline_stored_bound(&plan, r), m);
                plan.kind = TD_PIPELINE_1F1B;
                CHECK_EQ(td__pipeline_stored_bound(&plan, r), p - r < m ? p - r : m);
                plan.ahead = 3;
                int more = p - r - 1 < 3 ? 2 * (p - r) - 1 : p - r + 3;
                CHECK_EQ(td__pipeline_stored_bound(&plan, r), more < m ? more : m);
                plan.ahead = 0;
                plan.kind = TD_PIPELINE_INTERLEAVED;
                plan.chunks = 3;
                int megatron = 2 * (p - r - 1) + 2 * p + 1;
                CHECK_EQ(td__pipeline_stored_bound(&plan, r), megatron < 3 * m ? megatron : 3 * m);
            }
}

/* ---- Spoilt lists ------------------------------------------------------------------------------ */

static int find(const struct td__actions *actions, enum td__action_kind kind, int micro_batch)
{
    for (int i = 0; i < actions->count; i++)
        if (actions->list[i].kind == kind && actions->list[i].micro_batch == micro_batch)
            return i;
    FAIL("no such action");
}

static void move_to(struct td__actions *actions, int from, int to)
{
    struct td__action moved = actions->list[from];
    memmove(&actions->list[from], &actions->list[from + 1],
            (size_t)(actions->count - from - 1) * sizeof moved);
    memmove(&actions->list[to + 1], &actions->list[to],
            (size_t)(actions->count - 1 - to) * sizeof moved);
    actions->list[to] = moved;
}

static void expect_found(const char *says, void (*spoil)(struct td__actions *ranks))
{
    struct td__pipeline_plan plan = {
        .kind = TD_PIPELINE_1F1B, .ranks = 3, .chunks = 1, .micro_batches = 5};
    struct td__actions *ranks = td__actions_build_all(&plan);
    CHECK(ranks != NULL);
    char why[300] = "nothing";
    CHECK(td__pipeline_check(&plan, ranks, why, sizeof why));
    spoil(ranks);
    CHECK(!td__pipeline_check(&plan, ranks, why, sizeof why));
    CHECK_CONTAINS(why, says);
    td__actions_free_all(ranks, plan.ranks);
}

static void drop_last(struct td__actions *ranks)
{
    ranks[1].count--;
}
static void skip_a_pass(struct td__actions *ranks)
{
    move_to(&ranks[0], find(&ranks[0], TD__BACKWARD, 4), ranks[0].count - 1);
    ranks[0].count--;
}
static void run_before_receiving(struct td__actions *ranks)
{
    move_to(&ranks[1], find(&ranks[1], TD__FORWARD, 2), find(&ranks[1], TD__RECV_FORWARD, 2));
}
static void send_too_early(struct td__actions *ranks)
{
    move_to(&ranks[0], find(&ranks[0], TD__SEND_FORWARD, 3), find(&ranks[0], TD__FORWARD, 3));
}
static void send_another(struct td__actions *ranks)
{
    ranks[0].list[find(&ranks[0], TD__SEND_FORWARD, 1)].micro_batch = 0;
}
static void receive_gradient_first(struct td__actions *ranks)
{
    move_to(&ranks[0], find(&ranks[0], TD__RECV_BACKWARD, 0), 0);
}
static void store_too_much(struct td__actions *ranks)
{
    move_to(&ranks[2], find(&ranks[2], TD__FORWARD, 1), find(&ranks[2], TD__BACKWARD, 0));
    move_to(&ranks[2], find(&ranks[2], TD__RECV_FORWARD, 1), find(&ranks[2], TD__FORWARD, 1));
}
static void backward_first(struct td__actions *ranks)
{
    move_to(&ranks[2], find(&ranks[2], TD__BACKWARD, 2), find(&ranks[2], TD__FORWARD, 2));
}
static void take_another_stage(struct td__actions *ranks)
{
    ranks[2].list[find(&ranks[2], TD__BACKWARD, 2)].stage = 0;
}
static void swap_two(struct td__actions *ranks)
{
    int a = find(&ranks[0], TD__FORWARD, 0), b = find(&ranks[0], TD__FORWARD, 1);
    ranks[0].list[a].micro_batch = 1;
    ranks[0].list[b].micro_batch = 0;
}

TEST(the_prover_finds_mistakes)
{
    expect_found("waits for ever", drop_last);
    expect_found("ran 5 forward and 4 backward passes", skip_a_pass);
    expect_found("without its input", run_before_receiving);
    expect_found("before its pass", send_too_early);
    expect_found("sends micro-batch 0 to stage 1, rank 1 expects 1", send_another);
    expect_found("waits for ever", receive_gradient_first);
    expect_found("stores 2 micro-batches, more than 1", store_too_much);
    expect_found("without its forward", backward_first);
    expect_found("out of range", take_another_stage);
    expect_found("out of order", swap_two);
}

/* ---- Times ------------------------------------------------------------------------------------- */

/* total (m + (p - 1) / v) of the times of a whole rank's passes, in units of one chunk's. */
static void check_bubble(const struct td__pipeline_plan *plan)
{
    struct td__actions *ranks = td__actions_build_all(plan);
    struct td__timeline timeline;
    CHECK(ranks && td__timeline_make(plan, ranks, 10, 23, &timeline));
    int64_t ideal = (int64_t)(plan->chunks * plan->micro_batches + plan->ranks - 1) * 33;
    CHECK_EQ(timeline.busy, (int64_t)plan->ranks * plan->chunks * plan->micro_batches * 33);
    if (plan->micro_batches % plan->ranks == 0 || plan->chunks == 1) {
        CHECK_EQ(timeline.total, ideal);
        double bubble = 1 - (double)timeline.busy / (double)(timeline.total * plan->ranks);
        CHECK(bubble - td__pipeline_theory(plan) < 1e-12 &&
              td__pipeline_theory(plan) - bubble < 1e-12);
    } else {
        CHECK(timeline.total >= ideal);
    }
    td__timeline_free(&timeline);
    td__actions_free_all(ranks, plan->ranks);
}

/* The passes ahead fit into the time in which a rank waits for its first gradient. */
static void check_bubble_ahead(const struct td__pipeline_plan *plan)
{
    struct td__pipeline_plan now = *plan;
    now.ahead = plan->ranks;
    check_bubble(&now);
}

TEST(bubbles_are_those_of_theory)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for_all_plans(kinds[i], check_bubble);
    for_all_plans(TD_PIPELINE_1F1B, check_bubble_ahead);
}

/* ---- Measured passes --------------------------------------------------------------------------- */

enum { PASSES = 2 * 2 * 4 };

/* The passes of 2 ranks and 4 micro-batches, each as long as its entry of a list; those of rank 0 come first. */
static int64_t needed(int ahead, const int64_t forward[2][4], const int64_t backward[2][4])
{
    struct td__pipeline_plan plan = {
        .kind = TD_PIPELINE_1F1B, .ranks = 2, .chunks = 1, .micro_batches = 4, .ahead = ahead};
    td_pipeline_pass passes[PASSES];
    for (int i = 0; i < PASSES; i++) {
        int rank = i / 8, micro_batch = i % 4;
        bool is_backward = i / 4 % 2;
        passes[i] = (td_pipeline_pass){
            .rank = rank,
            .stage = rank,
            .micro_batch = micro_batch,
            .backward = is_backward,
            .start_ns = 1000,
            .end_ns = 1000 + (is_backward ? backward : forward)[rank][micro_batch]};
    }
    struct td__actions *ranks = td__actions_build_all(&plan);
    struct td__timeline timeline;
    CHECK(ranks && td__timeline_measured(&plan, ranks, passes, PASSES, &timeline));
    int64_t total = timeline.total;
    td__timeline_free(&timeline);
    td__actions_free_all(ranks, 2);
    return total;
}

/* rank 0  F0 F1 .  B0 F2 B1 F3 B2 .  B3      F of 1, B of 2: 5 times 3, if all passes are equal
 * rank 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .
 *
 * Of two passes that run at the same time the longer one counts; ahead of the order, only those of rank 1 do. */
TEST(unequal_passes_make_ranks_wait)
{
    const int64_t equal_f[2][4] = {{1, 1, 1, 1}, {1, 1, 1, 1}};
    const int64_t equal_b[2][4] = {{2, 2, 2, 2}, {2, 2, 2, 2}};
    CHECK_EQ(needed(0, equal_f, equal_b), 15);
    CHECK_EQ(needed(1, equal_f, equal_b), 15);
    const int64_t late_f[2][4] = {{1, 1, 2, 1}, {1, 1, 1, 1}};
    const int64_t late_b[2][4] = {{2, 2, 2, 2}, {2, 3, 2, 2}};
    CHECK_EQ(needed(0, late_f, equal_b), 16);
    CHECK_EQ(needed(1, late_f, equal_b), 15);
    CHECK_EQ(needed(0, equal_f, late_b), 16);
    CHECK_EQ(needed(0, late_f, late_b), 16);
}

/* ---- Drawings ---------------------------------------------------------------------------------- */

static void check_text(td_pipeline_schedule kind, int ranks, int chunks, int micro_batches,
                       const char *expected)
{
    td_bytes text = td_pipeline_text(kind, ranks, chunks, micro_batches);
    CHECK_STR(text.data, expected);
    td_bytes_free(&text);
}

TEST(drawings)
{
    check_text(TD_PIPELINE_GPIPE, 3, 1, 4,
               "rank 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3\n"
               "rank 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .\n"
               "rank 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .\n");
    check_text(TD_PIPELINE_1F1B, 3, 1, 4,
               "rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3\n"
               "rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .\n"
               "rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .\n");
    check_text(TD_PIPELINE_DEFAULT, 2, 1, 3,
               "rank 0  F0 F1 .  B0 F2 B1 .  B2\n"
               "rank 1  .  F0 B0 F1 B1 F2 B2 .\n");
    check_text(TD_PIPELINE_DEFAULT, 1, 2, 2, "rank 0  F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0\n");
    check_text(TD_PIPELINE_INTERLEAVED, 2, 2, 4,
               "rank 0  F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 .    B2.1 .    "
               "B3.1 B2.0 B3.0\n"
               "rank 1  .    F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 "
               "B2.0 B3.0 .\n");
}

TEST(sizes_without_a_schedule)
{
    CHECK(!td_pipeline_text(TD_PIPELINE_GPIPE, 2, 2, 4).data);
    CHECK_CONTAINS(td_last_error(), "takes one module a rank, not 2");
    CHECK(!td_pipeline_text(TD_PIPELINE_1F1B, 0, 1, 4).data);
    CHECK_CONTAINS(td_last_error(), "at least 1");
    CHECK(!td_pipeline_text((td_pipeline_schedule)9, 2, 1, 4).data);
    CHECK_CONTAINS(td_last_error(), "9 is not a schedule");
    CHECK(!td_pipeline_text(TD_PIPELINE_1F1B, 2, 1, 1 << 30).data);
    CHECK_CONTAINS(td_last_error(), "at most");
}
