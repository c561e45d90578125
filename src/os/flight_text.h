/* Texts in the pages of the flight recorder: cut to their room, and made fit for a terminal. */
#ifndef TD_OS_FLIGHT_TEXT_H
#define TD_OS_FLIGHT_TEXT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/** Copies as much of `text` as fits with the 0 at its end, and no half characters of UTF-8; the rest of
 *  `out` is zeroed. */
void td__flight_cut(const char *text, char *out, size_t room);

/** The same into words of a page; `room` is a multiple of 8, at most 512. */
void td__flight_put_text(_Atomic uint64_t *words, size_t room, const char *text);

/** Copies at most `size` bytes, up to a 0; what is no text, or would do something to a terminal, becomes
 *  '?'. `out` has room for size + 1 bytes. */
void td__flight_printable(const void *bytes, size_t size, char *out);

#endif
