/* How long a host may be silent; see heartbeat.h. */
#include "os/heartbeat.h"

#include "base/fail.h"
#include "base/number.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { DEFAULT_S = 10, LEAST_S = 1, MOST_S = 3600 };

static atomic_int limit_s = DEFAULT_S;

td_status td__heartbeat_read(void)
{
    const char *text = getenv("TANDEM_HEARTBEAT");
    int seconds = DEFAULT_S;
    if (text && *text && !td__parse_int(text, LEAST_S, MOST_S, &seconds))
        return td_fail(TD_ERR_INVALID,
                       "TANDEM_HEARTBEAT is \"%s\"; it is a number of seconds, %d to %d", text,
                       LEAST_S, MOST_S);
    atomic_store(&limit_s, seconds);
    return TD_OK;
}

int64_t td__heartbeat_ms(void)
{
    return (int64_t)atomic_load_explicit(&limit_s, memory_order_relaxed) * 1000;
}
