/* Reading numbers that people wrote. */
#ifndef TD_BASE_NUMBER_H
#define TD_BASE_NUMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Reads a decimal number that fills all `size` bytes of `text`: an optional '-', digits, nothing
 *  else. False when it is something else, or does not fit. */
bool td__parse_i64(const char *text, size_t size, int64_t *value);

/** The same for a C string and a range. */
bool td__parse_int(const char *text, int low, int high, int *value);

#endif
