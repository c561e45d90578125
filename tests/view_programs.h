/* Small programs that change tensors through views, for two tests: their gradients by differences, and
 * their results against those of PyTorch (the functions of the same names in reference/record_ops.py). */
#ifndef TANDEM_TESTS_VIEW_PROGRAMS_H
#define TANDEM_TESTS_VIEW_PROGRAMS_H

#include <tandem/ops.h>

enum { VIEW_PROGRAMS = 15 };

extern const char *const view_program_names[VIEW_PROGRAMS];

/** Runs the program on a [3, 4] and b [4], which are not changed; numbers from 0.5 to 2 are away from
 *  all kinks. NULL for a name that there is not. */
td_tensor *view_program(const char *name, td_tensor *a, td_tensor *b);

#endif
