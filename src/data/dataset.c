/* Datasets: an ops table, its size and shapes, and a reference count. Size and shapes are queried
 * once, so that all users of a dataset see the same. */
#include "data/dataset.h"
#include "base/option_rules.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Making one ------------------------------------------------------------------------------ */

static td_status check_spec(const char *call, const char *half, const td_sample_spec *spec,
                            size_t *bytes)
{
    *bytes = 0;
    TD_TRY(td__check_reserved(call, spec->reserved));
    if (spec->ndim == -1 && half[0] == 't')
        return TD_OK;
    if (spec->ndim < 0 || spec->ndim > TD_MAX_DIMS - 1)
        return td_fail(TD_ERR_INVALID, "%s: the %s of a sample has 0 to %d dimensions, not %d",
                       call, half, TD_MAX_DIMS - 1, spec->ndim);
    struct td__layout layout;
    if (td__layout_init(&layout, call, spec->shape, spec->ndim, NULL, spec->dtype))
        return td_fail(TD_ERR_INVALID, "%s, for the %s of a sample", td__error_text(), half);
    *bytes = (size_t)layout.numel * td_dtype_size(spec->dtype);
    return TD_OK;
}

td_dataset *td_dataset_create(const td_dataset_ops *ops, void *self)
{
    if (!ops || !ops->size || !ops->describe || !ops->read) {
        td_fail(TD_ERR_INVALID, "td_dataset_create: %s",
                ops ? "size, describe and read must not be NULL" : "ops is NULL");
        return NULL;
    }
    if (td__check_reserved(__func__, ops->reserved))
        return NULL;
    td_dataset *dataset = calloc(1, sizeof *dataset);
    if (!dataset) {
        td__fail_nomem("td_dataset_create");
        return NULL;
    }
    atomic_init(&dataset->owners, 1);
    dataset->ops = ops;
    dataset->self = self;
    dataset->size = ops->size(self);
    ops->describe(self, &dataset->input, &dataset->target);
    if (dataset->size < 0) {
        td_fail(TD_ERR_INVALID, "td_dataset_create: ops->size() returned %" PRId64 " samples",
                dataset->size);
        goto free_dataset;
    }
    if (check_spec("td_dataset_create", "input", &dataset->input, &dataset->input_bytes) ||
        check_spec("td_dataset_create", "target", &dataset->target, &dataset->target_bytes))
        goto free_dataset;
    return dataset;

free_dataset:
    free(dataset);
    return NULL;
}

td_dataset *td_dataset_retain(td_dataset *dataset)
{
    if (dataset)
        atomic_fetch_add_explicit(&dataset->owners, 1, memory_order_relaxed);
    return dataset;
}

void td_dataset_release(td_dataset *dataset)
{
    if (!dataset || atomic_fetch_sub_explicit(&dataset->owners, 1, memory_order_acq_rel) > 1)
        return;
    if (dataset->ops->destroy)
        dataset->ops->destroy(dataset->self);
    free(dataset);
}

/* ---- What it is ------------------------------------------------------------------------------ */

int64_t td_dataset_size(const td_dataset *dataset)
{
    return dataset ? dataset->size : -1;
}

void td_dataset_describe(const td_dataset *dataset, td_sample_spec *input, td_sample_spec *target)
{
    td_sample_spec none = {.ndim = -1};
    if (input)
        *input = dataset ? dataset->input : none;
    if (target)
        *target = dataset ? dataset->target : none;
}

td_status td_dataset_read(td_dataset *dataset, int64_t index, void *input, void *target)
{
    if (!dataset)
        return td__fail_null("td_dataset_read");
    if (index < 0 || index >= dataset->size)
        return td_fail(TD_ERR_INVALID,
                       "td_dataset_read: there is no sample %" PRId64 " in a dataset of %" PRId64,
                       index, dataset->size);
    if ((!input && dataset->input_bytes) || (!target && dataset->target_bytes))
        return td_fail(
            TD_ERR_INVALID, "td_dataset_read: %s is NULL, but has %zu bytes for each sample",
            input ? "target" : "input", input ? dataset->target_bytes : dataset->input_bytes);
    return dataset->ops->read(dataset->self, index, input, target);
}
