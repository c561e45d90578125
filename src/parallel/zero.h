/* An optimizer whose state is divided among the ranks (ZeRO, stage 1): the parts that td_zero_optimizer() is made of.
 *
 *     parameters   |---- 0 ----|-- 1 --|------ 2 ------|- 3 -|      whole on every rank, and so are their gradients
 *     rank 0       |###########|####                                its share: 1-D views, one of each parameter, some
 *     rank 1                        ###|###########                 without elements
 *     rank 2                                       ####|#####|
 *
 * The ranks cut the parameters at the same places: near equal numbers of bytes, at multiples of TD__SHARD_BLOCK elements
 * or at the start of a parameter. */
#ifndef TD_PARALLEL_ZERO_H
#define TD_PARALLEL_ZERO_H

#include "optim/optimizer.h"

#include <tandem/parallel.h>

/* One parameter; there is one for each of the optimizer, in the same order. */
struct td__zero_parameter {
    td_tensor *whole; /* retained */
    td_tensor *flat;  /* all its elements in one dimension, a view */
    char *name;       /* in the model; NULL if it was added later */
    int64_t *cuts;    /* rank r has the elements cuts[r] … cuts[r + 1] - 1 */
    bool has_grad;    /* in this step */
};

struct td__zero {
    struct td__sharding sharding; /* of all views; the first member */
    td_group *group;
    int rank, size; /* of the group */
    struct td__zero_parameter *parameters;
    int count;
    bool agreed; /* in this step: all ranks go on */
};

/** The internals of an optimizer of td_zero_optimizer(); NULL, with the last error set, for another. */
struct td__zero *td__zero_of(const td_optimizer *optimizer, const char *call);

enum { TD__ZERO_NAME = 160 };

/** "\"weight\"", or "4, of the shape [2, 3]": `text`. */
const char *td__zero_name(const struct td__zero *zero, int index, char text[TD__ZERO_NAME]);

/** Sets the cuts of `count` parameters, which are balanced among themselves. */
td_status td__zero_cut(struct td__zero_parameter *parameters, int count, int ranks);

/** Exchanges a status, and `count` words, of which rank r's come to all[r * count]; words may be NULL. A failure of
 *  another rank is TD_ERR_ABORTED, and says what has failed. Collective. */
td_status td__zero_agree(const struct td__zero *zero, const char *what, td_status status,
                         const uint64_t *words, int count, uint64_t *all);

/** flats[i] has the elements of parameter indices[i], of which this rank has set its own: gets those of the others.
 *  Collective. */
td_status td__zero_gather(const struct td__zero *zero, td_tensor *const *flats, const int *indices,
                          int count);

#endif
