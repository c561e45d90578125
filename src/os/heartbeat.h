/* How long a host may be silent before it counts as cut off: TANDEM_HEARTBEAT, in seconds. */
#ifndef TD_OS_HEARTBEAT_H
#define TD_OS_HEARTBEAT_H

#include <tandem/base.h>

/** TD_ERR_INVALID where TANDEM_HEARTBEAT is not a number of seconds from 1 to 3600. */
td_status td__heartbeat_check(void);

/** The limit; 10 s where nothing else is said, or something wrong. */
int64_t td__heartbeat_ms(void);

#endif
