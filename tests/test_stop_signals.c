/* td_stop_on_signals() and td_should_stop(): one rank's signal stops all of them, in the same call. */
#include "runner.h"

#include <tandem/checkpoint.h>
#include <tandem/group.h>

#include <signal.h>

TEST(one_rank_stops_all, .ranks = 3)
{
    enum { STEPS = 20, SIGNALLED = 7 };
    CHECK_OK(td_stop_on_signals(NULL, 0));
    CHECK_OK(td_init_process_group(NULL));
    for (int step = 0; step < STEPS; step++) {
        bool stop = step % 2; /* always set */
        if (td_test_rank() == 1 && step == SIGNALLED)
            CHECK(!raise(SIGUSR1));
        CHECK_OK(td_should_stop(NULL, &stop));
        CHECK_EQ(stop, step >= SIGNALLED);
    }
    CHECK_OK(td_destroy_process_group());
}

TEST(the_list_chooses_the_signals)
{
    bool stop = true;
    CHECK_OK(td_stop_on_signals((const int[]){SIGUSR2, SIGHUP}, 2));
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_should_stop(NULL, &stop));
    CHECK(!stop);
    CHECK(!raise(SIGHUP));
    CHECK_OK(td_should_stop(NULL, &stop));
    CHECK(stop);
    CHECK_OK(td_destroy_process_group());
}

TEST(wrong_arguments)
{
    CHECK_FAILS(td_stop_on_signals((const int[]){SIGKILL}, 1), TD_ERR_INVALID,
                "td_stop_on_signals: signal 9 cannot be handled");
    CHECK_FAILS(td_stop_on_signals((const int[]){4000}, 1), TD_ERR_INVALID, "signal 4000");
    CHECK_FAILS(td_stop_on_signals(NULL, 2), TD_ERR_INVALID, "a list of 2 signals");
    CHECK_FAILS(td_stop_on_signals((const int[]){SIGUSR1}, -1), TD_ERR_INVALID, "-1");
    CHECK_OK(td_init_process_group(NULL));
    CHECK_FAILS(td_should_stop(NULL, NULL), TD_ERR_INVALID, "the output is NULL");
    CHECK_OK(td_destroy_process_group());
}
