/* Flats: parameters of a unit as one buffer that is cut into shards. */
#include "base/fail.h"
#include "parallel/fsdp_internal.h"
#include "parallel/fsdp_offload.h"
#include "parallel/fsdp_slices.h"
#include "parallel/in_backward.h"
#include "tensor/deferred.h"
#include "tensor/file_memory.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 }; /* bytes; of parameters in a flat, and of flats in a region */

static int64_t align(int64_t value, int64_t to)
{
    return (value + to - 1) / to * to;
}

/* ---- Layout -------------------------------------------------------------------------------------------- */

/* Where a shard may begin: at the start of a parameter, or at a whole block of one. The point next to `wish`. */
static int64_t allowed_cut(const struct td__fsdp_flat *flat, int64_t wish)
{
    int64_t best = 0;
    for (int i = 0; i < flat->count; i++) {
        const struct td__fsdp_param *param = &flat->params[i];
        int64_t end = param->offset + param->whole.numel;
        int64_t within = wish - param->offset;
        if (within >= 0 && wish <= end) {
            int64_t low = param->offset + within / TD__SHARD_BLOCK * TD__SHARD_BLOCK;
            int64_t next = i + 1 < flat->count ? flat->params[i + 1].offset : flat->numel;
            int64_t high = low + TD__SHARD_BLOCK < end ? low + TD__SHARD_BLOCK : next;
            return wish - low <= high - wish ? low : high;
        }
        if (param->offset <= wish)
            best = param->offset;
        else
            return wish - best <= param->offset - wish ? best : param->offset;
    }
    return flat->numel;
}

/* The part of a parameter in [from, to) of the flat. */
static void set_part(struct td__fsdp_param *param, int64_t from, int64_t to)
{
    int64_t begin = param->offset, end = param->offset + param->whole.numel;
    int64_t first = from > begin ? from : begin, last = to < end ? to : end;
    param->count = last > first ? last - first : 0;
    param->first = param->count ? first - begin : from > begin ? param->whole.numel : 0;
    param->at = param->count ? first - from : 0;
}

td_status td__flat_cut_for(const struct td__fsdp_flat *flat, int size, int64_t **cuts)
{
    int64_t *made = calloc((size_t)size + 1, sizeof *made);
    if (!made)
        return td__fail_nomem("td_fsdp");
    for (int r = 1; r < size; r++)
        made[r] = allowed_cut(flat, (int64_t)((__int128)flat->numel * r / size));
    made[size] = flat->numel;
    *cuts = made;
    return TD_OK;
}

td_status td__flat_lay_out(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    int64_t step =
        ALIGNMENT; /* in elements: aligned in all dtypes, of at most ALIGNMENT bytes each */
    step /= (int64_t)(td_dtype_size(flat->compute) < td_dtype_size(flat->dtype)
                          ? td_dtype_size(flat->compute)
                          : td_dtype_size(flat->dtype));
    int64_t offset = 0;
    for (int i = 0; i < flat->count; i++) {
        flat->params[i].offset = offset;
        offset = align(offset + flat->params[i].whole.numel, step);
    }
    flat->numel = offset;
    TD_TRY(td__flat_cut_for(flat, ranks->size, &flat->cuts));
    for (int i = 0; i < flat->count; i++)
        set_part(&flat->params[i], flat->cuts[ranks->rank], flat->cuts[ranks->rank + 1]);
    return TD_OK;
}

size_t td__flat_region_bytes(const struct td__fsdp_flat *flat)
{
    size_t bytes = (size_t)align(flat->numel * (int64_t)td_dtype_size(flat->dtype), ALIGNMENT);
    if (flat->compute != flat->dtype)
        bytes += (size_t)align((int64_t)td__flat_bytes(flat), ALIGNMENT);
    return bytes;
}

/* ---- Tensors ------------------------------------------------------------------------------------------- */

static void shape_flat(struct td__layout *layout, td_dtype dtype, int64_t count)
{
    *layout = (struct td__layout){
        .dtype = dtype, .ndim = 1, .numel = count, .shape = {count}, .strides = {1}};
}

td_tensor *td__flat_view(struct td__storage *storage, td_dtype dtype, int64_t first, int64_t count)
{
    struct td__layout layout;
    shape_flat(&layout, dtype, count);
    return td__tensor_over(storage, first, &layout);
}

