/* The norm of gradients: the sums of the parameters, in their order, and the root of the total. A device with all of the
 * gradients computes it alone. Of several accelerators each computes sums, and one of them the rest. Where the host has
 * some gradients, or where they are shards, of which other ranks have the rest, the host adds the sums. */
#include "optim/grad_norm.h"

#include "base/fail.h"
#include "tensor/norm_tree.h"

#include <math.h>
#include <stdlib.h>

#define CALL "td_clip_grad_norm_"

static td_tensor *number_on(td_device *device)
{
    return td__empty(CALL, NULL, 0, TD_F64, device);
}

/* The sums of some tensors of a device; one reference. */
static td_tensor *sums_of(td_device *device, td_tensor *const *list, int count, double power)
{
    td_tensor *sums = td__empty(CALL, (int64_t[]){count}, 1, TD_F64, device);
    if (sums && td__kernels_of(sums)->power_sums(sums, list, count, power)) {
        td_tensor_release(sums);
        return NULL;
    }
    return sums;
}

/* ---- One device --------------------------------------------------------------------------------------------------- */

static td_status norm_of_device(const struct td__device_grads *group, double power,
                                td_tensor **total)
{
    td_tensor *number = number_on(group->device);
    if (!number)
        return td__error_status();
    td_status status = td__kernels_of(number)->norm(number, group->list, group->count, power);
    if (status)
        td_tensor_release(number);
    else
        *total = number;
    return status;
}

/* ---- Several accelerators: nothing waits for the host --------------------------------------------------------------- */

/* elements[i]: the sum of gradient i of all, on the first device. */
static td_status collect_sums(struct td__grads *grads, double power, td_tensor **elements)
{
    td_device *first = grads->devices[0].device;
    for (int d = 0; d < grads->device_count; d++) {
        const struct td__device_grads *group = &grads->devices[d];
        td_tensor *sums = sums_of(group->device, group->list, group->count, power);
        td_tensor *here = sums && group->device != first
                              ? td__empty(CALL, sums->layout.shape, 1, TD_F64, first)
                              : td_tensor_retain(sums);
        td_status status = here ? TD_OK : td__error_status();
        if (!status && here != sums)
            status = td__transfer(CALL, here, sums, false);
        for (int k = 0; k < group->count && !status; k++) {
            td_tensor *element = td__select_index(here, 0, k);
            elements[group->numbers[k]] = element;
            status = element ? TD_OK : td__error_status();
        }
        td_tensor_release(here);
        td_tensor_release(sums);
        TD_TRY(status);
    }
    return TD_OK;
}

/* The norm with a power of 1 of numbers that are not negative is their sum, in order. */
static td_status add_sums(td_tensor *const *elements, int count, double power, td_tensor *total)
{
    const td_kernels *kernels = td__kernels_of(total);
    TD_TRY(kernels->norm(total, elements, count, isinf(power) ? power : 1));
    if (power == 2)
        return kernels->unary(TD_UNARY_SQRT, total, total);
    if (isinf(power) || power == 1)
        return TD_OK;
    return kernels->binary_scalar(TD_BINARY_POW, total, total, 1 / power, false);
}

static td_status norm_of_accelerators(struct td__grads *grads, double power, td_tensor **total)
{
    int count = 0;
    for (int d = 0; d < grads->device_count; d++)
        count += grads->devices[d].count;
    td_tensor **elements = calloc((size_t)count, sizeof *elements);
    td_tensor *number = elements ? number_on(grads->devices[0].device) : NULL;
    td_status status = !elements ? td__fail_nomem(CALL) : number ? TD_OK : td__error_status();
    if (!status)
        status = collect_sums(grads, power, elements);
    if (!status)
        status = add_sums(elements, count, power, number);
    for (int i = 0; elements && i < count; i++)
        td_tensor_release(elements[i]);
    free(elements);
    if (status)
        td_tensor_release(number);
    else
        *total = number;
    return status;
}

/* ---- By way of the host ------------------------------------------------------------------------------------------- */

