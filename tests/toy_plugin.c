/* The toy accelerator as a plug-in: tandem_toy.so. TANDEM_TOY_MEMORY (bytes a device), TANDEM_TOY_DELAY_US (the longest
 * time before each kernel, copy or event) and TANDEM_TOY_ARITHMETIC (the number of a toy_arithmetic) set what a test
 * program sets by calls. */
#include "toy_device.h"

#include <tandem/plugin.h>

#include <errno.h>
#include <limits.h>
#include <stdlib.h>

/* Sets *number from a variable, if it is set. */
static td_status read_number(const char *variable, long long most, long long *number)
{
    const char *text = getenv(variable);
    if (!text || !*text)
        return TD_OK;
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || *end || value < 0 || value > most)
        return td_fail(TD_ERR_INVALID, "%s=%s is not a number from 0 to %lld", variable, text,
                       most);
    *number = value;
    return TD_OK;
}

static td_status init(void)
{
    long long memory = -1, delay_us = -1, arithmetic = TOY_HOST;
    td_status status = read_number("TANDEM_TOY_MEMORY", LLONG_MAX, &memory);
    if (!status)
        status = read_number("TANDEM_TOY_DELAY_US", INT_MAX, &delay_us);
    if (!status)
        status = read_number("TANDEM_TOY_ARITHMETIC", TOY_NO_STRIDES, &arithmetic);
    if (status)
        return status;
    toy_set_arithmetic((enum toy_arithmetic)arithmetic);
    if (memory >= 0)
        toy_set_memory((size_t)memory);
    if (delay_us >= 0)
        toy_set_delay((int)delay_us);
    return toy_register();
}

TD_PLUGIN("toy", "1.0", init)
