/* Deaths while a group grows: the survivors get an error, and none waits for the timeout. */
#include "forks.h"
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "store/store_ops.h"

#include <tandem/group.h>

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 3, LOST = 2, TIMEOUT_MS = 120000, SOON_S = 20 };

struct shared {
    atomic_int met;      /* ranks of the first world */
    atomic_int growing;  /* members that are in td_group_grow(), or about to be */
    atomic_bool sending; /* rank 0 is about to send the list of ranks to the new one */
};

struct round {
    struct shared *shared;
    char path[400];
    int rank;
    bool newcomer;
    bool
        stops_before_set; /* the first member stops when it is about to write the outcome to the store */
    const struct way *way;
};

static struct shared *flags; /* the store below sets a flag here */
static const struct td__store_ops *file_ops;

static td_status set_or_stop(td_store *store, const struct td__span *keys,
                             const struct td__span *values, size_t count, td__deadline deadline)
{
    static const char card[] = "card/world/2/";
    for (size_t i = 0; i < count; i++)
        if (memmem(keys[i].data, keys[i].size, card, sizeof card - 1)) {
            atomic_store(&flags->sending, true);
            for (;;)
                pause();
        }
    return file_ops->set(store, keys, values, count, deadline);
}

static td_store *open_store(const struct round *round)
{
    static struct td__store_ops ops;
    td_store *store;
    CHECK_OK(td_file_store_open(round->path, &store));
    if (round->stops_before_set && round->rank == 0) {
        flags = round->shared;
        file_ops = store->ops;
        ops = *file_ops;
        ops.set = set_or_stop;
        store->ops = &ops;
    }
    return store;
}

static td_status join(const struct round *round)
{
    td_init_options options = {.store = open_store(round),
                               .world_size = RANKS,
                               .rank = round->rank,
                               .timeout_ms = TIMEOUT_MS};
    if (round->way->transport)
        setenv("TANDEM_TRANSPORT", round->way->transport, 1);
    return td_init_process_group(&options);
}

static td_status sum(td_group *group)
{
    float x = 1;
    return td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, group, NULL);
}

/* Another member is killed somewhere in it. Where this one has a new group all the same, it is of no use: the new
 * rank cannot have the list of the others, or gets the error that one has died. */
static void grow_and_fail(const struct round *round)
{
    td_group *rest, *grown;
    float x;
    while (sum(NULL) == TD_OK)
        ;
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    CHECK_OK(sum(rest));
    atomic_fetch_add(&round->shared->growing, 1);
    int64_t before = td__now_ns();
    td_status status = td_group_grow(rest, NULL, &grown);
    if (!status)
        status = td_group_recv(&x, 1, TD_F32, LOST, 0, grown, NULL);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK(strstr(td_last_error(), "rank "));
    CHECK(td__now_ns() - before < SOON_S * 1000000000ll * td_test_slowness());
}

static void be_rank(void *arg)
{
    const struct round *round = arg;
    td_status status = join(round);
    if (round->newcomer) { /* its world may fail at once, or later */
        while (!status)
            status = sum(NULL);
        CHECK_EQ(status, TD_ERR_PEER);
        return;
    }
    CHECK_OK(status);
    CHECK_OK(sum(NULL));
    atomic_fetch_add(&round->shared->met, 1);
    if (round->rank == LOST)
        for (;;)
            pause();
    grow_and_fail(round);
}

/* Three ranks, the last of which has died; the others let its replacement rejoin, if there is one. */
static void begin(struct round *round, const struct way *way, int number, pid_t pids[RANKS])
{
    round->shared = fork_shared(sizeof *round->shared);
    round->way = way;
    snprintf(round->path, sizeof round->path, "%s/store%d", td_test_temp_dir(), number);
    for (round->rank = 0; round->rank < RANKS; round->rank++)
        pids[round->rank] = fork_start(be_rank, round);
    CHECK_SOON(atomic_load(&round->shared->met) == RANKS);
    fork_kill(pids[LOST], SIGKILL);
}

/* After so many nanoseconds; a negative number: when it is about to send the list to the new rank. */
static void kill_the_first(const struct way *way, int number, int64_t after_ns)
{
    struct round round = {.stops_before_set = after_ns < 0};
    pid_t pids[RANKS];
    begin(&round, way, number, pids);
    round.rank = LOST;
    round.newcomer = true;
    pid_t newcomer = fork_start(be_rank, &round);
    CHECK_SOON(atomic_load(&round.shared->growing) == RANKS - 1);
    if (after_ns < 0)
        CHECK_SOON(atomic_load(&round.shared->sending));
    else
        td__sleep_ns(after_ns);
    fork_kill(pids[0], SIGKILL);
    fork_join(pids[1]);
    fork_kill(newcomer, SIGKILL); /* which may wait for the next attempt */
}

static void kill_in_each_phase(const struct way *way)
{
    setenv("TANDEM_SECRET", "a secret of this test only", 1);
    kill_the_first(way, 0, -1);
    for (int i = 1; i < 6; i++)
        kill_the_first(way, i, i * 500000);
}

/* Rank 0 waits for new ranks in the store, where no report reaches it. */
static void kill_another(const struct way *way)
{
    struct round round = {0};
    pid_t pids[RANKS];
    setenv("TANDEM_SECRET", "a secret of this test only", 1);
    begin(&round, way, 0, pids);
    CHECK_SOON(atomic_load(&round.shared->growing) == RANKS - 1);
    td__sleep_ns(100000000);
    fork_kill(pids[1], SIGKILL);
    fork_join(pids[0]);
}

TEST(death_of_the_first_while_growing, .deadline_s = 240)
{
    kill_in_each_phase(&shm);
}

TEST(death_of_the_first_while_growing_tcp, .deadline_s = 240)
{
    kill_in_each_phase(&tcp);
}

TEST(death_of_another_while_growing, .deadline_s = 240)
{
    kill_another(&shm);
}

TEST(death_of_another_while_growing_tcp, .deadline_s = 240)
{
    kill_another(&tcp);
}
