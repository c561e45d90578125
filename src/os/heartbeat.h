/* How long a host may be silent before it counts as cut off: TANDEM_HEARTBEAT, in seconds. */
#ifndef TD_OS_HEARTBEAT_H
#define TD_OS_HEARTBEAT_H

#include <tandem/base.h>

/** Takes the limit from TANDEM_HEARTBEAT, for all that this process does from now on: 10 s where it is not set.
 *  Called when a store or a group is opened, and by nobody else: threads of the library do not read the
 *  environment, which the program may be changing. TD_ERR_INVALID where it is not a number of seconds from 1 to
 *  3600. */
td_status td__heartbeat_read(void);

/** The limit that was taken last; 10 s where none was yet. */
int64_t td__heartbeat_ms(void);

#endif
