/* How long a host may be silent; see heartbeat.h. */
#include "os/heartbeat.h"

#include "base/fail.h"
#include "base/number.h"

#include <stdlib.h>

enum { DEFAULT_S = 10, LEAST_S = 1, MOST_S = 3600 };

static bool read_seconds(const char *text, int *seconds)
{
    return td__parse_int(text, LEAST_S, MOST_S, seconds);
}

td_status td__heartbeat_check(void)
{
    const char *text = getenv("TANDEM_HEARTBEAT");
    int seconds;
    if (!text || !*text || read_seconds(text, &seconds))
        return TD_OK;
    return td__fail(TD_ERR_INVALID,
                    "TANDEM_HEARTBEAT is \"%s\"; it is a number of seconds, %d to %d", text,
                    LEAST_S, MOST_S);
}

int64_t td__heartbeat_ms(void)
{
    const char *text = getenv("TANDEM_HEARTBEAT");
    int seconds = DEFAULT_S;
    if (text && *text && !read_seconds(text, &seconds))
        seconds = DEFAULT_S;
    return (int64_t)seconds * 1000;
}
