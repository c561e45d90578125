/* Loaders: epochs, and the memory of batches; see loader.h.
 *
 * A batch that td_loader_next() returns is a pair of tensors over the storages of its buffer. The
 * next call reuses the storages if the buffer is their only owner; if the user, or a graph, has
 * kept a tensor, the buffer gets new ones. Pinned storages, from which a device may still copy, go
 * back to the cache of pinned memory each time, which gives out only what no copy uses. */
#include "data/loader.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "tensor/random_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORKERS = 1024, MOST_PREFETCH = 1 << 16 };

/* ---- The memory of batches ------------------------------------------------------------------- */

static bool is_shared(const struct td__storage *storage)
{
    return atomic_load_explicit(&storage->owners, memory_order_acquire) > 1;
}

/* Provides one half of a buffer with a storage that is not shared. */
static td_status provide(struct td__storage **storage, size_t bytes, td_device *pinned_for)
{
    if (!pinned_for && *storage && !is_shared(*storage) && (*storage)->bytes >= bytes)
        return TD_OK;
    if (*storage)
        td__storage_release(*storage);
    *storage = pinned_for ? td__storage_create_pinned(pinned_for, bytes)
                          : td__storage_create(td__host_device(), "td_loader", bytes);
    return *storage ? TD_OK : TD_ERR_NOMEM;
}

/* Prepares the buffer of a batch for reading. */
static td_status prepare(td_loader *loader, int64_t batch)
{
    struct td__batch_buffer *buffer = &loader->buffers[batch % loader->buffer_count];
    const td_dataset *dataset = loader->dataset;
    int64_t size = loader->options.batch_size, from = loader->start + batch * size;
    int64_t samples = loader->end - loader->start;
    size_t rows = (size_t)(size < samples ? size : samples);
    TD_TRY(provide(&buffer->input, rows * dataset->input_bytes, loader->options.pin_memory));
    if (dataset->target.ndim >= 0)
        TD_TRY(provide(&buffer->target, rows * dataset->target_bytes, loader->options.pin_memory));
    buffer->left = size < loader->end - from ? size : loader->end - from;
    buffer->status = TD_OK;
    return TD_OK;
}

static td_tensor *tensor_over(struct td__storage *storage, const td_sample_spec *spec, int64_t rows)
{
    struct td__layout layout = {.dtype = spec->dtype, .ndim = spec->ndim + 1, .numel = rows};
    layout.shape[0] = rows;
    for (int d = 0; d < spec->ndim; d++) {
        layout.shape[d + 1] = spec->shape[d];
        layout.numel *= spec->shape[d];
    }
    td__layout_set_contiguous(&layout);
    return td__tensor_over(storage, 0, &layout);
}

/* Takes back the user's batch. */
static void give_back(td_loader *loader)
{
    td_tensor_release(loader->current.input);
    td_tensor_release(loader->current.target);
    loader->current = (td_batch){0};
}

/* ---- The epoch ------------------------------------------------------------------------------- */

static int64_t batches_of(const td_loader *loader, int64_t samples)
{
    int64_t size = loader->options.batch_size;
    return samples / size + (!loader->options.drop_last && samples % size != 0);
}

/* The position behind a batch: how far workers may read when its buffer is prepared. */
static int64_t end_of_batch(const td_loader *loader, int64_t batch)
{
    int64_t size = loader->options.batch_size;
    return batch >= loader->batches ? loader->end : loader->start + batch * size;
}

