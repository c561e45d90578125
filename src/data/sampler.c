/* Samplers: an ops table, the order of the current epoch, and the position in it.
 *
 * The order is computed when its epoch begins, from the epoch's number and the seed, if one is
 * drawn. These two and the number of indices taken are all that a checkpoint needs. */
#include "data/dataset.h"
#include "base/option_rules.h"
#include "tensor/random_internal.h"

#include <inttypes.h>
#include <stdlib.h>

td_sampler *td_sampler_create(const td_sampler_ops *ops, void *self)
{
    if (!ops || !ops->size || !ops->order) {
        td_fail(TD_ERR_INVALID, "td_sampler_create: %s",
                ops ? "size and order must not be NULL" : "ops is NULL");
        return NULL;
    }
    if (td__check_reserved(__func__, ops->reserved))
        return NULL;
    td_sampler *sampler = calloc(1, sizeof *sampler);
    if (!sampler) {
        td__fail_nomem("td_sampler_create");
        return NULL;
    }
    atomic_init(&sampler->owners, 1);
    sampler->ops = ops;
    sampler->self = self;
    return sampler;
}

td_sampler *td_sampler_retain(td_sampler *sampler)
{
    if (sampler)
        atomic_fetch_add_explicit(&sampler->owners, 1, memory_order_relaxed);
    return sampler;
}

void td_sampler_release(td_sampler *sampler)
{
    if (!sampler || atomic_fetch_sub_explicit(&sampler->owners, 1, memory_order_acq_rel) > 1)
        return;
    if (sampler->ops->destroy)
        sampler->ops->destroy(sampler->self);
    free(sampler->order);
    free(sampler);
}

int64_t td_sampler_size(const td_sampler *sampler)
{
    return sampler ? sampler->ops->size(sampler->self) : -1;
}

void td_sampler_set_epoch(td_sampler *sampler, int64_t epoch)
{
    if (!sampler)
        return;
    sampler->epoch = epoch;
    /* A loop that resumes from a checkpoint sets the epoch of the position. Any other number
     * discards the rest of that epoch. */
    if (sampler->resumes && sampler->position.epoch != epoch)
        sampler->resumes = false;
}

/* ---- The epoch ------------------------------------------------------------------------------- */

static td_status make_order(td_sampler *sampler)
{
    td_sampler_position position = {.epoch = sampler->epoch, .begun = true};
    if (sampler->resumes)
        position = sampler->position;
    else if (sampler->ops->draws_seed)
        position.seed = td__generator_seed(NULL);

    int64_t size = sampler->ops->size(sampler->self);
    if (size < 0 || position.taken > size)
        return td_fail(TD_ERR_INVALID,
                       "sampler: an epoch of %" PRId64 " indices cannot go on behind %" PRId64,
                       size, position.taken);
    int64_t *order = NULL;
    if ((uint64_t)size < SIZE_MAX / sizeof *order)
        order = malloc(((size_t)size + 1) * sizeof *order);
    if (!order)
        return td_fail(TD_ERR_NOMEM, "sampler: no memory for an epoch of %" PRId64 " indices",
                       size);
    td_status status = sampler->ops->order(sampler->self, position.epoch, position.seed, order);
    if (status) {
        free(order);
        return status;
    }
    sampler->resumes = false;
    sampler->order = order;
    sampler->size = size;
    sampler->position = position;
    return TD_OK;
}

td_status td__sampler_begin(td_sampler *sampler)
{
    return sampler->order ? TD_OK : make_order(sampler);
}

void td__sampler_end(td_sampler *sampler)
{
    free(sampler->order);
    sampler->order = NULL;
    sampler->busy = false;
}

bool td_sampler_next(td_sampler *sampler, int64_t *index)
{
    if (!sampler)
        return false;
    sampler->status = sampler->busy
                          ? td_fail(TD_ERR_STATE,
                                    "td_sampler_next: a loader is in the middle of an epoch with "
                                    "this sampler")
                          : td__sampler_begin(sampler);
    if (sampler->status)
        return false;
    if (sampler->position.taken == sampler->size) {
        td__sampler_end(sampler);
        return false;
    }
    *index = sampler->order[sampler->position.taken++];
    return true;
}

td_status td_sampler_status(const td_sampler *sampler)
{
    return sampler ? sampler->status : TD_ERR_INVALID;
}

/* ---- Position -------------------------------------------------------------------------------- */

void td_sampler_get_position(const td_sampler *sampler, td_sampler_position *position)
{
    *position = (td_sampler_position){0};
    if (!sampler)
        return;
    if (sampler->order || sampler->resumes)
        *position = sampler->position;
    else
        position->epoch = sampler->epoch;
}

td_status td_sampler_set_position(td_sampler *sampler, const td_sampler_position *position)
{
    if (!sampler || !position)
        return td_fail(TD_ERR_INVALID, "td_sampler_set_position: the %s is NULL",
                       sampler ? "position" : "sampler");
    TD_TRY(td__check_reserved(__func__, position->reserved));
    if (sampler->busy)
        return td_fail(TD_ERR_STATE,
                       "td_sampler_set_position: a loader is in the middle of an epoch with this "
                       "sampler; call td_loader_reset() first");
    int64_t size = sampler->ops->size(sampler->self);
    if (position->taken < 0 || position->taken > size || (!position->begun && position->taken))
        return td_fail(TD_ERR_INVALID,
                       "td_sampler_set_position: %" PRId64
                       " indices were taken from an epoch that %s; an "
                       "epoch has %" PRId64,
                       position->taken, position->begun ? "was begun" : "was not begun", size);
    td__sampler_end(sampler);
    sampler->epoch = position->epoch;
    sampler->position = *position;
    sampler->resumes = position->begun;
    return TD_OK;
}
