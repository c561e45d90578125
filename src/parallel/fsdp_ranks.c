/* The ranks of a sharded module, and the memory that those of one host share. */
#include "base/clock.h"
#include "base/fail.h"
#include "base/map.h"
#include "device/device_internal.h"
#include "group/process_group.h"
#include "group/root.h"
#include "parallel/fsdp_internal.h"
#include "peer/endpoint.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- Ranks ----------------------------------------------------------------------------------------- */

static td_status all_gather(const struct td__sharding *sharding, const void *mine, size_t bytes,
                            void *all)
{
    const struct td__fsdp_ranks *ranks = (const void *)((const char *)sharding -
                                                        offsetof(struct td__fsdp_ranks, sharding));
    if (!ranks->shards) { /* one rank has all, in one shard */
        memcpy(all, mine, bytes);
        return TD_OK;
    }
    return td_group_all_gather(all, mine, bytes, TD_U8, ranks->shards, NULL);
}

/* Every replica has the same number of ranks, so that those with one shard can be found. */
static td_status check_sizes(const struct td__fsdp_ranks *ranks, int size)
{
    int32_t range[2] = {size, -size};
    TD_TRY(td_group_all_reduce(range, range, 2, TD_I32, TD_MIN, ranks->group, NULL));
    if (range[0] == -range[1])
        return TD_OK;
    return td_fail(
        TD_ERR_INVALID,
        "td_fsdp: the hosts have %d to %d ranks; TD_HYBRID_SHARD needs as many on each, or a shard_size "
        "that divides the number of ranks",
        range[0], -range[1]);
}

static td_status split(struct td__fsdp_ranks *ranks, int shard_size)
{
    td_group *group = ranks->group;
    if (shard_size < 0 || (shard_size > 0 && group->size % shard_size))
        return td_fail(TD_ERR_INVALID, "td_fsdp: shard_size is %d, which does not divide %d ranks",
                       shard_size, group->size);
    int color = shard_size ? group->rank / shard_size
                           : td__endpoint_host(group->root->endpoint, group->ranks[group->rank]);
    td_group *shards = NULL;
    TD_TRY(td_group_split(group, color, 0, NULL, &shards));
    ranks->shards = shards;
    ranks->owns_shards = true;
    TD_TRY(check_sizes(ranks, shards->size));
    if (shards->size == group->size)
        return TD_OK;
    TD_TRY(td_group_split(group, shards->rank, 0, NULL, &ranks->replicas));
    ranks->owns_replicas = true;
    return TD_OK;
}

static td_status find_groups(struct td__fsdp_ranks *ranks, const td_fsdp_options *options)
{
    ranks->group = td__group_enter(options->group, "td_fsdp");
    if (!ranks->group)
        return td__error_status();
    if (ranks->group->size == 1)
        return TD_OK;
    if (options->strategy == TD_NO_SHARD)
        ranks->replicas = ranks->group;
    else if (options->strategy == TD_HYBRID_SHARD)
        TD_TRY(split(ranks, options->shard_size));
    else
        ranks->shards = ranks->group;
    if (ranks->shards && ranks->shards->size > 1) {
        ranks->rank = ranks->shards->rank;
        ranks->size = ranks->shards->size;
    }
    return TD_OK;
}

td_status td__fsdp_ranks_make(const td_fsdp_options *options, struct td__fsdp_ranks **out)
{
    struct td__fsdp_ranks *ranks = calloc(1, sizeof *ranks);
    if (!ranks)
        return td__fail_nomem("td_fsdp");
    *ranks = (struct td__fsdp_ranks){.owners = 1, .size = 1};
    td_status status = find_groups(ranks, options);
    if (status) {
        td__fsdp_ranks_release(ranks);
        return status;
    }
    ranks->sharding = (struct td__sharding){
        .rank = ranks->rank, .size = ranks->size, .all_gather = all_gather};
    *out = ranks;
    return TD_OK;
}

void td__fsdp_ranks_release(struct td__fsdp_ranks *ranks)
{
    if (!ranks || --ranks->owners)
        return;
    if (ranks->owns_shards)
        td_group_destroy(ranks->shards);
    if (ranks->owns_replicas)
        td_group_destroy(ranks->replicas);
    free(ranks->places);
    free(ranks);
}

bool td__fsdp_is_even(const td_fsdp_options *options, const td_group *group)
{
    const struct td__endpoint *endpoint = group->root->endpoint;
    int first = 0;
    if (options->shard_size)
        return options->shard_size > 0 && group->size % options->shard_size == 0;
    for (int r = 0; r < group->size; r++) {
        int same = 0;
        for (int other = 0; other < group->size; other++)
            same += td__endpoint_host(endpoint, group->ranks[other]) ==
                    td__endpoint_host(endpoint, group->ranks[r]);
        first = first ? first : same;
        if (same != first)
            return false;
    }
    return true;
}

/* ---- Failures ----------------------------------------------------------------------------------------- */