static td_status begin_epoch(td_loader *loader)
{
    td_sampler *sampler = loader->sampler;
    if (sampler->busy)
        return td_fail(TD_ERR_STATE,
                       "td_loader_next: another loader is in the middle of an epoch with this "
                       "sampler");
    /* The seed that PyTorch draws for its workers, before the one for the order. Where slices have their own numbers, a rank
     * that begins an epoch in one must not take another one away from it. */
    if (!sampler->resumes && !td__sampler_has_slices(sampler))
        td__generator_seed(NULL);
    TD_TRY(td__sampler_begin(sampler));
    loader->order = sampler->order;
    loader->start = sampler->position.taken;
    loader->batches = batches_of(loader, sampler->size - loader->start);
    int64_t most = loader->batches * loader->options.batch_size;
    bool whole = most <= sampler->size - loader->start;
    loader->end = whole ? loader->start + most : sampler->size;
    loader->next = 0;
    int64_t ahead = loader->batches < loader->buffer_count ? loader->batches : loader->buffer_count;
    for (int64_t batch = 0; batch < ahead; batch++) {
        td_status status = prepare(loader, batch);
        if (status) {
            td__sampler_end(sampler);
            return status;
        }
    }
    sampler->busy = true;
    loader->running = true;
    if (loader->thread_count)
        td__loader_allow(loader, loader->start, end_of_batch(loader, ahead));
    return TD_OK;
}

static void end_epoch(td_loader *loader)
{
    give_back(loader);
    if (!loader->running)
        return;
    if (loader->thread_count && loader->generation == td__fork_generation())
        td__loader_halt(loader);
    loader->running = false;
    td__sampler_end(loader->sampler);
}

/* Reuses the buffer of the user's last batch for the batch buffer_count further on. */
static td_status recycle(td_loader *loader)
{
    if (loader->next == 0)
        return TD_OK;
    int64_t batch = loader->next - 1 + loader->buffer_count;
    if (batch >= loader->batches)
        return TD_OK;
    TD_TRY(prepare(loader, batch));
    if (loader->thread_count)
        td__loader_allow(loader, -1, end_of_batch(loader, batch + 1));
    return TD_OK;
}

/* Reads the batch here, or waits for the workers. */
static td_status complete(td_loader *loader, struct td__batch_buffer *buffer)
{
    if (loader->thread_count) {
        td__loader_wait(loader, buffer);
    } else {
        int64_t from = loader->start + loader->next * loader->options.batch_size;
        struct td__piece all = {.buffer = buffer, .from = from, .to = from + buffer->left};
        buffer->status = td__loader_read(loader, &all, &buffer->failed);
        if (buffer->status)
            td__error_save(&buffer->error);
    }
    if (buffer->status)
        return td_fail(buffer->status,
                       "loader: sample %" PRId64 ", number %" PRId64 " of the epoch: %s",
                       loader->order[buffer->failed], buffer->failed, buffer->error.text);
    return TD_OK;
}

static td_status hand_out(td_loader *loader)
{
    struct td__batch_buffer *buffer = &loader->buffers[loader->next % loader->buffer_count];
    int64_t size = loader->options.batch_size;
    int64_t from = loader->start + loader->next * size;
    int64_t rows = size < loader->end - from ? size : loader->end - from;
    TD_TRY(complete(loader, buffer));
    td_batch batch = {.size = rows,
                      .input = tensor_over(buffer->input, &loader->dataset->input, rows)};
    if (batch.input && buffer->target)
        batch.target = tensor_over(buffer->target, &loader->dataset->target, rows);
    if (!batch.input || (buffer->target && !batch.target)) {
        td_tensor_release(batch.input);
        return TD_ERR_NOMEM;
    }
    loader->current = batch;
    loader->next++;
    loader->sampler->position.taken = from + rows;
    return TD_OK;
}

static td_status next_batch(td_loader *loader, bool *is_end)
{
    if (loader->thread_count && loader->generation != td__fork_generation())
        return td_fail(TD_ERR_STATE,
                       "td_loader_next: the workers of this loader are in the parent process; "
                       "make a loader in each process");
    give_back(loader);
    if (!loader->running)
        TD_TRY(begin_epoch(loader));
    else
        TD_TRY(recycle(loader));
    *is_end = loader->next == loader->batches;
    return *is_end ? TD_OK : hand_out(loader);
}

bool td_loader_next(td_loader *loader, td_batch *batch)
{
    if (!loader)
        return false;
    bool is_end = false;
    loader->status = batch ? next_batch(loader, &is_end)
                           : td_fail(TD_ERR_INVALID, "td_loader_next: batch is NULL");
    if (loader->status || is_end) {
        end_epoch(loader);
        return false;
    }
    *batch = loader->current;
    return true;
}

