/* Wait events: waiting for another process and waking it. */
#include "endpoint_world.h"
#include "forks.h"
#include "runner.h"

#include "peer/wait_event.h"

#define SLEEP_NS ((int64_t)15000000000)

struct table {
    atomic_int ball;
    struct td__wait_event events[2];
    _Atomic uint32_t sleepers;
};

static void await_ball(struct table *table, int player, int ball, bool oversubscribed)
{
    struct td__waiting waiting;
    td__waiting_begin(&waiting, &table->events[player], oversubscribed, soon());
    waiting.longest_sleep = SLEEP_NS;
    waiting.sleepers = &table->sleepers;
    while (atomic_load(&table->ball) < ball) {
        int64_t before = td__now_ns();
        CHECK(td__waiting_step(&waiting));
        CHECK(td__now_ns() - before < SLEEP_NS - 100000000); /* a ring was lost */
    }
    td__waiting_end(&waiting);
}

static void play(struct table *table, int player)
{
    for (int round = 0; round < 2000; round++) {
        await_ball(table, player, 2 * round + player, round % 2);
        if (round % 200 == 50 + 100 * player)
            td__sleep_ns(3000000); /* long enough for the other process to sleep */
        atomic_fetch_add(&table->ball, 1);
        td__wait_event_signal(&table->events[!player]);
    }
}

static void play_second(void *arg)
{
    play(arg, 1);
}

/* A sleep lasts so long that a ring that is lost shows. */
TEST(wait_events_wake_another_process, .deadline_s = 60)
{
    struct table *table = fork_shared(sizeof *table);
    pid_t pid = fork_start(play_second, table);
    play(table, 0);
    fork_join(pid);
    CHECK_EQ(table->ball, 4000);
    CHECK_EQ(table->sleepers, 0);
    CHECK_EQ(table->events[0].sleeping, 0);
    CHECK_EQ(table->events[1].sleeping, 0);
}

TEST(waiting_ends_at_its_deadline)
{
    for (int oversubscribed = 0; oversubscribed < 2; oversubscribed++) {
        struct table table = {0};
        struct td__waiting waiting;
        int64_t before = td__now_ns();
        int steps = 0;
        td__waiting_begin(&waiting, &table.events[0], oversubscribed, td__deadline_in_ms(100));
        waiting.sleepers = &table.sleepers;
        while (td__waiting_step(&waiting)) {
            waiting.wake_at = td__deadline_in_ms(10);
            steps++;
        }
        td__waiting_end(&waiting);
        int64_t took = td__now_ns() - before;
        CHECK(took >= 99000000);
        CHECK_PROMPT(before);
        CHECK(steps > 5); /* it returned at `wake_at` */
        CHECK_EQ(table.sleepers, 0);
        CHECK_EQ(table.events[0].sleeping, 0);
    }
}
