/* Texts in memory of a fixed size. */
#ifndef TD_BASE_TEXT_H
#define TD_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/** Appends to `text`, which has `room` bytes; what does not fit is cut. */
void td__text_add(char *text, size_t room, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Reads a small file of the kernel's, without its line end; false where it cannot be read or is empty. */
bool td__text_read(const char *path, char *text, size_t room);

#endif
