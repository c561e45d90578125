/* Sequential, random and distributed samplers. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/host.h"
#include "base/slice_range.h"
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

/* How many slices of each batch this rank has. */
static int64_t slices_of(const td_sampler_options *options)
{
    if (options->slices_apart)
        return td__slices_apart(options->slices, options->num_replicas, options->rank);
    return td__slices_of(options->slices, options->num_replicas, options->rank).count;
}

/* Where index i of the share is in the epoch, which is repeated as padding. */
static int64_t place_of(const struct share *share, int64_t i)
{
    const td_sampler_options *options = &share->options;
    if (!options->slices)
        return (options->rank + i * options->num_replicas) % share->size;
    int first = td__slices_of(options->slices, options->num_replicas, options->rank).first;
    int64_t row = slices_of(options) * options->slice_size; /* of this rank in a batch */
    int64_t slice = i % row / options->slice_size;          /* its number among this rank's */
    slice = options->slices_apart ? options->rank + slice * options->num_replicas : first + slice;
    return ((i / row * options->slices + slice) * options->slice_size + i % options->slice_size) %
           share->size;
}

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
        int64_t at = place_of(share, i);
        indices[i] = all ? all[at] : at;
    }
    free(all);
    return TD_OK;
}

static const td_sampler_ops share_ops = {
    .size = size_of_share, .order = share_order, .destroy = free};

bool td__sampler_has_slices(const td_sampler *sampler)
{
    return sampler->ops == &share_ops && ((const struct share *)sampler->self)->options.slices;
}

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

static td_status check_slices(const td_sampler_options *options)
{
    int slices = options->slices;
    if (!slices && !options->slice_size && !options->slices_apart)
        return TD_OK;
    if (slices < options->num_replicas || slices > 1 << 20 || (slices & (slices - 1)))
        return td_fail(
            TD_ERR_INVALID,
            "td_distributed_sampler: the number of slices is %d; it is a power of two, at "
            "least the number of ranks, %d, and at most %d",
            slices, options->num_replicas, 1 << 20);
    if (options->slice_size < 1 || options->slice_size > INT64_MAX / slices / 2)
        return td_fail(TD_ERR_INVALID,
                       "td_distributed_sampler: a slice cannot have %" PRId64 " samples",
                       options->slice_size);
    return TD_OK;
}

/* How many indices the share of each rank, or with slices of this one, has. */
static int64_t count_share(const td_sampler_options *options, int64_t size)
{
    int64_t unit = options->slices ? options->slices * options->slice_size : options->num_replicas;
    int64_t units = size / unit + (!options->drop_last && size % unit != 0);
    return options->slices ? units * options->slice_size * slices_of(options) : units;
}

td_sampler *td_distributed_sampler(td_dataset *dataset, const td_sampler_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_sampler_options chosen = options ? *options : (td_sampler_options){0};
    if (!dataset)
        return td__null(__func__);
    if (find_replica(&chosen) || check_slices(&chosen))
        return NULL;
    struct share *share = malloc(sizeof *share);
    if (!share) {
        td__fail_nomem("td_distributed_sampler");
        return NULL;
    }
    int64_t size = td_dataset_size(dataset);
    *share = (struct share){.size = size, .each = count_share(&chosen, size), .options = chosen};
    td_sampler *sampler = td_sampler_create(&share_ops, share);
    if (!sampler)
        free(share);
    return sampler;
}
