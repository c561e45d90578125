/* Tiers: which flats live on the device, on the host, and in files. */
#include "parallel/fsdp_offload.h"

#include "base/fail.h"
#include "base/map.h"
#include "group/process_group.h"

#include <stdlib.h>
#include <string.h>

enum {
    COPIES = 4
}; /* of an element: the parameter, its gradient, and two numbers of optimizer state */

void td__tiers_init(struct td__tiers *tiers, const td_fsdp_offload *options)
{
    *tiers = (struct td__tiers){.options = options,
                                .device = options->device_bytes,
                                .host = options->host_bytes ? options->host_bytes : SIZE_MAX};
}

static bool take(size_t *left, size_t bytes)
{
    if (*left < bytes)
        return false;
    *left -= bytes;
    return true;
}

/* Of the largest shard, which is the same on all ranks: cuts are at most a block away from equal ones. */
static size_t bytes_of(const struct td__fsdp_flat *flat, const td_fsdp_offload *options)
{
    size_t ranks = (size_t)flat->unit->ranks->size;
    size_t share = ((size_t)flat->numel + ranks - 1) / ranks;
    size_t width = td_dtype_size(flat->dtype);
    if (!flat->requires_grad)
        return share * width;
    return share * (options->element_bytes ? options->element_bytes : width * COPIES);
}

static td_status place(struct td__fsdp_flat *flat, struct td__tiers *tiers)
{
    const td_fsdp_offload *options = tiers->options;
    size_t bytes = bytes_of(flat, options);
    bool elsewhere = !flat->device->is_host;
    if (elsewhere && take(&tiers->device, bytes))
        return TD_OK;
    flat->home = td__host_device();
    if (elsewhere)
        flat->is_whole = false;
    if (take(&tiers->host, bytes))
        return TD_OK;
    flat->in_file = options->directory != NULL;
    if (flat->in_file)
        return TD_OK;
    return td_fail(
        TD_ERR_NOMEM,
        "its shard, gradients and optimizer state need %zu bytes on the host, and %zu of "
        "offload.host_bytes are left; set offload.directory, or raise the limits",
        bytes, tiers->host);
}

td_status td__offload_place(struct td__fsdp_flat *flat, struct td__tiers *tiers)
{
    flat->home = flat->device;
    flat->in_file = false;
    td_status status = TD_OK;
    if (tiers->options->enabled)
        status = place(flat, tiers);
    int32_t where = flat->in_file ? 2 : flat->home != flat->device;
    tiers->placement = td__hash(tiers->placement, &where, sizeof where);
    return td__fsdp_fail(flat->unit, "offloading", status);
}

/* The error of another rank, which has the lowest number of those that have one. */
static td_status fail_with(const struct td__fsdp_ranks *ranks, int64_t first)
{
    return td_fail((td_status)(first & 0xff),
                   "td_fsdp: rank %d could not make its shards, and its error says why; this is "
                   "rank %d, where it went well",
                   (int)(first >> 8), td_get_rank(ranks->group));
}

td_status td__offload_agree(const struct td__fsdp_ranks *ranks, const struct td__tiers *tiers,
                            td_status status)
{
    const td_group *group = ranks->group;
    if (group->size == 1)
        return status;
    struct td__error error;
    td__error_save(&error);
    int64_t none = (int64_t)group->size << 8;
    int64_t placement = (int64_t)(tiers->placement & INT64_MAX);
    int64_t all[3] = {status ? (int64_t)group->rank << 8 | (int)status : none, placement,
                      -placement};
    td_status agreed = td_group_all_reduce(all, all, 3, TD_I64, TD_MIN, ranks->group, NULL);
    if (status) {
        td__error_restore(&error);
        return status;
    }
    if (agreed)
        return agreed;
    if (all[0] != none)
        return fail_with(ranks, all[0]);
    if (all[1] == -all[2])
        return TD_OK;
    return td_fail(
        TD_ERR_MISMATCH,
        "td_fsdp: the ranks keep different units on the device, on the host and in files; "
        "all ranks must pass the same td_fsdp_offload");
}