td_status td__flat_copy(td_tensor *to, td_tensor *from)
{
    if (!to || !from)
        return td__error_status();
    if (!to->layout.numel)
        return TD_OK;
    if (to->layout.dtype == from->layout.dtype)
        return td__tensor_copy(to, from); /* also to another device */
    return td__kernels_of(to)->copy(to, from);
}

void td__flat_swap_in(struct td__fsdp_flat *flat)
{
    if (flat->is_in || flat->is_whole)
        return;
    flat->is_in = true;
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        td__tensor_set_shard(param->tensor, NULL, NULL);
        td__leaf_set_memory(param->tensor, flat->whole, param->offset, &param->whole);
    }
}

static td_status make_shard(struct td__fsdp_param *param)
{
    struct td__fsdp_flat *flat = param->flat;
    struct td__layout layout;
    shape_flat(&layout, flat->dtype, param->count);
    td__leaf_set_memory(param->tensor, flat->shard, param->at, &layout);
    td_shard shard = {.ndim = param->whole.ndim, .offset = param->first};
    memcpy(shard.shape, param->whole.shape, sizeof shard.shape);
    TD_TRY(td__tensor_set_shard(param->tensor, &shard, &flat->unit->ranks->sharding));
    param->tensor->shard->name = param->name;
    return TD_OK;
}

td_status td__flat_swap_out(struct td__fsdp_flat *flat)
{
    if (!flat->is_in || flat->is_whole)
        return TD_OK;
    flat->is_in = false;
    td_status status = TD_OK;
    for (int i = 0; i < flat->count; i++) {
        td_status made = make_shard(&flat->params[i]);
        status = status ? status : made;
    }
    return status;
}

/* ---- Begin and end --------------------------------------------------------------------------------------- */

static void release_region(void *data, void *region)
{
    (void)data;
    td__fsdp_region_release(region);
}

static struct td__storage *over_region(struct td__fsdp_flat *flat, void *base, size_t at,
                                       size_t bytes)
{
    struct td__storage *storage = td__storage_of(flat->device, (char *)base + at, bytes,
                                                 release_region, flat->region);
    if (storage)
        __atomic_add_fetch(&flat->region->owners, 1, __ATOMIC_RELAXED);
    return storage;
}

static td_status take_memory(struct td__fsdp_flat *flat, struct td__fsdp_region *region, size_t at,
                             const char *directory)
{
    size_t width = td_dtype_size(flat->dtype);
    size_t bytes = (size_t)td__flat_shard_count(flat) * width;
    if (!region) {
        flat->shard = flat->in_file ? td__storage_create_in_file(directory, bytes)
                      : flat->home != flat->device
                          ? td__storage_create_private(bytes)
                          : td__storage_create(flat->home, "td_fsdp", bytes);
        flat->whole = td__storage_of(flat->device, NULL, 0, NULL, NULL);
        if (!flat->shard || !flat->whole)
            return td__fsdp_fail(flat->unit, "the memory", td__error_status());
        return flat->home == flat->device ? TD_OK : td__offload_begin(flat);
    }
    flat->region = region;
    __atomic_add_fetch(&region->owners, 1, __ATOMIC_RELAXED);
    flat->region_at = at;
    flat->compute_at = flat->compute == flat->dtype
                           ? at
                           : at + (size_t)align(flat->numel * (int64_t)width, ALIGNMENT);
    size_t mine = at + (size_t)flat->cuts[flat->unit->ranks->rank] * width;
    flat->shard = over_region(flat, region->mine, mine, bytes);
    flat->whole = over_region(flat, region->all, flat->compute_at, td__flat_bytes(flat));
    flat->has_memory = true;
    return flat->shard && flat->whole ? TD_OK : td__error_status();
}

/* The shard gets its part of a parameter, which is whole. */
static td_status fill_shard(struct td__fsdp_param *param)
{
    td_tensor *whole = NULL;
    if (param->flat->is_deferred)
        TD_TRY(td__fsdp_initial(param, &whole));
    if (!param->count || (param->flat->is_deferred && !whole)) {
        td_tensor_release(whole);
        return TD_OK;
    }
    if (!whole)
        whole = td__contiguous(param->tensor);
    int64_t numel = param->whole.numel;
    td_tensor *line = whole ? td__reshape(whole, &numel, 1, NULL) : NULL;
    td_tensor *from = line ? td__narrow(line, 0, param->first, param->count) : NULL;
    td_tensor *to = td__flat_view(param->flat->shard, param->flat->dtype, param->at, param->count);
    td_status status = from && to ? td__tensor_copy(to, from) : td__error_status();
    td_tensor_release(whole);
    td_tensor_release(line);
    td_tensor_release(from);
    td_tensor_release(to);
    return status;
}