td_status td_loader_status(const td_loader *loader)
{
    return loader ? loader->status : TD_ERR_INVALID;
}

void td_loader_reset(td_loader *loader)
{
    if (loader)
        end_epoch(loader);
}

int64_t td_loader_batches(const td_loader *loader)
{
    return loader ? batches_of(loader, td_sampler_size(loader->sampler)) : -1;
}

/* ---- Life ------------------------------------------------------------------------------------ */

static td_status check_options(const td_dataset *dataset, const td_loader_options *options)
{
    if (options->batch_size < 1)
        return td_fail(TD_ERR_INVALID,
                       "td_loader_create: the batch size is %" PRId64 "; it must be above 0",
                       options->batch_size);
    size_t row = dataset->input_bytes > dataset->target_bytes ? dataset->input_bytes
                                                              : dataset->target_bytes;
    int64_t bytes;
    if (__builtin_mul_overflow((int64_t)(row ? row : 1), options->batch_size, &bytes))
        return td_fail(TD_ERR_INVALID,
                       "td_loader_create: a batch of %" PRId64 " samples is too large",
                       options->batch_size);
    if (options->sampler && options->shuffle)
        return td_fail(
            TD_ERR_INVALID,
            "td_loader_create: sampler and shuffle are both set; the sampler decides on the order");
    if (options->workers < 0 || options->workers > MOST_WORKERS || options->prefetch < 0 ||
        options->prefetch > MOST_PREFETCH)
        return td_fail(
            TD_ERR_INVALID,
            "td_loader_create: %d workers that read %d batches ahead; there can be 0 to %d, "
            "and 0 to %d",
            options->workers, options->prefetch, MOST_WORKERS, MOST_PREFETCH);
    return TD_OK;
}

static td_sampler *sampler_for(td_dataset *dataset, const td_loader_options *options)
{
    if (options->sampler)
        return td_sampler_retain(options->sampler);
    return options->shuffle ? td_random_sampler(dataset) : td_sequential_sampler(dataset);
}

td_loader *td_loader_create(td_dataset *dataset, const td_loader_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_loader_options chosen = options ? *options : (td_loader_options){0};
    if (chosen.batch_size == 0)
        chosen.batch_size = 1;
    if (!dataset)
        return td__null(__func__);
    if (check_options(dataset, &chosen))
        return NULL;
    if (chosen.pin_memory && !td__use_device(__func__, chosen.pin_memory))
        return NULL;
    if (chosen.prefetch == 0)
        chosen.prefetch = 2 * chosen.workers;

    td_loader *loader = calloc(1, sizeof *loader);
    if (!loader)
        goto no_memory;
    loader->options = chosen;
    loader->generation = td__fork_generation();
    loader->buffer_count = chosen.workers ? chosen.prefetch + 1 : 1;
    loader->buffers = calloc((size_t)loader->buffer_count, sizeof *loader->buffers);
    if (!loader->buffers)
        goto free_loader;
    loader->sampler = sampler_for(dataset, &chosen);
    if (!loader->sampler)
        goto free_buffers;
    loader->dataset = td_dataset_retain(dataset);
    if (td__loader_start_workers(loader)) {
        td_loader_destroy(loader);
        return NULL;
    }
    return loader;

free_buffers:
    free(loader->buffers);
free_loader:
    free(loader);
no_memory:
    td__fail_nomem("td_loader_create");
    return NULL;
}

void td_loader_destroy(td_loader *loader)
{
    if (!loader)
        return;
    end_epoch(loader);
    td__loader_stop_workers(loader);
    for (int i = 0; i < loader->buffer_count; i++) {
        if (loader->buffers[i].input)
            td__storage_release(loader->buffers[i].input);
        if (loader->buffers[i].target)
            td__storage_release(loader->buffers[i].target);
    }
    free(loader->buffers);
    td_sampler_release(loader->sampler);
    td_dataset_release(loader->dataset);
    free(loader);
}
