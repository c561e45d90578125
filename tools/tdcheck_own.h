/* Rows that are no comparison of one call: copies, streams, random numbers, optimizers. */
#ifndef TANDEM_TOOLS_TDCHECK_OWN_H
#define TANDEM_TOOLS_TDCHECK_OWN_H

#include "tdcheck.h"

#define CHECK_OWN_ROW(name)                                                                        \
    void check_##name(struct checker *checker, const struct check_row *row, td_dtype dtype)

/* tdcheck_memory.c */
CHECK_OWN_ROW(transfers);
CHECK_OWN_ROW(pinned_copies);
CHECK_OWN_ROW(devices);
CHECK_OWN_ROW(streams);
CHECK_OWN_ROW(item);
CHECK_OWN_ROW(equal);
/* tdcheck_random.c */
CHECK_OWN_ROW(dropout);
CHECK_OWN_ROW(dropout2d);
CHECK_OWN_ROW(uniform_);
CHECK_OWN_ROW(normal_);
CHECK_OWN_ROW(bernoulli_);
CHECK_OWN_ROW(random_);
CHECK_OWN_ROW(random_range_);
CHECK_OWN_ROW(randperm);
/* tdcheck_optim.c */
CHECK_OWN_ROW(sgd);
CHECK_OWN_ROW(adam);
CHECK_OWN_ROW(adamw);
CHECK_OWN_ROW(clip_grad_norm_);
CHECK_OWN_ROW(clip_grad_value_);
/* tdcheck_lists.c */
CHECK_OWN_ROW(norm_list);
CHECK_OWN_ROW(power_sums_list);
CHECK_OWN_ROW(scale_list);
CHECK_OWN_ROW(unscale_list);

#endif
