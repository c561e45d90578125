/* Sums of gradients over the slices of a step, each rank those of its chunk of a flat; see fsdp_slices.h. */
#include "parallel/fsdp_slices.h"

#include "base/fail.h"
#include "group/process_group.h"
#include "tensor/file_memory.h"

#include <stdlib.h>

enum { MOST_SUMS = 22 }; /* bits of TD__MAX_SLICES and one more */

struct td__flat_sums {
    /* The complete nodes so far, in order; f32 for halves. */
    struct td__slice_range nodes[MOST_SUMS];
    td_tensor *sums[MOST_SUMS];
    int count;
    td_tensor *spare[MOST_SUMS];
    int spare_count;
    struct td__storage *received; /* pieces of all slices of a round */
    td_tensor *node;              /* or their sum */
    size_t counted;               /* bytes of td_fsdp_stats.whole_bytes */
    td_tensor **views;            /* what is sent to each rank, and then what comes from it */
    int view_count;
};

/* ---- Chunks ------------------------------------------------------------------------------------------------ */

bool td__fsdp_can_reduce(const struct td__fsdp *fsdp)
{
    const struct td__fsdp_slices *slices = fsdp->slices;
    const td_group *group = fsdp->units[0]->ranks->group;
    if (group->size & (group->size - 1) || slices->computing != group->size)
        return false;
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            const struct td__fsdp_flat *flat = &fsdp->units[u]->flats[f];
            if (flat->requires_grad &&
                (!flat->device->is_host || flat->reduce == TD_F16 || flat->reduce == TD_BF16))
                return false;
        }
    return td__slices_backend_has_tree(group);
}

td_status td__fsdp_find_places(struct td__fsdp_ranks *ranks)
{
    if (ranks->places)
        return TD_OK;
    int32_t mine[2] = {ranks->rank, ranks->replicas ? ranks->replicas->rank : 0};
    ranks->places = calloc((size_t)ranks->group->size, sizeof mine);
    if (!ranks->places)
        return td__fail_nomem("td_fsdp");
    return td_group_all_gather(ranks->places, mine, 2, TD_I32, ranks->group, NULL);
}

static int replicas_of(const struct td__fsdp_flat *flat)
{
    return flat->unit->ranks->replicas ? flat->unit->ranks->replicas->size : 1;
}

/* Where part `replica` of a shard begins in the flat. */
static int64_t cut(const struct td__fsdp_flat *flat, int shard, int replica)
{
    int64_t first = flat->cuts[shard], count = flat->cuts[shard + 1] - first;
    return first + td__part_begin(count, replica, replicas_of(flat));
}

static int64_t chunk(const struct td__fsdp_flat *flat, int rank, int64_t *first)
{
    const int32_t(*places)[2] = (const void *)flat->unit->ranks->places;
    *first = cut(flat, places[rank][0], places[rank][1]);
    return cut(flat, places[rank][0], places[rank][1] + 1) - *first;
}

