/* A dataset of the rows of tensors, which are retained and may have any strides. */
#include "base/fail.h"
#include "data/dataset.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The rows of one tensor. */
struct rows {
    td_tensor *tensor; /* NULL: there is none */
    struct td__layout row, packed;
    bool contiguous; /* each row is */
    size_t bytes;
};

struct tensor_dataset {
    struct rows input, target;
};

static void describe_rows(const struct rows *rows, td_sample_spec *spec)
{
    *spec = (td_sample_spec){.ndim = -1};
    if (!rows->tensor)
        return;
    spec->dtype = rows->row.dtype;
    spec->ndim = rows->row.ndim;
    memcpy(spec->shape, rows->row.shape, (size_t)rows->row.ndim * sizeof spec->shape[0]);
}

static void read_row(const struct rows *rows, int64_t index, void *to)
{
    if (!rows->tensor || rows->bytes == 0)
        return;
    const struct td__layout *whole = &rows->tensor->layout;
    const char *from = (const char *)td_tensor_data(rows->tensor) +
                       index * whole->strides[0] * (int64_t)td_dtype_size(whole->dtype);
    if (rows->contiguous)
        memcpy(to, from, rows->bytes);
    else
        td__layout_copy(&rows->packed, to, &rows->row, from);
}

static int64_t size_of(void *self)
{
    struct tensor_dataset *dataset = self;
    return dataset->input.tensor->layout.shape[0];
}

static void describe(void *self, td_sample_spec *input, td_sample_spec *target)
{
    struct tensor_dataset *dataset = self;
    describe_rows(&dataset->input, input);
    describe_rows(&dataset->target, target);
}

static td_status read_sample(void *self, int64_t index, void *input, void *target)
{
    struct tensor_dataset *dataset = self;
    read_row(&dataset->input, index, input);
    read_row(&dataset->target, index, target);
    return TD_OK;
}

static void destroy(void *self)
{
    struct tensor_dataset *dataset = self;
    td_tensor_release(dataset->input.tensor);
    td_tensor_release(dataset->target.tensor);
    free(dataset);
}

static const td_dataset_ops tensor_dataset_ops = {
    .size = size_of, .describe = describe, .read = read_sample, .destroy = destroy};

static td_status look_at(struct rows *rows, td_tensor *tensor)
{
    if (!tensor)
        return TD_OK;
    if (!td__on_host(tensor))
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "td_tensor_dataset: the tensor is on %s, and samples are read by the host; pass "
            "td_tensor_to() \"cpu\" of it, and let the loader's pin_memory speed up the way back",
            tensor->storage->device->name);
    rows->tensor = td__alias(tensor); /* the elements without their graph */
    if (!rows->tensor)
        return TD_ERR_NOMEM;
    const struct td__layout *whole = &tensor->layout;
    struct td__layout row = {.dtype = whole->dtype, .ndim = whole->ndim - 1, .numel = 1};
    for (int d = 0; d < row.ndim; d++) {
        row.shape[d] = whole->shape[d + 1];
        row.strides[d] = whole->strides[d + 1];
        row.numel *= row.shape[d];
    }
    rows->row = row;
    rows->packed = row;
    td__layout_set_contiguous(&rows->packed);
    rows->contiguous = td__layout_is_contiguous(&row);
    rows->bytes = (size_t)row.numel * td_dtype_size(row.dtype);
    return TD_OK;
}

td_dataset *td_tensor_dataset(td_tensor *input, td_tensor *target)
{
    if (!input)
        return td__null(__func__);
    const struct td__layout *in = &input->layout, *out = target ? &target->layout : NULL;
    if (in->ndim == 0 || (out && (out->ndim == 0 || out->shape[0] != in->shape[0]))) {
        td_fail(TD_ERR_INVALID,
                "td_tensor_dataset: the input has the shape %s, the target %s; the first "
                "dimension of both must be the number of samples",
                td__shape_text(in->shape, in->ndim),
                out ? td__shape_text(out->shape, out->ndim) : "is NULL");
        return NULL;
    }
    struct tensor_dataset *self = calloc(1, sizeof *self);
    if (!self) {
        td__fail_nomem("td_tensor_dataset");
        return NULL;
    }
    td_dataset *dataset = NULL;
    if (look_at(&self->input, input) == TD_OK && look_at(&self->target, target) == TD_OK)
        dataset = td_dataset_create(&tensor_dataset_ops, self);
    if (!dataset)
        destroy(self);
    return dataset;
}
