/* The last lines of a worker's output, for the report on how it ended. */
#ifndef TD_LAUNCH_TAIL_H
#define TD_LAUNCH_TAIL_H

#include "base/buffer.h"

enum { TD__TAIL_SIZE = 8192, TD__TAIL_LINES = 20 };

struct td__tail {
    char *bytes; /* TD__TAIL_SIZE, from the first output on */
    size_t size;
};

/** Takes note of more output. */
void td__tail_add(struct td__tail *tail, const char *data, size_t size);

/** Appends the last lines to `text`, each after `margin` and ended. Of a line that was overwritten
 *  with carriage returns, what stands there last. False when there are none. */
bool td__tail_print(const struct td__tail *tail, const char *margin, struct td__buffer *text);

void td__tail_free(struct td__tail *tail);

#endif
