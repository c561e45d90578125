/* The text of a progress bar. */
#ifndef TD_DATA_PROGRESS_H
#define TD_DATA_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a bar shows. */
struct td__progress_view {
    const char *label; /* NULL: none */
    const char *unit;
    int64_t total; /* 0: not known */
    int64_t done;
    double elapsed_s;
    double loss;   /* NAN: none */
    bool finished; /* show the elapsed time instead of the time left */
};

/** Writes the line for a terminal of `width` columns into `line`, with a NUL, at most `capacity`
 *  bytes. Returns its length in bytes. */
size_t td__progress_line(char *line, size_t capacity, const struct td__progress_view *view,
                         int width);

#endif
