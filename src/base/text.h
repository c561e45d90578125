/* Texts in memory of a fixed size, and UTF-8. */
#ifndef TD_BASE_TEXT_H
#define TD_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/** Appends to `text`, which has `room` bytes; what does not fit is cut. */
void td__text_add(char *text, size_t room, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Reads a small file of the kernel's, without its line end; false where it cannot be read or is empty. */
bool td__text_read(const char *path, char *text, size_t room);

/** The length of the UTF-8 character at `at`, which must end before `end`; 0 if it is invalid:
 *  overlong forms, surrogates and code points above U+10FFFF are. */
size_t td__utf8_length(const char *at, const char *end);

/** A copy of `size` bytes, which need not end with a NUL, as a string for free(); NULL without memory. (strndup() may read
 *  on to a NUL under strict_string_checks of AddressSanitizer.) */
char *td__text_copy(const void *data, size_t size);

#endif
