/* Shards: tensors that are a part of one that is distributed over ranks. */
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static td_status check(const td_tensor *tensor, const td_shard *shard)
{
    struct td__layout whole;
    TD_TRY(td__layout_init(&whole, "td_tensor_set_shard", shard->shape, shard->ndim, NULL,
                           tensor->layout.dtype));
    if (tensor->layout.ndim != 1)
        return td_fail(
            TD_ERR_INVALID,
            "td_tensor_set_shard: the tensor has the shape %s; a shard has one dimension",
            td__shape_of(tensor));
    if (shard->offset < 0 || tensor->layout.numel > whole.numel - shard->offset)
        return td_fail(TD_ERR_INVALID,
                       "td_tensor_set_shard: %" PRId64 " elements from number %" PRId64
                       " on do not fit a whole of the shape %s",
                       tensor->layout.numel, shard->offset,
                       td__shape_text(shard->shape, shard->ndim));
    return TD_OK;
}

td_status td__tensor_set_shard(td_tensor *tensor, const td_shard *shard,
                               const struct td__sharding *sharding)
{
    if (!tensor)
        return td__fail_null("td_tensor_set_shard");
    if (!shard) {
        free(tensor->shard);
        tensor->shard = NULL;
        return TD_OK;
    }
    TD_TRY(check(tensor, shard));
    struct td__shard *mark = tensor->shard ? tensor->shard : malloc(sizeof *mark);
    if (!mark)
        return td__fail_nomem("td_tensor_set_shard");
    *mark = (struct td__shard){.info = *shard, .sharding = sharding};
    tensor->shard = mark;
    return TD_OK;
}

td_status td__tensor_copy_shard(td_tensor *to, const td_tensor *from)
{
    if (!from->shard)
        return TD_OK;
    return td__tensor_set_shard(to, &from->shard->info, NULL);
}

td_status td_tensor_set_shard(td_tensor *tensor, const td_shard *shard)
{
    return td__tensor_set_shard(tensor, shard, NULL);
}

const td_shard *td_tensor_shard(const td_tensor *tensor)
{
    return tensor && tensor->shard ? &tensor->shard->info : NULL;
}

static bool same_shape(const td_shard *shard, int ndim, const int64_t *shape)
{
    return shard->ndim == ndim &&
           !memcmp(shard->shape, shape, (size_t)ndim * sizeof shard->shape[0]);
}

static bool is_whole_of(const td_tensor *tensor, const td_tensor *target)
{
    return target->shard && !tensor->shard &&
           same_shape(&target->shard->info, tensor->layout.ndim, tensor->layout.shape);
}

bool td__tensor_fits(const td_tensor *tensor, const td_tensor *target)
{
    if (is_whole_of(tensor, target))
        return true;
    const td_shard *theirs = td_tensor_shard(tensor), *mine = td_tensor_shard(target);
    if (theirs &&
        (!mine || theirs->offset != mine->offset || !same_shape(theirs, mine->ndim, mine->shape)))
        return false;
    return td__same_shape(tensor, target);
}

td_tensor *td__tensor_part_for(td_tensor *tensor, const td_tensor *target)
{
    if (!is_whole_of(tensor, target))
        return td_tensor_retain(tensor);
    td_tensor *dense = td__contiguous(tensor);
    td_tensor *flat = dense ? td__reshape(dense, &tensor->layout.numel, 1, NULL) : NULL;
    td_tensor *part = flat ? td__narrow(flat, 0, target->shard->info.offset, target->layout.numel)
                           : NULL;
    td_tensor_release(dense);
    td_tensor_release(flat);
    return part;
}
