/* The sum of one buffer over the slices of all ranks; see slices.h. */
#include "parallel/slices.h"

#include "base/fail.h"
#include "group/process_group.h"
#include "group/root.h"
#include "group/work.h"
#include "peer/endpoint.h"

#include <stdlib.h>

/* ---- Memory ---------------------------------------------------------------------------------------------- */

static bool is_half(const td_tensor *buffer)
{
    return buffer->layout.dtype == TD_F16 || buffer->layout.dtype == TD_BF16;
}

static td_tensor *make_part(struct td__slice_sums *sums, const td_tensor *buffer)
{
    if (sums->spare_count)
        return sums->spare[--sums->spare_count];
    td_dtype dtype = is_half(buffer) ? TD_F32 : buffer->layout.dtype;
    return td__empty("a sum over slices", &buffer->layout.numel, 1, dtype, buffer->storage->device);
}

static void keep_spare(struct td__slice_sums *sums, td_tensor *part)
{
    if (sums->spare_count < TD__MAX_PARTS)
        sums->spare[sums->spare_count++] = part;
    else
        td_tensor_release(part);
}

static void drop_calls(struct td__slice_sums *sums)
{
    for (int i = 0; i < sums->work_count; i++) {
        td__work_finish(sums->works[i]);
        td_work_release(sums->works[i]);
    }
    for (int i = 0; i < TD__MAX_PARTS; i++) {
        td_tensor_release(sums->received[i]);
        sums->received[i] = NULL;
    }
    sums->work_count = 0;
}

void td__slice_sums_drop(struct td__slice_sums *sums)
{
    drop_calls(sums);
    while (sums->count)
        keep_spare(sums, sums->sums[--sums->count]);
}

void td__slice_sums_free(struct td__slice_sums *sums)
{
    td__slice_sums_drop(sums);
    while (sums->spare_count)
        td_tensor_release(sums->spare[--sums->spare_count]);
}

/* The two tensors, which are alone in their storages, swap their elements. */
static td_status swap(td_tensor *a, td_tensor *b)
{
    TD_TRY(td__prepare_write(a));
    TD_TRY(td__prepare_write(b));
    td__storage_swap_memory(a->storage, b->storage);
    return TD_OK;
}

/* ---- The slices of this rank ------------------------------------------------------------------------------- */

td_status td__slice_sums_begin(struct td__slice_sums *sums, int total, td_group *group)
{
    td__slice_sums_drop(sums);
    group = td__group_enter(group, "slices");
    if (!group)
        return td__error_status();
    TD_TRY(td__slices_check("slices", total, group->size));
    sums->group = group;
    sums->total = total;
    sums->size = group->size;
    sums->rank = group->rank;
    sums->next = td__slices_of(total, group->size, group->rank).first;
    return TD_OK;
}

static td_status add(td_tensor *sum, const td_tensor *more)
{
    return sum->layout.numel ? td__kernels_of(sum)->binary(TD_BINARY_ADD, sum, sum, more) : TD_OK;
}

/* Whether `right` is the right half of a node whose left half is `left`. */
static bool is_sibling(struct td__slice_range left, struct td__slice_range right)
{
    return left.count == right.count && left.first + left.count == right.first &&
           left.first % (2 * left.count) == 0;
}

td_status td__slice_sums_add(struct td__slice_sums *sums, td_tensor *buffer)
{
    struct td__slice_range node = {sums->next, 1};
    td_tensor *part = make_part(sums, buffer);
    if (!part)
        return td__error_status();
    td_status status = !is_half(buffer)       ? swap(part, buffer)
                       : buffer->layout.numel ? td__kernels_of(part)->copy(part, buffer)
                                              : TD_OK;
    while (!status && sums->count && is_sibling(sums->parts[sums->count - 1], node)) {
        td_tensor *left = sums->sums[--sums->count];
        node = (struct td__slice_range){sums->parts[sums->count].first, 2 * node.count};
        status = add(left, part);
        keep_spare(sums, part);
        part = left;
    }
    sums->parts[sums->count] = node;
    sums->sums[sums->count++] = part;
    sums->next++;
    return status;
}

/* ---- The sum over the ranks -------------------------------------------------------------------------------- */

