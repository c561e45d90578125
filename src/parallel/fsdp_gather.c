/* Gathering: the parameters of a unit become whole before its passes, and shards after them. */
#include "base/clock.h"
#include "base/fail.h"
#include "group/process_group.h"
#include "group/root.h"
#include "parallel/fsdp_offload.h"
#include "peer/endpoint.h"

#include <stdlib.h>
#include <string.h>

/* Added to the version of a whole without memory: a graph that has saved a view of it fails, rather than reads it. */
#define FREED (1u << 30)
#define DROP_FROM ((size_t)16 << 20) /* bytes */

td_status td__fsdp_fail(const struct td__fsdp_unit *unit, const char *what, td_status status)
{
    if (!status)
        return TD_OK;
    if (status == TD_ERR_MISMATCH && td__fsdp_name_difference(unit->all))
        return status;
    char *reason = strdup(td__error_text());
    td_fail(status,
            "td_fsdp: %s of the unit \"%s\", whose first parameter is \"%s\", on rank %d: %s", what,
            unit->name, td__fsdp_first_name(unit), td_get_rank(unit->ranks->group),
            reason ? reason : "");
    free(reason);
    return status;
}

void td__fsdp_count(struct td__fsdp *fsdp, ptrdiff_t bytes)
{
    fsdp->stats.whole_bytes = (size_t)((ptrdiff_t)fsdp->stats.whole_bytes + bytes);
    if (fsdp->stats.whole_bytes > fsdp->stats.whole_bytes_peak)
        fsdp->stats.whole_bytes_peak = fsdp->stats.whole_bytes;
}

td_status td__fsdp_allocate(struct td__fsdp_flat *flat, struct td__storage **storage,
                            td_dtype dtype)
{
    *storage = td__storage_create(flat->device, "td_fsdp",
                                  (size_t)flat->numel * td_dtype_size(dtype));
    if (!*storage)
        return td__fsdp_fail(flat->unit, "the memory", td__error_status());
    td__fsdp_count(flat->unit->all, (ptrdiff_t)(*storage)->bytes);
    return TD_OK;
}

/* ---- One flat ------------------------------------------------------------------------------------------ */

void td__flat_drop_cut(struct td__fsdp_flat *flat, td_tensor ***parts)
{
    for (int r = 0; *parts && r < flat->unit->ranks->size; r++)
        td_tensor_release((*parts)[r]);
    free(*parts);
    *parts = NULL;
}

td_status td__flat_cut(struct td__fsdp_flat *flat, struct td__storage *storage, td_dtype dtype,
                       td_tensor ***parts)
{
    int size = flat->unit->ranks->size;
    *parts = calloc((size_t)size, sizeof **parts);
    if (!*parts)
        return td__fail_nomem("td_fsdp");
    for (int r = 0; r < size; r++) {
        (*parts)[r] = td__flat_view(storage, dtype, flat->cuts[r],
                                    flat->cuts[r + 1] - flat->cuts[r]);
        if ((*parts)[r])
            continue;
        td__flat_drop_cut(flat, parts);
        return TD_ERR_NOMEM;
    }
    return TD_OK;
}

static void free_memory(struct td__fsdp_flat *flat)
{
    if (!flat->has_memory || flat->region)
        return;
    td__offload_filled(flat);
    td__flat_drop_cut(flat, &flat->gather_parts); /* gathered in vain */
    struct td__storage none = {0};
    td__fsdp_count(flat->unit->all, -(ptrdiff_t)flat->whole->bytes);
    td__storage_swap_memory(flat->whole, &none);
    if (none.free_fn)
        none.free_fn(none.data, none.arg);
    atomic_fetch_add(&flat->whole->version, FREED);
    flat->has_memory = false;
}

static td_status gather(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    if (flat->is_whole || flat->has_memory)
        return TD_OK;
    struct td__storage *memory;
    TD_TRY(td__fsdp_allocate(flat, &memory, flat->compute));
    td__storage_swap_memory(flat->whole, memory);
    td__storage_release(memory);
    flat->has_memory = true;
    const struct td__write_lock *locked = flat->whole->locked;
    flat->whole->locked = NULL;
    td_tensor *mine = td__flat_view(flat->shard, flat->dtype, 0, td__flat_shard_count(flat));
    td_status status = mine ? td__flat_cut(flat, flat->whole, flat->compute, &flat->gather_parts)
                            : td__error_status();
    if (!status && flat->offload)
        status = td__offload_fill(flat, flat->gather_parts[ranks->rank]);
    else if (!status)
        status = td__flat_copy(flat->gather_parts[ranks->rank], mine);
    if (!status && ranks->size > 1)
        status = td__offload_filled(flat);
    if (!status && ranks->size > 1) {
        status = td_all_gather(flat->gather_parts, ranks->size, flat->gather_parts[ranks->rank],
                               ranks->shards, &flat->gathering);
        flat->unit->all->stats.gathered_bytes += (flat->numel - td__flat_shard_count(flat)) *
                                                 (int64_t)td_dtype_size(flat->compute);
    }
    td_tensor_release(mine);
    flat->whole->locked = locked;
    if (status) {
        td__flat_drop_cut(flat, &flat->gather_parts);
        free_memory(flat);
    }
    return td__fsdp_fail(flat->unit, "gathering the parameters", status);
}