static int64_t own_chunk(const struct td__fsdp_flat *flat)
{
    int64_t first;
    return chunk(flat, flat->unit->ranks->group->rank, &first);
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

static bool is_half(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16;
}

/* Where the shard is, also in a file; but on the device of the passes if the shard is not there. */
static td_tensor *make_sum(struct td__fsdp_flat *flat)
{
    struct td__flat_sums *sums = flat->sums;
    if (sums->spare_count)
        return sums->spare[--sums->spare_count];
    td_dtype dtype = is_half(flat->reduce) ? TD_F32 : flat->reduce;
    int64_t count = own_chunk(flat);
    size_t bytes = (size_t)count * td_dtype_size(dtype);
    struct td__storage *storage = flat->home == flat->device
                                      ? td__storage_create_beside(flat->shard, bytes)
                                      : td__storage_create(flat->device, "td_fsdp", bytes);
    td_tensor *sum = storage ? td__flat_view(storage, dtype, 0, count) : NULL;
    if (storage)
        td__storage_release(storage);
    return sum;
}

static void keep_spare(struct td__flat_sums *sums, td_tensor *sum)
{
    if (sums->spare_count < MOST_SUMS)
        sums->spare[sums->spare_count++] = sum;
    else
        td_tensor_release(sum);
}

static void drop_views(struct td__flat_sums *sums)
{
    for (int i = 0; i < sums->view_count; i++)
        td_tensor_release(sums->views[i]);
    free(sums->views);
    sums->views = NULL;
    sums->view_count = 0;
}

static void drop_received(struct td__fsdp_flat *flat)
{
    struct td__flat_sums *sums = flat->sums;
    drop_views(sums);
    td_tensor_release(sums->node);
    sums->node = NULL;
    if (sums->received)
        td__storage_release(sums->received);
    sums->received = NULL;
    td__fsdp_count(flat->unit->all, -(ptrdiff_t)sums->counted);
    sums->counted = 0;
}

void td__flat_sums_drop(struct td__fsdp_flat *flat)
{
    struct td__flat_sums *sums = flat->sums;
    if (!sums)
        return;
    drop_received(flat);
    while (sums->count)
        td_tensor_release(sums->sums[--sums->count]);
    while (sums->spare_count)
        td_tensor_release(sums->spare[--sums->spare_count]);
}

void td__flat_sums_free(struct td__fsdp_flat *flat)
{
    td__flat_sums_drop(flat);
    free(flat->sums);
    flat->sums = NULL;
}

/* ---- A round --------------------------------------------------------------------------------------------------- */

static td_status add_view(struct td__flat_sums *sums, struct td__storage *storage, td_dtype dtype,
                          int64_t first, int64_t count)
{
    sums->views[sums->view_count] = td__flat_view(storage, dtype, first, count);
    return sums->views[sums->view_count++] ? TD_OK : td__error_status();
}

/* Views of what each rank gets: its chunk, or nothing of a rank that has computed nothing. */
static td_status cut_sent(struct td__fsdp_flat *flat, struct td__storage *from, bool computes)
{
    for (int r = 0; r < flat->unit->ranks->group->size; r++) {
        int64_t first, count = chunk(flat, r, &first);
        TD_TRY(add_view(flat->sums, from, flat->reduce, first, computes ? count : 0));
    }
    return TD_OK;
}

/* Memory for this rank's chunk of all slices of the round, and views of what each rank sends. */
static td_status cut_received(struct td__fsdp_flat *flat, int computing)
{
    struct td__flat_sums *sums = flat->sums;
    int64_t count = own_chunk(flat);
    size_t width = td_dtype_size(flat->reduce);
    sums->received = td__storage_create(flat->device, "td_fsdp",
                                        (size_t)count * (size_t)computing * width);
    if (!sums->received)
        return td__error_status();
    sums->counted = (size_t)flat->numel * width; /* the same on all ranks, which decide by it */
    td__fsdp_count(flat->unit->all, (ptrdiff_t)sums->counted);
    for (int r = 0; r < flat->unit->ranks->group->size; r++)
        TD_TRY(add_view(sums, sums->received, flat->reduce, r < computing ? count * r : 0,
                        r < computing ? count : 0));
    return TD_OK;
}

static td_status exchange(struct td__fsdp_flat *flat, struct td__storage *from)
{
    const struct td__fsdp_slices *slices = flat->unit->all->slices;
    struct td__flat_sums *sums = flat->sums;
    td_group *group = flat->unit->ranks->group;
    int computing = td__fsdp_round_size(slices, slices->round);
    TD_TRY(cut_sent(flat, from, group->rank < computing));
    if (slices->reduces) {
        sums->node = make_sum(flat);
        if (!sums->node)
            return td__error_status();
        return td_reduce_scatter(sums->node, sums->views, group->size, TD_SUM, group,
                                 &flat->reducing);
    }
    TD_TRY(cut_received(flat, computing));
    return td_all_to_all(sums->views + group->size, group->size, sums->views, group->size, group,
                         &flat->reducing);
}

td_status td__flat_sums_start(struct td__fsdp_flat *flat, struct td__storage *from)
{
    td_group *group = flat->unit->ranks->group;
    if (!flat->sums && !(flat->sums = calloc(1, sizeof *flat->sums)))
        return td__fail_nomem("td_fsdp");
    flat->sums->views = calloc(2 * (size_t)group->size, sizeof(td_tensor *));
    if (!flat->sums->views)
        return td__fail_nomem("td_fsdp");
    if (group->size == 1)
        return cut_sent(flat, from, true);
    int64_t sent = flat->numel - own_chunk(flat);
    if (!td__fsdp_shadows(flat->unit->all))
        flat->unit->all->stats.reduced_bytes += sent * (int64_t)td_dtype_size(flat->reduce);
    return exchange(flat, from);
}

/* ---- The tree --------------------------------------------------------------------------------------------------- */

/* Whether `right` is the right half of a node whose left half is `left`. */
static bool is_sibling(struct td__slice_range left, struct td__slice_range right)
{
    return left.count == right.count && left.first + left.count == right.first &&
           left.first % (2 * left.count) == 0;
}

/* Adds the sum of a node. `piece` is one of this rank's sums, which is taken over, or it is `borrowed` and copied where it
 * stays, or is to be converted. */
static td_status add_node(struct td__fsdp_flat *flat, struct td__slice_range node, td_tensor *piece,
                          bool borrowed)
{
    struct td__flat_sums *sums = flat->sums;
    bool joins = sums->count && is_sibling(sums->nodes[sums->count - 1], node);
    if (borrowed && (!joins || is_half(flat->reduce))) {
        td_tensor *copy = make_sum(flat);
        td_status status = td__flat_copy(copy, piece);
        if (status) {
            td_tensor_release(copy);
            return status;
        }
        piece = copy;
        borrowed = false;
    }
    while (sums->count && is_sibling(sums->nodes[sums->count - 1], node)) {
        td_tensor *left = sums->sums[--sums->count];
        node = (struct td__slice_range){sums->nodes[sums->count].first, 2 * node.count};
        td_status status = !left->layout.numel
                               ? TD_OK
                               : td__kernels_of(left)->binary(TD_BINARY_ADD, left, left, piece);
        if (!borrowed)
            keep_spare(sums, piece);
        piece = left;
        borrowed = false;
        if (status) {
            keep_spare(sums, left);
            return status;
        }
    }
    sums->nodes[sums->count] = node;
    sums->sums[sums->count++] = piece;
    return TD_OK;
}

static td_status add_round(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_slices *slices = flat->unit->all->slices;
    struct td__flat_sums *sums = flat->sums;
    int size = flat->unit->ranks->group->size, first = slices->round * slices->computing;
    if (sums->node) {
        td_tensor *node = sums->node;
        sums->node = NULL;
        return add_node(flat, (struct td__slice_range){first, size}, node, false);
    }
    td_tensor **pieces = sums->views + (size == 1 ? 0 : size);
    for (int r = 0; r < td__fsdp_round_size(slices, slices->round); r++)
        TD_TRY(add_node(flat, (struct td__slice_range){first + r, 1}, pieces[r], true));
    return TD_OK;
}

/* ---- The average -------------------------------------------------------------------------------------------------- */

/* The ranks that have this shard gather their parts of it in `shard`. */
static td_status gather_parts(struct td__fsdp_flat *flat, td_tensor *mine, td_tensor *shard)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    int count = replicas_of(flat), self = ranks->replicas ? ranks->replicas->rank : 0;
    td_tensor **parts = calloc((size_t)count, sizeof(td_tensor *));
    td_status status = parts ? TD_OK : td__fail_nomem("td_fsdp");
    int64_t begin = flat->cuts[ranks->rank];
    for (int r = 0; r < count && !status; r++) {
        int64_t first = cut(flat, ranks->rank, r);
        parts[r] = td__narrow(shard, 0, first - begin, cut(flat, ranks->rank, r + 1) - first);
        status = parts[r] ? TD_OK : td__error_status();
    }
    if (!status)
        status = td__flat_copy(parts[self], mine);
    if (!status && count > 1)
        status = td_all_gather(parts, count, parts[self], ranks->replicas, NULL);
    for (int r = 0; parts && r < count; r++)
        td_tensor_release(parts[r]);
    free(parts);
    return status;
}