/* Whether the ranks of each host are a node of their tree: they are added first. */
static bool hosts_are_nodes(const td_group *group)
{
    const struct td__endpoint *endpoint = group->root->endpoint;
    int first = td__endpoint_host(endpoint, group->ranks[0]), each = 1;
    while (each < group->size && td__endpoint_host(endpoint, group->ranks[each]) == first)
        each++;
    if (each == group->size)
        return true;
    for (int r = 0; r < group->size; r++) {
        int host = td__endpoint_host(endpoint, group->ranks[r]);
        for (int other = 0; other < r; other += each)
            if ((td__endpoint_host(endpoint, group->ranks[other]) == host) !=
                (other / each == r / each))
                return false;
    }
    return group->size % each == 0 && (each & (each - 1)) == 0;
}

bool td__slices_backend_has_tree(const td_group *group)
{
    struct td__backend_found found;
    return !td__backend_find(group->host.name, &found) && found.built_in && hosts_are_nodes(group);
}

/* Only the built-in backends reduce along the tree of collective/tree.h, and on the host. */
static bool can_all_reduce(const struct td__slice_sums *sums, const td_tensor *buffer)
{
    return td__on_host(buffer) && td__slices_are_ranks(sums->total, sums->size) &&
           td__slices_backend_has_tree(sums->group);
}

/* Where the chunk of a rank begins. */
static int64_t cut(const struct td__slice_sums *sums, const td_tensor *buffer, int rank)
{
    int64_t numel = buffer->layout.numel;
    return rank == sums->size ? numel : numel / sums->size * rank / 16 * 16;
}

static int64_t chunk(const struct td__slice_sums *sums, const td_tensor *buffer, int rank)
{
    return cut(sums, buffer, rank + 1) - cut(sums, buffer, rank);
}

static int parts_of(const struct td__slice_sums *sums, int rank,
                    struct td__slice_range parts[TD__MAX_PARTS])
{
    return td__slice_parts(td__slices_of(sums->total, sums->size, rank), parts);
}

/* Round k: each rank that has a part k sends its chunks to all. */
static td_status start_round(struct td__slice_sums *sums, const td_tensor *buffer, int k,
                             int64_t *counts)
{
    struct td__slice_range parts[TD__MAX_PARTS];
    int64_t *to = counts, *from = counts + sums->size, received = 0, none = 0;
    const td_tensor *any = sums->sums[0];
    for (int r = 0; r < sums->size; r++) {
        to[r] = k < sums->count ? chunk(sums, buffer, r) : 0;
        from[r] = k < parts_of(sums, r, parts) ? chunk(sums, buffer, sums->rank) : 0;
        received += from[r];
    }
    td_device *device = any->storage->device;
    sums->received[k] = td__empty("slices", &received, 1, any->layout.dtype, device);
    td_tensor *sent = k < sums->count ? td_tensor_retain(sums->sums[k])
                                      : td__empty("slices", &none, 1, any->layout.dtype, device);
    td_status status = sums->received[k] && sent
                           ? td_all_to_all_single(sums->received[k], sent, from, to, sums->group,
                                                  &sums->works[sums->work_count])
                           : td__error_status();
    td_tensor_release(sent);
    sums->work_count += !status;
    return status;
}

static td_status start_rounds(struct td__slice_sums *sums, const td_tensor *buffer)
{
    struct td__slice_range parts[TD__MAX_PARTS];
    int64_t *counts = malloc(2 * (size_t)sums->size * sizeof *counts);
    if (!counts)
        return td__fail_nomem("slices");
    int rounds = 0;
    for (int r = 0; r < sums->size; r++) {
        int count = parts_of(sums, r, parts);
        rounds = count > rounds ? count : rounds;
    }
    td_status status = TD_OK;
    for (int k = 0; k < rounds && !status; k++)
        status = start_round(sums, buffer, k, counts);
    free(counts);
    return status;
}

td_status td__slice_sums_start(struct td__slice_sums *sums, td_tensor *buffer)
{
    if (sums->size == 1)
        return TD_OK;
    sums->reduces = can_all_reduce(sums, buffer);
    if (!sums->reduces)
        return start_rounds(sums, buffer);
    td_tensor *sum = sums->sums[0];
    if (!is_half(buffer)) { /* the memory of a bucket is that which other ranks know */
        TD_TRY(swap(sum, buffer));
        sum = buffer;
    }
    TD_TRY(td_all_reduce(sum, TD_SUM, sums->group, &sums->works[0]));
    sums->work_count = 1;
    return TD_OK;
}

/* ---- The chunk of this rank ---------------------------------------------------------------------------------- */

struct part_list {
    struct td__slice_range *ranges;
    td_tensor **chunks;
    int count, at;
};