td_status td__add_piece(struct td__norm_pieces *pieces, td_tensor *tensor, double *sum)
{
    if (!tensor)
        return td__error_status();
    if (pieces->count == pieces->capacity) {
        int capacity = pieces->capacity ? 2 * pieces->capacity : 64;
        struct td__norm_piece *list = realloc(pieces->list, (size_t)capacity * sizeof *list);
        if (!list) {
            td_tensor_release(tensor);
            return td__fail_nomem(CALL);
        }
        pieces->list = list;
        pieces->capacity = capacity;
    }
    pieces->list[pieces->count++] = (struct td__norm_piece){tensor, sum};
    return TD_OK;
}

static td_status add_wholes(td_tensor *const *parameters, int count, struct td__norm_pieces *pieces,
                            double *sums)
{
    for (int i = 0; i < count; i++) {
        td_tensor *grad = td_tensor_grad(parameters[i]);
        if (grad && !parameters[i]->shard)
            TD_TRY(td__add_piece(pieces, td_tensor_retain(grad), &sums[i]));
    }
    return TD_OK;
}

/* The pieces of the device of piece `from`, all of which come after it; their tensors in the list are released. */
static td_status measure_device(struct td__norm_pieces *pieces, int from, double power,
                                td_tensor **list, double **to)
{
    td_device *device = td__memory_device(pieces->list[from].tensor);
    int count = 0;
    for (int i = from; i < pieces->count; i++) {
        struct td__norm_piece *piece = &pieces->list[i];
        if (!piece->tensor || td__memory_device(piece->tensor) != device)
            continue;
        list[count] = piece->tensor;
        to[count++] = piece->sum;
        piece->tensor = NULL;
    }
    td_tensor *sums = sums_of(device, list, count, power);
    td_tensor *copy = sums ? td__to_host(CALL, sums) : NULL;
    td_status status = copy ? TD_OK : td__error_status();
    const double *values = copy ? td_tensor_data(copy) : NULL;
    for (int k = 0; k < count; k++) {
        if (values)
            *to[k] = values[k];
        td_tensor_release(list[k]);
    }
    td_tensor_release(copy);
    td_tensor_release(sums);
    return status;
}

static td_status measure_pieces(struct td__norm_pieces *pieces, double power)
{
    td_tensor **list = malloc((size_t)(pieces->count + 1) * sizeof *list);
    double **to = malloc((size_t)(pieces->count + 1) * sizeof *to);
    td_status status = list && to ? TD_OK : td__fail_nomem(CALL);
    for (int i = 0; i < pieces->count && !status; i++)
        if (pieces->list[i].tensor)
            status = measure_device(pieces, i, power, list, to);
    free(to);
    free(list);
    return status;
}

static td_status norm_by_host(td_tensor *const *parameters, int count, double power,
                              td_tensor **total)
{
    struct td__norm_pieces pieces = {0};
    struct td__shard_norms *norms = NULL;
    double *sums = calloc((size_t)count + 1, sizeof *sums), sum = 0;
    td_status status = sums ? td__shard_norms_begin(parameters, count, &pieces, &norms)
                            : td__fail_nomem(CALL);
    if (!status)
        status = add_wholes(parameters, count, &pieces, sums);
    if (!status)
        status = measure_pieces(&pieces, power);
    status = td__shard_norms_end(norms, status, isinf(power), sums);
    td_tensor *number = status ? NULL : number_on(td__host_device());
    if (number) {
        for (int i = 0; i < count; i++)
            sum = td__norm_join(sum, sums[i], isinf(power));
        *(double *)td_tensor_data(number) = td__norm_root(sum, power);
        *total = number;
    } else if (!status) {
        status = td__error_status();
    }
    for (int i = 0; i < pieces.count; i++)
        td_tensor_release(pieces.list[i].tensor);
    free(pieces.list);
    free(sums);
    return status;
}

td_status td__grad_norm(td_tensor *const *parameters, int count, struct td__grads *grads,
                        double power, td_tensor **total)
{
    bool by_host = grads->device_count == 0; /* with shards of other ranks, or there is nothing */
    for (int i = 0; i < count; i++)
        by_host |= parameters[i] && parameters[i]->shard;
    if (by_host)
        return norm_by_host(parameters, count, power, total);
    if (grads->device_count == 1)
        return norm_of_device(&grads->devices[0], power, total);
    /* An accelerator comes first, and the host last. */
    if (grads->devices[grads->device_count - 1].device->is_host)
        return norm_by_host(parameters, count, power, total);
    return norm_of_accelerators(grads, power, total);
}