/* A rank reads what others on its host have through mappings of their memory. What it has read would count as its own, and
 * those that run ahead, and do the work of the others, would seem to need more. To map it anew takes some hundredths of the
 * time of reading it. */
void td__fsdp_exchanged(struct td__fsdp_flat *flat, size_t bytes)
{
    struct td__fsdp *fsdp = flat->unit->all;
    fsdp->exchanged += bytes;
    if (flat->unit->ranks->size == 1 || !flat->device->is_host || fsdp->exchanged < DROP_FROM)
        return;
    fsdp->exchanged = 0;
    td__endpoint_drop_pages(flat->unit->ranks->group->root->endpoint);
}

static td_status wait_for(struct td__fsdp_flat *flat)
{
    td_status status = TD_OK;
    if (flat->gathering) {
        int64_t start = td__now_ns();
        status = td_work_wait(flat->gathering, 0);
        flat->unit->all->stats.wait_ns += td__now_ns() - start;
        td_work_release(flat->gathering);
        flat->gathering = NULL;
        td__fsdp_exchanged(flat, td__flat_bytes(flat));
    }
    td_status filled = td__offload_filled(flat);
    td__flat_drop_cut(flat, &flat->gather_parts);
    return td__fsdp_fail(flat->unit, "gathering the parameters", status ? status : filled);
}

td_status td__flat_leave(struct td__fsdp_flat *flat, bool drop)
{
    td_status status = flat->gathering ? wait_for(flat) : TD_OK;
    td_status swapped = td__flat_swap_out(flat);
    if (drop)
        free_memory(flat);
    return status ? status : swapped;
}

/* ---- Units ----------------------------------------------------------------------------------------------- */

td_status td__unit_gather(struct td__fsdp_unit *unit)
{
    for (int i = 0; i < unit->flat_count; i++)
        TD_TRY(gather(&unit->flats[i]));
    return TD_OK;
}

td_status td__unit_enter(struct td__fsdp_unit *unit)
{
    TD_TRY(td__unit_gather(unit));
    for (int i = 0; i < unit->flat_count; i++) {
        struct td__fsdp_flat *flat = &unit->flats[i];
        TD_TRY(wait_for(flat));
        if (!flat->is_in && flat->whole)
            atomic_store(&flat->whole->version, atomic_load(&flat->shard->version));
        td__flat_swap_in(flat);
    }
    return TD_OK;
}

td_status td__unit_leave(struct td__fsdp_unit *unit, bool drop)
{
    td_status status = TD_OK;
    for (int i = 0; i < unit->flat_count; i++) {
        td_status left = td__flat_leave(&unit->flats[i], drop);
        status = status ? status : left;
    }
    return status;
}

size_t td__unit_bytes(const struct td__fsdp_unit *unit)
{
    size_t bytes = 0;
    for (int i = 0; i < unit->flat_count; i++)
        if (!unit->flats[i].is_whole && !unit->flats[i].region)
            bytes += td__flat_bytes(&unit->flats[i]);
    return bytes;
}

/* ---- Shared memory ------------------------------------------------------------------------------------- */

/* This rank's part of the whole in the dtype of passes. */
static td_status convert(struct td__fsdp_flat *flat)
{
    unsigned version = atomic_load(&flat->shard->version);
    if (!flat->region || flat->compute == flat->dtype ||
        (flat->is_published && version == flat->published))
        return TD_OK;
    int64_t first = flat->cuts[flat->unit->ranks->rank], count = td__flat_shard_count(flat);
    struct td__storage *place = td__storage_of(flat->device,
                                               (char *)flat->region->mine + flat->compute_at,
                                               td__flat_bytes(flat), NULL, NULL);
    td_tensor *from = td__flat_view(flat->shard, flat->dtype, 0, count);
    td_tensor *to = place ? td__flat_view(place, flat->compute, first, count) : NULL;
    td_status status = !from || !to ? td__error_status() : count ? td__flat_copy(to, from) : TD_OK;
    td_tensor_release(from);
    td_tensor_release(to);
    if (place)
        td__storage_release(place);
    flat->published = version;
    flat->is_published = !status;
    return status;
}

td_status td__fsdp_meet(struct td__fsdp *fsdp)
{
    if (!fsdp->shares)
        return TD_OK;
    int64_t start = td__now_ns();
    const struct td__fsdp_ranks *met = NULL;
    for (int u = 0; u < fsdp->count; u++) {
        const struct td__fsdp_ranks *ranks = fsdp->units[u]->ranks;
        if (ranks->size > 1 && (!met || ranks->shards != met->shards))
            TD_TRY(
                td__fsdp_fail(fsdp->units[u], "a forward pass", td_barrier(ranks->shards, NULL)));
        met = ranks->size > 1 ? ranks : met;
    }
    fsdp->stats.wait_ns += td__now_ns() - start;
    return TD_OK;
}

td_status td__fsdp_publish(struct td__fsdp *fsdp)
{
    for (int u = 0; fsdp->shares && u < fsdp->count; u++)
        for (int i = 0; i < fsdp->units[u]->flat_count; i++)
            TD_TRY(convert(&fsdp->units[u]->flats[i]));
    return td__fsdp_meet(fsdp);
}