/* The parameter at an element of the whole. */
static const struct td__fsdp_param *param_at(const struct td__fsdp_flat *flat, int64_t offset)
{
    int i = 0;
    while (i + 1 < flat->count && flat->params[i + 1].offset <= offset)
        i++;
    return &flat->params[i];
}

static td_status refuse_write(const struct td__write_lock *lock, int64_t offset)
{
    const struct td__fsdp_flat *flat = (const void *)((const char *)lock -
                                                      offsetof(struct td__fsdp_flat, lock));
    return td_fail(
        TD_ERR_STATE,
        "the parameter \"%s\" is gathered for a pass on rank %d, and must not be written; "
        "change it between td_fsdp_gather_begin() and td_fsdp_gather_end()",
        param_at(flat, offset)->name, td_get_rank(flat->unit->ranks->group));
}

td_status td__flat_begin(struct td__fsdp_flat *flat, struct td__fsdp_region *region, size_t at,
                         const char *directory)
{
    TD_TRY(take_memory(flat, region, at, directory));
    td_tensor *all = td__flat_view(flat->shard, flat->dtype, 0, td__flat_shard_count(flat));
    td_status status = !all                ? td__error_status()
                       : all->layout.numel ? td__kernels_of(all)->fill(all, 0)
                                           : TD_OK;
    td_tensor_release(all);
    for (int i = 0; i < flat->count && !status && !flat->is_remade; i++)
        status = fill_shard(&flat->params[i]);
    TD_TRY(status);
    flat->lock.refuse = refuse_write;
    flat->whole->locked = &flat->lock;
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        td__leaf_place_grad(param->tensor, NULL, false);
        if (flat->is_whole)
            td__leaf_set_memory(param->tensor, flat->shard, param->offset, &param->whole);
        else
            TD_TRY(make_shard(param));
    }
    return TD_OK;
}

static void free_param(struct td__fsdp_param *param)
{
    if (param->stepper)
        td__in_backward_forget(param->stepper, param->step_index);
    if (param->observer)
        td_tensor_remove_hook(param->tensor, param->observer);
    if (param->tensor && param->tensor->shard) {
        param->tensor->shard->sharding = NULL;
        param->tensor->shard->name = NULL;
    }
    td_tensor_release(param->shard_grad);
    td_tensor_release(param->tensor);
    td__deferred_destroy(param->deferred);
    free(param->name);
}

static void end_work(td_work **work)
{
    if (*work)
        td_work_wait(*work, 0);
    td_work_release(*work);
    *work = NULL;
}

static void release_storage(struct td__storage **storage)
{
    if (*storage)
        td__storage_release(*storage);
    *storage = NULL;
}

/* Its memory, and what it has under way. */
static void end_memory(struct td__fsdp_flat *flat)
{
    end_work(&flat->gathering);
    end_work(&flat->reducing);
    td__offload_end(flat);
    td__flat_sums_free(flat);
    td__flat_drop_cut(flat, &flat->gather_parts);
    td__flat_drop_cut(flat, &flat->reduce_parts);
}

static void release_memory(struct td__fsdp_flat *flat)
{
    if (flat->whole)
        flat->whole->locked = NULL;
    release_storage(&flat->shard);
    release_storage(&flat->whole);
    release_storage(&flat->grads);
    release_storage(&flat->reduce_from);
    td_tensor_release(flat->shard_grads);
    td_tensor_release(flat->reduced);
    flat->shard_grads = flat->reduced = NULL;
    td__fsdp_region_release(flat->region);
    flat->region = NULL;
    free(flat->cuts);
    flat->cuts = NULL;
}

void td__flat_end(struct td__fsdp_flat *flat)
{
    end_memory(flat);
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        td__tensor_set_shard(param->tensor, NULL, NULL);
        td__leaf_place_grad(param->tensor, NULL, false);
        td_tensor_release(param->shard_grad);
        param->shard_grad = NULL;
    }
    if (flat->cuts)
        release_memory(flat);
    flat->has_memory = flat->is_in = flat->is_published = flat->adds = flat->in_pass = false;
    flat->is_remade = true;
}

void td__flat_free(struct td__fsdp_flat *flat)
{
    end_memory(flat);
    td__flat_swap_out(flat);
    for (int i = 0; i < flat->count; i++)
        free_param(&flat->params[i]);
    release_memory(flat);
    free(flat->params);
}