static void free_list(struct part_list *list)
{
    for (int i = 0; list->chunks && i < list->count; i++)
        td_tensor_release(list->chunks[i]);
    free(list->ranges);
    free(list->chunks);
}

/* All parts of all ranks in the order of their slices. */
static td_status list_parts(const struct td__slice_sums *sums, int64_t each, struct part_list *list)
{
    struct td__slice_range parts[TD__MAX_PARTS];
    int64_t offsets[TD__MAX_PARTS] = {0};
    size_t most = (size_t)sums->size * TD__MAX_PARTS;
    *list = (struct part_list){.ranges = malloc(most * sizeof *list->ranges),
                               .chunks = calloc(most, sizeof(td_tensor *))};
    if (!list->ranges || !list->chunks)
        return td__fail_nomem("slices");
    for (int r = 0; r < sums->size; r++) {
        int count = parts_of(sums, r, parts);
        for (int k = 0; k < count; k++) {
            td_tensor *view = td__narrow(sums->received[k], 0, offsets[k], each);
            if (!view)
                return td__error_status();
            offsets[k] += each;
            list->ranges[list->count] = parts[k];
            list->chunks[list->count++] = view;
        }
    }
    return TD_OK;
}

/* The sum of a node, in the memory of its first part. */
static td_status sum_node(struct part_list *list, struct td__slice_range node, td_tensor **sum)
{
    const struct td__slice_range *next = &list->ranges[list->at];
    if (next->first == node.first && next->count == node.count) {
        *sum = list->chunks[list->at++];
        return TD_OK;
    }
    int half = node.count / 2;
    td_tensor *right;
    TD_TRY(sum_node(list, (struct td__slice_range){node.first, half}, sum));
    TD_TRY(sum_node(list, (struct td__slice_range){node.first + half, half}, &right));
    return add(*sum, right);
}

/* Gathers the chunks in `whole`. */
static td_status gather(struct td__slice_sums *sums, td_tensor *mine, td_tensor *whole)
{
    td_tensor **parts = calloc((size_t)sums->size, sizeof(td_tensor *));
    td_status status = parts ? TD_OK : td__fail_nomem("slices");
    for (int r = 0; r < sums->size && !status; r++) {
        parts[r] = td__narrow(whole, 0, cut(sums, whole, r), chunk(sums, whole, r));
        status = parts[r] ? TD_OK : td__error_status();
    }
    if (!status)
        status = td_all_gather(parts, sums->size, mine, sums->group, NULL);
    for (int r = 0; parts && r < sums->size; r++)
        td_tensor_release(parts[r]);
    free(parts);
    return status;
}

static td_status finish_rounds(struct td__slice_sums *sums, td_tensor *whole)
{
    struct part_list list;
    td_tensor *mine;
    td_status status = list_parts(sums, chunk(sums, whole, sums->rank), &list);
    if (!status)
        status = sum_node(&list, (struct td__slice_range){0, sums->total}, &mine);
    if (!status)
        status = gather(sums, mine, whole);
    free_list(&list);
    return status;
}

/* ---- The end --------------------------------------------------------------------------------------------------- */

static td_status scale(const struct td__slice_sums *sums, td_tensor *sum)
{
    if (!sum->layout.numel || sums->total == 1)
        return TD_OK;
    return td__kernels_of(sum)->binary_scalar(TD_BINARY_MUL, sum, sum, 1.0 / sums->total, false);
}

static td_status wait_for_calls(struct td__slice_sums *sums)
{
    td_status status = TD_OK;
    for (int i = 0; i < sums->work_count; i++) {
        td__work_finish(sums->works[i]); /* its own timeout bounds it */
        td_status one = td_work_wait(sums->works[i], 0);
        status = status ? status : one;
    }
    return status;
}

td_status td__slice_sums_finish(struct td__slice_sums *sums, td_tensor *buffer)
{
    bool half = is_half(buffer);
    td_status status = wait_for_calls(sums);
    td_tensor *sum = half || sums->size == 1 ? sums->sums[0] : buffer;
    if (!status && sums->size > 1 && !sums->reduces)
        status = finish_rounds(sums, sum);
    if (!status)
        status = scale(sums, sum);
    if (!status && half && buffer->layout.numel)
        status = td__kernels_of(buffer)->copy(buffer, sum);
    else if (!status && sum != buffer)
        status = swap(sum, buffer);
    td__slice_sums_drop(sums);
    return status;
}
