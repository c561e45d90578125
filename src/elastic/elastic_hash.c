/* Hashes of weights and of the outcome of a step, on any device. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>

/* This much of weights and of the outcome is read in a step: what is enough to find other bits within some steps, and costs
 * little beside the reductions. */
enum { SAMPLE = 1 << 18 };

/* The hash of `bytes` from `from` on. */
static td_status hash_piece(const struct td__elastic_replica_piece *piece, size_t from,
                            size_t bytes, uint64_t *hash)
{
    if (!bytes)
        return TD_OK;
    if (!piece->tensor) {
        *hash = td__bit_hash((const char *)piece->data + from, bytes, *hash);
        return TD_OK;
    }
    if (td__on_host(piece->tensor)) {
        *hash = td__bit_hash((const char *)td_tensor_data(piece->tensor) + from, bytes, *hash);
        return TD_OK;
    }
    TD_SCOPE;
    size_t each = td_dtype_size(td_tensor_dtype(piece->tensor));
    int64_t all = td_tensor_numel(piece->tensor);
    td_tensor *flat = td_reshape(piece->tensor, TD_SHAPE(all));
    td_tensor *here = td_tensor_to(
        td_narrow(flat, 0, (int64_t)(from / each), (int64_t)(bytes / each)), td_device_get("cpu"));
    if (!here)
        return td__error_status();
    *hash = td__bit_hash(td_tensor_data(here), bytes, *hash);
    return TD_OK;
}

td_status td__elastic_hash_all(td_elastic *elastic, enum td__elastic_replica_part kind,
                               uint64_t *hash)
{
    struct td__elastic_replica_pieces list = {0};
    TD_NO_GRAD;
    td_status status = elastic->replica->ops->list(elastic->replica, kind, &list);
    *hash = 0;
    for (int i = 0; i < list.count && !status; i++)
        status = hash_piece(&list.pieces[i], 0, list.pieces[i].bytes, hash);
    td__pieces_free(&list);
    return status;
}

/* The windows of all steps together cover all pieces, one after another. */
td_status td__elastic_hash_part(td_elastic *elastic, enum td__elastic_replica_part kind,
                                uint64_t *hash)
{
    struct td__elastic_replica_pieces list = {0};
    size_t total = 0;
    TD_NO_GRAD;
    td_status status = elastic->replica->ops->list(elastic->replica, kind, &list);
    for (int i = 0; i < list.count; i++)
        total += list.pieces[i].bytes;
    size_t windows = (total + SAMPLE - 1) / SAMPLE;
    size_t window = windows ? (size_t)td__elastic_committed(elastic) % windows : 0;
    size_t begin = window * SAMPLE, end = begin + SAMPLE, at = 0;
    *hash = 0;
    for (int i = 0; i < list.count && !status && at < end; at += list.pieces[i++].bytes) {
        size_t from = begin > at ? begin - at : 0, bytes = list.pieces[i].bytes;
        size_t to = end - at < bytes ? end - at : bytes;
        if (from < to)
            status = hash_piece(&list.pieces[i], from, to - from, hash);
    }
    td__pieces_free(&list);
    return status;
}
