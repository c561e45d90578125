/* The text of a progress bar. */
#ifndef TD_DATA_PROGRESS_H
#define TD_DATA_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a bar shows at a moment. */
struct td__progress_view {
    const char *label; /* NULL: none */
    const char *unit;
    int64_t total; /* 0: not known */
    int64_t done;
    double elapsed_s;
    double loss;   /* NAN: none */
    bool finished; /* the time that it took, instead of what is left */
};

/** Writes the line for a terminal of `width` columns into `line`, of which it uses at most `room` bytes.
 *  It is never wider than that, and ends with a NUL. Returns its bytes. */
size_t td__progress_line(char *line, size_t room, const struct td__progress_view *view, int width);

#endif