td_status td__fsdp_group_state(const struct td__fsdp *fsdp)
{
    const struct td__fsdp_ranks *ranks = fsdp->units[0]->ranks;
    TD_TRY(td__group_state(ranks->group));
    if (ranks->shards)
        TD_TRY(td__group_state(ranks->shards));
    return ranks->replicas ? td__group_state(ranks->replicas) : TD_OK;
}

void td__fsdp_abort(struct td__fsdp *fsdp)
{
    const struct td__fsdp_ranks *ranks = fsdp->units[0]->ranks;
    struct td__error error;
    td__error_save(&error);
    if (td__group_state(ranks->group)) {
        if (ranks->owns_shards)
            td_group_abort(ranks->shards);
        if (ranks->owns_replicas)
            td_group_abort(ranks->replicas);
    }
    td__error_restore(&error);
}

td_status td__fsdp_await(const struct td__fsdp *fsdp)
{
    td_device *waited = NULL;
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            td_device *device = fsdp->units[u]->flats[f].device;
            if (device->is_host || device == waited)
                continue;
            TD_TRY(td_device_synchronize(device));
            waited = device;
        }
    return waited ? td__fsdp_group_state(fsdp) : TD_OK;
}

/* ---- Shared memory ----------------------------------------------------------------------------------- */

td_status td__fsdp_can_share(const struct td__fsdp_ranks *ranks, bool *shares)
{
    *shares = ranks->size > 1;
    if (!*shares)
        return TD_OK;
    const td_group *group = ranks->shards;
    const struct td__endpoint *endpoint = group->root->endpoint;
    for (int r = 0; r < group->size; r++)
        *shares &= td__endpoint_host(endpoint, group->ranks[r]) ==
                   td__endpoint_host(endpoint, group->ranks[0]);
    return TD_OK;
}

/* Rank 0 creates the memory; the others get its descriptor. */
static td_status open_memory(const struct td__fsdp_ranks *ranks, uint64_t key, size_t bytes,
                             int *fd)
{
    const td_group *group = ranks->shards;
    if (ranks->rank > 0)
        return td__endpoint_fetch(group->root->endpoint, group->ranks[0], key,
                                  td__deadline_in_ms(group->timeout_ms), NULL, fd);
    *fd = memfd_create("tandem-fsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd >= 0 && !ftruncate(*fd, (off_t)bytes))
        return td__endpoint_offer(group->root->endpoint, key, *fd);
    return td_fail(TD_ERR_SYSTEM, "td_fsdp: no shared memory of %zu bytes: %s", bytes,
                   td__errno_text(errno));
}

static td_status map(struct td__fsdp_region *region, int fd)
{
    region->all = mmap(NULL, region->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (region->all == MAP_FAILED)
        region->all = NULL;
    region->mine = mmap(NULL, region->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (region->mine == MAP_FAILED)
        region->mine = NULL;
    if (region->all && region->mine)
        return TD_OK;
    return td_fail(TD_ERR_NOMEM, "td_fsdp: no address space for %zu bytes of shared memory: %s",
                   region->bytes, td__errno_text(errno));
}

/* All of them have it, or none. */
static td_status agree(const struct td__fsdp_ranks *ranks, td_status status)
{
    struct td__error error;
    td__error_save(&error);
    int32_t failed = status ? ranks->rank + 1 : 0;
    TD_TRY(td_group_all_reduce(&failed, &failed, 1, TD_I32, TD_MAX, ranks->shards, NULL));
    if (status)
        return td__error_restore(&error);
    if (failed)
        return td_fail(TD_ERR_NOMEM, "td_fsdp: rank %d could not map the shared memory",
                       td_get_global_rank(ranks->shards, failed - 1));
    return TD_OK;
}

td_status td__fsdp_region_make(const struct td__fsdp_ranks *ranks, size_t bytes,
                               struct td__fsdp_region **out)
{
    static _Atomic uint64_t regions;
    uint64_t number = atomic_fetch_add(&regions, 1);
    TD_TRY(td_group_all_reduce(&number, &number, 1, TD_U64, TD_MAX, ranks->shards, NULL));
    if (number >= atomic_load(&regions))
        atomic_store(&regions, number + 1);
    uint64_t key = td__hash(ranks->shards->key ^ 0x6673647020726567u, &number, sizeof number);
    struct td__fsdp_region *region = calloc(1, sizeof *region);
    if (!region)
        return td__fail_nomem("td_fsdp");
    *region = (struct td__fsdp_region){.owners = 1, .bytes = bytes};
    int fd = -1;
    td_status status = open_memory(ranks, key, bytes, &fd);
    if (!status)
        status = map(region, fd);
    status = agree(ranks, status);
    if (ranks->rank == 0)
        td__endpoint_forget(ranks->shards->root->endpoint, key);
    if (fd >= 0)
        close(fd);
    if (status) {
        td__fsdp_region_release(region);
        return status;
    }
    *out = region;
    return TD_OK;
}

void td__fsdp_region_release(struct td__fsdp_region *region)
{
    if (!region || __atomic_sub_fetch(&region->owners, 1, __ATOMIC_ACQ_REL))
        return;
    if (region->all)
        munmap(region->all, region->bytes);
    if (region->mine)
        munmap(region->mine, region->bytes);
    free(region);
}
