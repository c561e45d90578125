/* Parsing numbers; see number.h. */
#include "base/number.h"

#include <string.h>

bool td__parse_i64(const char *text, size_t size, int64_t *value)
{
    bool negative = size && *text == '-';
    size_t i = negative;
    if (i == size)
        return false;
    int64_t sum = 0; /* negative: INT64_MIN has no positive counterpart */
    for (; i < size; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        if (__builtin_mul_overflow(sum, 10, &sum) ||
            __builtin_sub_overflow(sum, text[i] - '0', &sum))
            return false;
    }
    if (!negative && __builtin_sub_overflow((int64_t)0, sum, &sum))
        return false;
    *value = sum;
    return true;
}

bool td__parse_int(const char *text, int low, int high, int *value)
{
    int64_t number;
    if (!td__parse_i64(text, strlen(text), &number) || number < low || number > high)
        return false;
    *value = (int)number;
    return true;
}
