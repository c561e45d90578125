/* Signals that ask training to save and end. A handler may only set a flag; the ranks agree on the flags, since each gets
 * its signal at another moment, and all must take the same step last. */
#include "checkpoint/stop_signals.h"

#include "base/fail.h"

#include <tandem/checkpoint.h>

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>

static atomic_int asked; /* lock-free, so that a handler may set it */

static void on_stop_signal(int signal)
{
    (void)signal;
    atomic_store_explicit(&asked, 1, memory_order_relaxed);
}

td_status td_stop_on_signals(const int *signals, int count)
{
    static const int usual[] = {SIGUSR1, SIGTERM};
    if (count < 0 || (count && !signals))
        return td_fail(TD_ERR_INVALID, "td_stop_on_signals: a list of %d signals at %p", count,
                       (const void *)signals);
    if (!signals) {
        signals = usual;
        count = sizeof usual / sizeof *usual;
    }
    /* Calls of the system that wait go on afterwards: the library's waits are not disturbed. */
    struct sigaction action = {.sa_handler = on_stop_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < count; i++)
        if (sigaction(signals[i], &action, NULL))
            return td_fail(TD_ERR_INVALID, "td_stop_on_signals: signal %d cannot be handled: %s",
                           signals[i], td__errno_text(errno));
    return TD_OK;
}

td_status td_should_stop(td_group *group, bool *stop)
{
    int32_t any = 0, mine = atomic_load_explicit(&asked, memory_order_relaxed);
    if (!stop)
        return td_fail(TD_ERR_INVALID, "td_should_stop: the output is NULL");
    TD_TRY(td_group_all_reduce(&any, &mine, 1, TD_I32, TD_MAX, group, NULL));
    if (any)
        atomic_store_explicit(&asked, 1, memory_order_relaxed); /* true from now on */
    *stop = any != 0;
    return TD_OK;
}

bool td__stop_signal_came(void)
{
    return atomic_load_explicit(&asked, memory_order_relaxed) != 0;
}
