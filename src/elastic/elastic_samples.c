/* Which samples a slice has: a function of the step alone.
 *
 *     epoch       step / batches of an epoch                    batch     step % batches
 *     slice k     positions (batch * slices + k) * slice_size …  of the epoch's order
 *
 * The order is that of td_distributed_sampler() with slices on one rank. A loader reads the slices of this rank ahead; when
 * the ranks change, or a step is repeated, it begins anew at the step. */
#include "base/fail.h"
#include "data/dataset.h"
#include "elastic/elastic_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct td__samples {
    td_elastic *elastic;
    td_sampler *whole; /* all samples of all epochs, of which only the order is used */
    td_sampler *mine;  /* those of this rank, from a batch on */
    td_loader *loader;
    int slices;      /* for which these were made; 0: none yet */
    int64_t batches; /* of an epoch */
    int64_t from;    /* the first batch of `mine` */
    struct td__elastic_share share;
    int64_t next_step; /* what the loader gives next; -1: nothing */
    int next_slice;
    int64_t *order; /* of one epoch, for records; NULL: none yet */
    int64_t order_epoch;
};

static int64_t in_step(const struct td__samples *samples)
{
    return samples->slices * samples->elastic->options.slice_size;
}

/* ---- The order of this rank --------------------------------------------------------------------------------- */

static int64_t mine_size(void *self)
{
    const struct td__samples *samples = self;
    return (samples->batches - samples->from) * samples->share.count *
           samples->elastic->options.slice_size;
}

static td_status whole_order(const struct td__samples *samples, int64_t epoch, int64_t **order)
{
    *order = malloc((size_t)(samples->batches * in_step(samples) + 1) * sizeof **order);
    if (!*order)
        return td__fail_nomem("td_elastic: the order of an epoch");
    return samples->whole->ops->order(samples->whole->self, epoch, 0, *order);
}

static td_status mine_order(void *self, int64_t epoch, uint64_t seed, int64_t *indices)
{
    const struct td__samples *samples = self;
    int64_t size = samples->elastic->options.slice_size, *order;
    (void)seed;
    td_status status = whole_order(samples, epoch, &order);
    for (int64_t b = samples->from; b < samples->batches && !status; b++)
        for (int k = 0; k < samples->share.count; k++, indices += size) {
            int slice = samples->share.first + k * samples->share.stride;
            memcpy(indices, order + (b * samples->slices + slice) * size,
                   (size_t)size * sizeof *indices);
        }
    free(order);
    return status;
}

static const td_sampler_ops mine_ops = {.size = mine_size, .order = mine_order};

/* ---- Reading -------------------------------------------------------------------------------------------------- */

static void drop(struct td__samples *samples)
{
    td_loader_destroy(samples->loader);
    td_sampler_release(samples->mine);
    td_sampler_release(samples->whole);
    free(samples->order);
    samples->loader = NULL;
    samples->mine = samples->whole = NULL;
    samples->order = NULL;
    samples->slices = 0;
    samples->next_step = -1;
}

/* The number of slices is known when the ranks have compared theirs. */
static td_status provide(struct td__samples *samples)
{
    const td_elastic_options *options = &samples->elastic->options;
    if (samples->slices == samples->elastic->slices)
        return TD_OK;
    drop(samples);
    samples->whole = td_distributed_sampler(
        options->dataset, &(td_sampler_options){.no_shuffle = options->no_shuffle,
                                                .drop_last = options->drop_last,
                                                .seed = options->seed,
                                                .num_replicas = 1,
                                                .slices = samples->elastic->slices,
                                                .slice_size = options->slice_size});
    samples->mine = td_sampler_create(&mine_ops, samples);
    if (!samples->whole || !samples->mine)
        return td__error_status();
    samples->slices = samples->elastic->slices;
    samples->batches = td_sampler_size(samples->whole) / in_step(samples);
    if (samples->batches < 1) {
        samples->slices = 0;
        return td_fail(TD_ERR_INVALID,
                       "td_elastic: %d slices of %" PRId64 " samples are more than the %" PRId64
                       " of the dataset, and drop_last is set",
                       samples->elastic->slices, options->slice_size,
                       td_dataset_size(options->dataset));
    }
    samples->loader = td_loader_create(options->dataset,
                                       &(td_loader_options){.batch_size = options->slice_size,
                                                            .sampler = samples->mine,
                                                            .workers = options->workers});
    return samples->loader ? TD_OK : td__error_status();
}

/* The loader begins at a step, with the slices that this rank has now. */
static void seek(struct td__samples *samples, int64_t step)
{
    td_loader_reset(samples->loader);
    samples->share = td__elastic_share(samples->elastic, samples->elastic->active_rank);
    samples->from = step % samples->batches;
    td_sampler_set_epoch(samples->mine, step / samples->batches);
    samples->next_step = step;
    samples->next_slice = samples->share.first;
}

td_status td__samples_get(td_elastic *elastic, int64_t step, int slice, td_batch *batch)
{
    struct td__samples *samples = elastic->samples;
    *batch = (td_batch){0};
    if (!samples)
        return TD_OK;
    TD_TRY(provide(samples));
    struct td__elastic_share share = td__elastic_share(elastic, elastic->active_rank);
    bool same = share.first == samples->share.first && share.count == samples->share.count &&
                share.stride == samples->share.stride;
    bool begins = step % samples->batches == 0 && slice == share.first;
    if (!same || begins || samples->next_step != step || samples->next_slice != slice)
        seek(samples, step);
    if (!td_loader_next(samples->loader, batch)) {
        samples->next_step = -1;
        return td_loader_status(samples->loader)
                   ? td_loader_status(samples->loader)
                   : td_fail(TD_ERR_STATE, "td_elastic: the epoch of step %" PRId64 " is over",
                             step);
    }
    samples->next_slice += share.stride;
    bool last = samples->next_slice == share.first + share.count * share.stride;
    samples->next_step = step + last;
    samples->next_slice = last ? share.first : samples->next_slice;
    return TD_OK;
}

int64_t td__samples_epoch(const td_elastic *elastic, int64_t step)
{
    return elastic->samples && elastic->samples->batches ? step / elastic->samples->batches : 0;
}

const int64_t *td__samples_of_step(td_elastic *elastic, int64_t step)
{
    struct td__samples *samples = elastic->samples;
    if (provide(samples))
        return NULL;
    int64_t epoch = step / samples->batches;
    if (!samples->order || samples->order_epoch != epoch) {
        free(samples->order);
        samples->order_epoch = epoch;
        if (whole_order(samples, epoch, &samples->order)) {
            free(samples->order);
            samples->order = NULL;
            return NULL;
        }
    }
    return samples->order + step % samples->batches * in_step(samples);
}

td_status td__samples_make(td_elastic *elastic, struct td__samples **samples_out)
{
    struct td__samples *samples = calloc(1, sizeof *samples);
    if (!samples)
        return td__fail_nomem("td_elastic_create");
    samples->elastic = elastic;
    samples->next_step = -1;
    *samples_out = samples;
    return TD_OK;
}

void td__samples_free(struct td__samples *samples)
{
    if (!samples)
        return;
    drop(samples);
    free(samples);
}