/* Gradients of a flat that is whole stay in its buffer. */
static td_status finish_whole(struct td__fsdp_flat *flat, td_tensor *sum)
{
    td_tensor *whole = td__flat_view(flat->grads, flat->dtype, 0, flat->numel);
    td_status status = whole ? gather_parts(flat, sum, whole) : td__error_status();
    td_tensor_release(whole);
    for (int i = 0; i < flat->count && !status; i++) /* also after a shadow of a pass */
        td__leaf_place_grad(flat->params[i].tensor, flat->params[i].shard_grad, false);
    return status;
}

static td_status finish_shard(struct td__fsdp_flat *flat, td_tensor *sum)
{
    if (replicas_of(flat) == 1) {
        flat->reduced = td_tensor_retain(sum);
        return TD_OK;
    }
    int64_t count = td__flat_shard_count(flat);
    flat->reduced = td__empty("td_fsdp", &count, 1, sum->layout.dtype, flat->device);
    return flat->reduced ? gather_parts(flat, sum, flat->reduced) : td__error_status();
}

static td_status finish(struct td__fsdp_flat *flat)
{
    td_tensor *sum = flat->sums->sums[0];
    int total = flat->unit->all->slices->total;
    if (total > 1 && sum->layout.numel)
        TD_TRY(td__kernels_of(sum)->binary_scalar(TD_BINARY_MUL, sum, sum, 1.0 / total, false));
    return flat->is_whole ? finish_whole(flat, sum) : finish_shard(flat, sum);
}

td_status td__flat_sums_add(struct td__fsdp_flat *flat, td_status status, bool *complete)
{
    const struct td__fsdp_slices *slices = flat->unit->all->slices;
    bool last = (slices->round + 1) * slices->computing >= slices->total;
    if (!status)
        status = add_round(flat);
    drop_received(flat);
    if (!status && last)
        status = finish(flat);
    *complete = !status && last;
    if (status || last)
        td__flat_sums_drop(flat);
    return status;
}
