/* Parsing decimal numbers. */
#ifndef TD_BASE_NUMBER_H
#define TD_BASE_NUMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Parses all `size` bytes of `text`: an optional '-', then digits. False for anything else, or if the number
 *  does not fit. */
bool td__parse_i64(const char *text, size_t size, int64_t *value);

/** The same for a C string, with a range. */
bool td__parse_int(const char *text, int low, int high, int *value);

#endif
