/* The last lines of output; see stream.h. */
#include "launch/stream.h"

#include <stdlib.h>
#include <string.h>

void td__tail_add(struct td__tail *tail, const char *data, size_t size)
{
    if (!tail->bytes && !(tail->bytes = malloc(TD__TAIL_SIZE)))
        return; /* a report without it is still a report */
    if (size > TD__TAIL_SIZE) {
        data += size - TD__TAIL_SIZE;
        size = TD__TAIL_SIZE;
    }
    if (tail->size + size > TD__TAIL_SIZE) {
        size_t drop = tail->size + size - TD__TAIL_SIZE;
        memmove(tail->bytes, tail->bytes + drop, tail->size - drop);
        tail->size -= drop;
    }
    memcpy(tail->bytes + tail->size, data, size);
    tail->size += size;
}

/* Where the last lines begin: after the 20th line end from the back, not counting the last byte. */
static const char *first_line(const struct td__tail *tail)
{
    size_t at = tail->size - 1;
    for (int lines = 0; at > 0; at--)
        if (tail->bytes[at - 1] == '\n' && ++lines == TD__TAIL_LINES)
            break;
    return tail->bytes + at;
}

static void print_line(const char *line, size_t size, const char *margin, struct td__buffer *text)
{
    while (size && line[size - 1] == '\r')
        size--;
    const char *overwritten = memrchr(line, '\r', size);
    if (overwritten) {
        size -= (size_t)(overwritten + 1 - line);
        line = overwritten + 1;
    }
    td__buffer_put(text, margin, strlen(margin));
    td__buffer_put(text, line, size);
    td__buffer_put(text, "\n", 1);
}

bool td__tail_print(const struct td__tail *tail, const char *margin, struct td__buffer *text)
{
    if (!tail->size)
        return false;
    const char *end = tail->bytes + tail->size;
    for (const char *line = first_line(tail); line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        print_line(line, (size_t)((stop ? stop : end) - line), margin, text);
        line = stop ? stop + 1 : end;
    }
    return true;
}

void td__tail_free(struct td__tail *tail)
{
    free(tail->bytes);
    *tail = (struct td__tail){0};
}
