/* Merging what the ranks have, on rank 0: each claims its parts of tensors. The shards of a tensor must cover it; of equal
 * claims, such as tensors that all ranks have, one is chosen, so that all ranks write about as many bytes. */
#include "base/fail.h"
#include "checkpoint/sharded.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST_NAME = 1 << 16 };

struct merging {
    const char *call;
    struct td__shard_plan *plan;
    struct td__claim *claims;
    size_t count, capacity;
    uint64_t *load; /* bytes of each rank */
    bool to_root;
};

/* ---- Reading ------------------------------------------------------------------------------------------- */

static td_status different(const struct merging *merging, const struct td__sharded_tensor *tensor,
                           int rank, const struct td__shard_part *part)
{
    return td_fail(
        TD_ERR_MISMATCH,
        "%s: rank %d has \"%.200s\" as %s of the shape %s, a rank before it as %s of the "
        "shape %s",
        merging->call, rank, tensor->name, td_dtype_name(part->dtype),
        td__shape_text(part->shape, part->ndim), td_dtype_name(tensor->dtype),
        td__shape_text(tensor->shape, tensor->ndim));
}

/* The tensor of a part, which is added if it is new. */
static td_status find_tensor(struct merging *merging, int rank, struct td__span name,
                             const struct td__shard_part *part, struct td__sharded_tensor **found)
{
    struct td__index *index = &merging->plan->index;
    struct td__map_node *node = td__map_find(&index->map, name.data, name.size);
    struct td__sharded_tensor *tensor = node ? TD__CONTAINER(node, struct td__sharded_tensor, node)
                                             : td__index_add(index, name.data, name.size);
    if (!tensor || (!node && !td__map_insert(&index->map, &tensor->node)))
        return td__fail_nomem(merging->call);
    *found = tensor;
    if (!node) {
        struct td__layout layout;
        TD_TRY(td__layout_init(&layout, merging->call, part->shape, part->ndim, NULL, part->dtype));
        tensor->dtype = part->dtype;
        tensor->ndim = part->ndim;
        tensor->numel = layout.numel;
        memcpy(tensor->shape, part->shape, sizeof tensor->shape);
        return TD_OK;
    }
    bool same = tensor->dtype == part->dtype && tensor->ndim == part->ndim &&
                !memcmp(tensor->shape, part->shape, sizeof tensor->shape);
    return same ? TD_OK : different(merging, tensor, rank, part);
}

static td_status add_claim(struct merging *merging, int rank, int number, struct td__reader *reader)
{
    struct td__shard_part part = {0};
    struct td__span name = td__reader_string(reader, LONGEST_NAME);
    part.dtype = (td_dtype)td__reader_u8(reader);
    part.ndim = td__reader_u8(reader);
    if (part.ndim > TD_MAX_DIMS)
        reader->failed = true;
    for (int d = 0; d < part.ndim && !reader->failed; d++)
        part.shape[d] = (int64_t)td__reader_u64(reader);
    part.first = (int64_t)td__reader_u64(reader);
    part.count = (int64_t)td__reader_u64(reader);
    part.is_whole = td__reader_u8(reader);
    if (reader->failed)
        return td_fail(TD_ERR_MISMATCH, "%s: rank %d made another call, or a name is too long",
                       merging->call, rank);
    struct td__claim *claim = td__list_grow((void **)&merging->claims, &merging->count,
                                            &merging->capacity, sizeof *claim);
    if (!claim)
        return td__fail_nomem(merging->call);
    *claim = (struct td__claim){.rank = rank,
                                .number = number,
                                .first = part.first,
                                .count = part.count,
                                .is_whole = part.is_whole};
    return find_tensor(merging, rank, name, &part, &claim->tensor);
}

static td_status read_rank(struct merging *merging, int rank, td_bytes packed)
{
    struct td__reader reader = td__reader_of(packed.data, packed.size);
    TD_TRY(td__unpack_status(merging->call, &reader, rank));
    uint32_t count = td__reader_u32(&reader);
    for (uint32_t i = 0; i < count; i++)
        TD_TRY(add_claim(merging, rank, (int)i, &reader));
    return TD_OK;
}

/* ---- Choosing ------------------------------------------------------------------------------------------ */

static uint64_t bytes_of(const struct td__claim *claim)
{
    return (uint64_t)claim->count * td_dtype_size(claim->tensor->dtype);
}

static int compare(int64_t a, int64_t b)
{
    return a < b ? -1 : a > b;
}

/* By tensor, in the order of their elements, equal claims side by side. */
static int compare_claims(const void *a, const void *b)
{
    const struct td__claim *x = a, *y = b;
    int result = compare((int64_t)x->tensor->number, (int64_t)y->tensor->number);
    result = result ? result : compare(x->is_whole, y->is_whole);
    result = result ? result : compare(x->first, y->first);
    result = result ? result : compare(x->count, y->count);
    return result ? result : compare(x->rank, y->rank);
}

