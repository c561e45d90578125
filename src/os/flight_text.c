/* Texts in the flight recorder. */
#include "os/flight.h"

#include <string.h>

/* The bytes of the character of UTF-8 at `text`; 0 where there is none within `left` bytes. */
static size_t character(const unsigned char *text, size_t left)
{
    unsigned char first = text[0];
    size_t size = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (!size || size > left || first > 0xf4)
        return 0;
    for (size_t i = 1; i < size; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    /* Longer than need be, half of a pair, or past the last one. */
    if ((first == 0xe0 && text[1] < 0xa0) || (first == 0xed && text[1] > 0x9f) ||
        (first == 0xf0 && text[1] < 0x90) || (first == 0xf4 && text[1] > 0x8f))
        return 0;
    return size;
}

void td__flight_cut(const char *text, char *out, size_t room)
{
    const unsigned char *at = (const unsigned char *)text;
    size_t length = strnlen(text, room), used = 0;
    memset(out, 0, room);
    if (length < room) {
        memcpy(out, text, length);
        return;
    }
    while (used < room - 1) {
        size_t size = character(at + used, room);
        size = size ? size : 1;
        if (used + size > room - 1)
            break;
        memcpy(out + used, at + used, size);
        used += size;
    }
}

void td__flight_put_text(_Atomic uint64_t *words, size_t room, const char *text)
{
    char whole[512];
    td__flight_cut(text, whole, room);
    for (size_t i = 0; i < room / 8; i++) {
        uint64_t word;
        memcpy(&word, whole + 8 * i, 8);
        atomic_store_explicit(&words[i], word, memory_order_relaxed);
    }
}

/* Characters that a terminal would obey rather than show: the controls, those of the upper half, and
 * those that turn the direction of writing. */
static int is_command(const unsigned char *text, size_t size)
{
    if (size == 1)
        return text[0] < 0x20 || text[0] == 0x7f;
    if (size == 2)
        return text[0] == 0xc2 && text[1] < 0xa0;
    return size == 3 && text[0] == 0xe2 &&
           ((text[1] == 0x80 && (text[2] >= 0xa8 || text[2] == 0x8e || text[2] == 0x8f) &&
             text[2] <= 0xae) ||
            (text[1] == 0x81 && text[2] >= 0xa6 && text[2] <= 0xa9));
}

void td__flight_printable(const void *bytes, size_t size, char *out)
{
    const unsigned char *at = bytes;
    size_t used = 0;
    size = strnlen(bytes, size);
    for (size_t i = 0; i < size;) {
        size_t step = character(at + i, size - i);
        if (step && !is_command(at + i, step)) {
            memcpy(out + used, at + i, step);
            used += step;
        } else {
            out[used++] = '?';
        }
        i += step ? step : 1;
    }
    out[used] = 0;
}
