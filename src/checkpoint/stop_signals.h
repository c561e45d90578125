/* Signals that ask training to end, for calls that agree on them with the other ranks by themselves. */
#ifndef TD_CHECKPOINT_STOP_SIGNALS_H
#define TD_CHECKPOINT_STOP_SIGNALS_H

#include <stdbool.h>

/** Whether this process has got one of the signals of td_stop_on_signals(), or knows of another rank's. */
bool td__stop_signal_came(void);

#endif