/* By rank, wide elements first, and in the order of the tensors, which is the same for all ranks. */
static int compare_chosen(const void *a, const void *b)
{
    const struct td__claim *x = a, *y = b;
    int result = compare(x->rank, y->rank);
    result = result ? result
                    : compare((int64_t)td_dtype_size(y->tensor->dtype),
                              (int64_t)td_dtype_size(x->tensor->dtype));
    return result ? result : compare((int64_t)x->tensor->number, (int64_t)y->tensor->number);
}

/* One of equal claims: that of the rank which has the least to write. */
static void choose_one(struct merging *merging, struct td__claim *claims, size_t count)
{
    struct td__claim *best = &claims[0];
    for (size_t i = 1; i < count && !(merging->to_root && best->rank == 0); i++)
        if (merging->load[claims[i].rank] < merging->load[best->rank])
            best = &claims[i];
    best->is_chosen = true;
    merging->load[best->rank] += bytes_of(best);
}

static td_status uncovered(const struct merging *merging, const struct td__claim *claim,
                           int64_t end)
{
    return td_fail(TD_ERR_MISMATCH,
                   "%s: the shards of \"%.200s\" do not fit together: rank %d has %" PRId64
                   " elements from %" PRId64 " on, the shards before it end at %" PRId64
                   " of %" PRId64,
                   merging->call, claim->tensor->name, claim->rank, claim->count, claim->first, end,
                   claim->tensor->numel);
}

/* The shards of one tensor. */
static td_status choose_shards(struct merging *merging, struct td__claim *claims, size_t count)
{
    const struct td__sharded_tensor *tensor = claims[0].tensor;
    int64_t end = 0;
    if (claims[count - 1].is_whole)
        return td_fail(TD_ERR_MISMATCH,
                       "%s: \"%.200s\" is a shard on rank %d, and whole on rank %d", merging->call,
                       tensor->name, claims[0].rank, claims[count - 1].rank);
    for (size_t i = 0, same; i < count; i += same) {
        same = 1;
        while (i + same < count && claims[i + same].first == claims[i].first &&
               claims[i + same].count == claims[i].count)
            same++;
        if (claims[i].count == 0)
            continue;
        if (claims[i].first != end)
            return uncovered(merging, &claims[i], end);
        end += claims[i].count;
        choose_one(merging, &claims[i], same);
    }
    if (end == tensor->numel)
        return TD_OK;
    return td_fail(TD_ERR_MISMATCH,
                   "%s: no rank has the elements of \"%.200s\" from %" PRId64 " on, of %" PRId64,
                   merging->call, tensor->name, end, tensor->numel);
}

struct range {
    struct td__claim *claims;
    size_t count;
};

static int compare_sizes(const void *a, const void *b)
{
    const struct range *x = a, *y = b;
    int result = compare((int64_t)bytes_of(y->claims), (int64_t)bytes_of(x->claims));
    return result ? result
                  : compare((int64_t)x->claims->tensor->number, (int64_t)y->claims->tensor->number);
}

/* Shards first, then the tensors that ranks have as a whole, the largest first. */
static td_status choose(struct merging *merging)
{
    size_t wholes = 0;
    struct range *ranges = malloc((merging->plan->index.count + 1) * sizeof *ranges);
    td_status status = ranges ? TD_OK : td__fail_nomem(merging->call);
    for (size_t i = 0, count; i < merging->count && !status; i += count) {
        struct td__claim *claims = &merging->claims[i];
        for (count = 1; i + count < merging->count && claims[count].tensor == claims[0].tensor;)
            count++;
        if (!claims[0].is_whole)
            status = choose_shards(merging, claims, count);
        else if (claims[0].count > 0)
            ranges[wholes++] = (struct range){claims, count};
    }
    if (!status && wholes)
        qsort(ranges, wholes, sizeof *ranges, compare_sizes);
    for (size_t i = 0; i < wholes && !status; i++)
        choose_one(merging, ranges[i].claims, ranges[i].count);
    free(ranges);
    return status;
}

static td_status merge(struct merging *merging, const td_bytes *all, int ranks)
{
    for (int r = 0; r < ranks; r++)
        TD_TRY(read_rank(merging, r, all[r]));
    if (merging->count)
        qsort(merging->claims, merging->count, sizeof merging->claims[0], compare_claims);
    TD_TRY(choose(merging));
    struct td__shard_plan *plan = merging->plan;
    for (size_t i = 0; i < merging->count; i++)
        if (merging->claims[i].is_chosen)
            merging->claims[plan->chosen_count++] = merging->claims[i];
    if (plan->chosen_count)
        qsort(merging->claims, plan->chosen_count, sizeof merging->claims[0], compare_chosen);
    plan->chosen = merging->claims;
    merging->claims = NULL;
    return TD_OK;
}

td_status td__plan_merge(const char *call, const td_bytes *all, int ranks, bool to_root,
                         struct td__shard_plan *plan)
{
    struct merging merging = {.call = call,
                              .plan = plan,
                              .load = calloc((size_t)ranks, sizeof merging.load[0]),
                              .to_root = to_root};
    td_status status = merging.load ? merge(&merging, all, ranks) : td__fail_nomem(call);
    plan->index.ranks = ranks;
    free(merging.load);
    free(merging.claims);
    return status;
}
