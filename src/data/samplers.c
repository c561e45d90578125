/* Sequential, random and distributed samplers. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/host.h"
#include "data/dataset.h"
#include "tensor/random_internal.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- Sequential and random: `self` is the dataset --------------------------------------------- */

static int64_t size_of_dataset(void *self)
{
    return td_dataset_size(self);
}

static void release_dataset(void *self)
{
    td_dataset_release(self);
}

static td_status sequential_order(void *self, int64_t epoch, uint64_t seed, int64_t *indices)
{
    (void)epoch, (void)seed;
    for (int64_t i = 0, size = td_dataset_size(self); i < size; i++)
        indices[i] = i;
    return TD_OK;
}

/* torch.randperm(size, seed) */
static void shuffle(uint64_t seed, int64_t *indices, int64_t size)
{
    td_generator generator = {.lock = PTHREAD_MUTEX_INITIALIZER};
    td__mt19937_seed(&generator.engine, seed);
    td__generator_permutation(&generator, indices, size);
    pthread_mutex_destroy(&generator.lock);
}

static td_status random_order(void *self, int64_t epoch, uint64_t seed, int64_t *indices)
{
    (void)epoch;
    shuffle(seed, indices, td_dataset_size(self));
    return TD_OK;
}

static const td_sampler_ops sequential_ops = {
    .size = size_of_dataset, .order = sequential_order, .destroy = release_dataset};
static const td_sampler_ops random_ops = {
    .size = size_of_dataset, .order = random_order, .destroy = release_dataset, .draws_seed = true};

static td_sampler *over_dataset(td_dataset *dataset, const td_sampler_ops *ops)
{
    td_sampler *sampler = dataset ? td_sampler_create(ops, dataset) : NULL;
    if (sampler)
        td_dataset_retain(dataset);
    return sampler;
}

td_sampler *td_sequential_sampler(td_dataset *dataset)
{
    return over_dataset(dataset, &sequential_ops);
}

td_sampler *td_random_sampler(td_dataset *dataset)
{
    return over_dataset(dataset, &random_ops);
}

/* ---- Distributed ------------------------------------------------------------------------------ */

struct share {
    int64_t size; /* of the dataset */
    int64_t each; /* of a rank's share */
    td_sampler_options options;
};

static int64_t size_of_share(void *self)
{
    return ((struct share *)self)->each;
}

/* Index i of the share is index rank + i * num_replicas of the epoch, which is repeated as
 * padding. */
static td_status share_order(void *self, int64_t epoch, uint64_t drawn, int64_t *indices)
{
    (void)drawn;
    const struct share *share = self;
    const td_sampler_options *options = &share->options;
    int64_t *all = NULL;
    if (!options->no_shuffle) {
        if ((uint64_t)share->size < SIZE_MAX / sizeof *all)
            all = malloc(((size_t)share->size + 1) * sizeof *all);
        if (!all)
            return td_fail(TD_ERR_NOMEM, "distributed sampler: no memory for %" PRId64 " indices",
                           share->size);
        shuffle(options->seed + (uint64_t)epoch, all, share->size);
    }
    for (int64_t i = 0; i < share->each; i++) {
        int64_t at = (options->rank + i * options->num_replicas) % share->size;
        indices[i] = all ? all[at] : at;
    }
    free(all);
    return TD_OK;
}

static const td_sampler_ops share_ops = {
    .size = size_of_share, .order = share_order, .destroy = free};

/* Defaults come from the world. A rank of 0 is a default, too, if the world has num_replicas ranks:
 * {.num_replicas = world_size} then gives each rank its own share, as in PyTorch, instead of rank
 * 0's to all. */
static td_status find_replica(td_sampler_options *options)
{
    int rank = 0, size = 0;
    bool world = td__identity(&rank, &size);
    bool open_size = options->num_replicas == 0 || options->num_replicas == -1;
    bool open_rank = options->rank == -1 ||
                     (options->rank == 0 &&
                      (open_size || (world && size == options->num_replicas)));
    if (!world && (open_size || open_rank))
        return td_fail(TD_ERR_STATE,
                       "td_distributed_sampler: there is no world, so %s must be set; or call "
                       "td_init_process_group() first",
                       !open_rank  ? "num_replicas"
                       : open_size ? "rank and num_replicas"
                                   : "the rank");
    if (open_size)
        options->num_replicas = size;
    if (open_rank)
        options->rank = rank;
    if (options->num_replicas < 1)
        return td_fail(TD_ERR_INVALID, "td_distributed_sampler: there cannot be %d replicas",
                       options->num_replicas);
    if (options->rank < 0 || options->rank >= options->num_replicas)
        return td_fail(TD_ERR_INVALID,
                       "td_distributed_sampler: rank %d is outside the interval [0, %d]",
                       options->rank, options->num_replicas - 1);
    return TD_OK;
}

td_sampler *td_distributed_sampler(td_dataset *dataset, const td_sampler_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_sampler_options chosen = options ? *options : (td_sampler_options){0};
    if (!dataset)
        return td__null(__func__);
    if (find_replica(&chosen))
        return NULL;
    struct share *share = malloc(sizeof *share);
    if (!share) {
        td__fail_nomem("td_distributed_sampler");
        return NULL;
    }
    int64_t size = td_dataset_size(dataset), replicas = chosen.num_replicas;
    *share = (struct share){.size = size, .options = chosen};
    share->each = size / replicas + (!chosen.drop_last && size % replicas != 0);
    td_sampler *sampler = td_sampler_create(&share_ops, share);
    if (!sampler)
        free(share);
    return sampler;
}
