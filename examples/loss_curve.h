/* The losses of a training as files. */
#ifndef TANDEM_EXAMPLES_LOSS_CURVE_H
#define TANDEM_EXAMPLES_LOSS_CURVE_H

#include <stdint.h>

/** Writes the losses of steps first, first + 1, … to directory/loss.csv, and a plot of them to directory/loss.svg. Returns
 *  0, or 1 when it has printed why not. */
int loss_curve_write(const char *directory, const char *title, const float *losses, int64_t count,
                     int64_t first);

#endif
