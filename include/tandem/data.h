/* Data: datasets, samplers, loaders, and a progress bar.
 *
 *     td_dataset *train   = td_fashion_mnist(TD_TRAIN, NULL);
 *     td_sampler *sampler = td_distributed_sampler(train, NULL);
 *     td_loader  *loader  = td_loader_create(train, &(td_loader_options){.batch_size = 64,
 *                                                                        .sampler = sampler});
 *     for (int epoch = 0; epoch < 10; epoch++) {
 *         td_sampler_set_epoch(sampler, epoch);
 *         for (td_batch b; td_loader_next(loader, &b);) {
 *             … b.input [64, 1, 28, 28] f32, b.target [64] i64 …
 *         }
 *         if (td_loader_status(loader))
 *             …
 *     }
 *     td_loader_destroy(loader);
 *     td_sampler_release(sampler);
 *     td_dataset_release(train);
 *
 * Datasets and samplers are reference-counted: what uses one retains it. A function that returns
 * one gives the caller a reference, returns NULL on failure (td_last_error() says why), and returns
 * NULL for a NULL dataset with the last error unchanged.
 *
 * Threads. Datasets may be read by several threads at once. A sampler, a loader and a progress bar are used
 * by one thread at a time; different ones by different threads. */
#ifndef TANDEM_DATA_H
#define TANDEM_DATA_H

#include <tandem/random.h>
#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Datasets --------------------------------------------------------------------------------- */

typedef struct td_dataset td_dataset;

/** A sample for each index of the first dimension, which both tensors share. `input` and `target`
 *  are retained, not copied, and must be on the host. `target` may be NULL: samples without one. */
TD_API td_dataset *td_tensor_dataset(td_tensor *input, td_tensor *target);

/** Conversion of the elements of IDX files. */
typedef enum td_pixels {
    TD_PIXELS_NORMALIZED, /* bytes as f32: scaled to [0, 1], less `mean`, divided by `std` */
    TD_PIXELS_UNIT,       /* bytes as f32, scaled to [0, 1] */
    TD_PIXELS_RAW,        /* as they are, in the file's dtype and shape */
} td_pixels;

typedef struct td_idx_options {
    td_pixels pixels;
    double mean, std; /* for TD_PIXELS_NORMALIZED; std 0: those of the dataset if known, else 0 and
                         1 */
    const char *directory; /* td_fashion_mnist(): of the files */
    void *reserved[4];
} td_idx_options;

/**
 * Samples of two IDX files, such as MNIST's, gzipped or not. The first dimension is the number of
 * samples. Images of two dimensions get a channel, [1, 28, 28]; labels become i64. `labels_path`
 * may be NULL: samples without a target. The files are read in this call.
 *
 * Errors: TD_ERR_SYSTEM if a file cannot be read; TD_ERR_INVALID if it is not a complete IDX file,
 * with the offset and what was expected there, or if the two have different numbers of samples;
 * TD_ERR_NOMEM.
 */
TD_API td_dataset *td_idx_dataset(const char *images_path, const char *labels_path,
                                  const td_idx_options *options);

typedef enum td_dataset_part {
    TD_TRAIN,
    TD_TEST,
} td_dataset_part;

/**
 * Fashion-MNIST: 60,000 images to train with or 10,000 to test, [1, 28, 28] f32, ten classes, i64.
 * Its files are searched in options->directory; or else in $TANDEM_DATA/fashion-mnist and in
 * $TANDEM_DATA; or else in the directory of Debian's package dataset-fashion-mnist. If `std` is 0,
 * mean and std are those of the training images, 0.2860 and 0.3530.
 */
TD_API td_dataset *td_fashion_mnist(td_dataset_part part, const td_idx_options *options);

/** The bytes of a file as numbers, in sequences of `length`: the input is [length] i64, the target
 * the same one byte further on. The file stays open and is read on demand; an incomplete last
 * sequence is dropped. */
TD_API td_dataset *td_text_dataset(const char *path, int64_t length);

typedef struct td_token_options {
    int bytes;      /* of a token, little-endian: 1, 2 or 4; 0: 2 */
    int64_t offset; /* of the first token in the file: the bytes of a header */
    void *reserved[4];
} td_token_options;

/** The same for a file of tokens, numbers of equal size one after the other, such as tokenizers write them. `options` may
 *  be NULL. */
TD_API td_dataset *td_token_dataset(const char *path, int64_t length,
                                    const td_token_options *options);

/** The samples of `dataset` with these indices, which are copied, in that order. */
TD_API td_dataset *td_subset(td_dataset *dataset, const int64_t *indices, int64_t count);

typedef struct td_partition_options {
    int count;               /* number of parts; 0: one for each rank of the world */
    int which;               /* the part's number; with a count of 0, that of this rank */
    const double *fractions; /* `count` of them; NULL: equal ones */
    uint64_t seed;           /* of the shuffle; 0: 1234 */
    void *reserved[4];
} td_partition_options;

/**
 * One part of a shuffled dataset: the partitions of DataPartitioner in PyTorch's tutorial, index by
 * index (Python's random.Random(seed).shuffle()). A part has fraction * size samples, rounded down;
 * the remainder is in none. TD_ERR_STATE without a count and without a world.
 */
TD_API td_dataset *td_partition_dataset(td_dataset *dataset, const td_partition_options *options);

/** Adds a reference; drops one. NULL is fine. */
TD_API td_dataset *td_dataset_retain(td_dataset *dataset);
TD_API void td_dataset_release(td_dataset *dataset);

/** The number of samples; -1 for NULL. */
TD_API int64_t td_dataset_size(const td_dataset *dataset);

/** Dtype and shape of the input or the target of a sample. */
typedef struct td_sample_spec {
    td_dtype dtype;
    int ndim; /* at most TD_MAX_DIMS - 1, since a batch has one more; -1: no target */
    int64_t shape[TD_MAX_DIMS];
    void *reserved[4];
} td_sample_spec;

/** Describes the samples. Either pointer may be NULL. */
TD_API void td_dataset_describe(const td_dataset *dataset, td_sample_spec *input,
                                td_sample_spec *target);

/** Writes sample `index`, 0 to size - 1, to memory that is as large as td_dataset_describe() says.
 *  `target` may be NULL if there is none. Any number of threads may call it at once. */
TD_API td_status td_dataset_read(td_dataset *dataset, int64_t index, void *input, void *target);

/** The ops table of a custom dataset. */
typedef struct td_dataset_ops {
    /** The number of samples. Called once, when the dataset is created. */
    int64_t (*size)(void *self);

    /** Fills in both, which are zeroed: one element of f32. Called once, when the dataset is
     *  created. */
    void (*describe)(void *self, td_sample_spec *input, td_sample_spec *target);

    /** Writes the elements of sample `index`, which is in range, contiguously. Called by any
     *  thread, and by several at once. On failure it returns td_fail(). */
    td_status (*read)(void *self, int64_t index, void *input, void *target);

    /** Frees `self`, on the thread that releases the dataset last. May be NULL. */
    void (*destroy)(void *self);
    void *reserved[4];
} td_dataset_ops;

/** Creates a dataset of `ops`, which must outlive it, and `self`, which it owns on success. */
TD_API td_dataset *td_dataset_create(const td_dataset_ops *ops, void *self);

/* ---- Samplers ---------------------------------------------------------------------------------
 *
 * A sampler is the order of an epoch, a list of indices, and a position in it, which advances as a
 * loader returns batches; checkpoints save it. One loader or one loop uses a sampler at a time. */

typedef struct td_sampler td_sampler;

/** 0, 1, 2, … */
TD_API td_sampler *td_sequential_sampler(td_dataset *dataset);

/** A random order in each epoch. Its seed is drawn from the default generator when the epoch
 *  begins, so that after td_manual_seed() the order is that of PyTorch's DataLoader with
 *  shuffle=True. */
TD_API td_sampler *td_random_sampler(td_dataset *dataset);

typedef struct td_sampler_options {
    bool no_shuffle; /* 0, 1, 2, … instead of a random order, which depends on seed + epoch */
    bool drop_last;  /* drop the remainder instead of padding with repeated samples */
    uint64_t seed;
    int num_replicas; /* number of ranks; 0 (or -1): that of the world */
    int rank;         /* 0: that of the world, if it has num_replicas ranks, otherwise 0; -1: that
                         of the world */
    int slices; /* of a batch of all ranks, see td_slices_begin() in <tandem/parallel.h>; 0: none */
    bool slices_apart; /* slices as td_fsdp() deals them out: rank, rank + num_replicas, … */
    int64_t
        slice_size; /* samples of a slice: the batch_size of the loader, without its drop_last */
    void *reserved[4];
} td_sampler_options;

/**
 * The share of one rank: every num_replicas-th index from `rank` on, the same number for each rank;
 * index by index that of PyTorch's DistributedSampler. Without td_sampler_set_epoch() every epoch
 * has the same order. TD_ERR_STATE if a default needs the world and there is none.
 *
 * With `slices` an epoch is cut into batches of slices * slice_size samples of all ranks, the last one padded or dropped,
 * and a batch into slices. The share has the slices of this rank, batch by batch: those of td_slice_range(), or with
 * slices_apart every num_replicas-th one. Which samples a slice has does not depend on the number of ranks.
 */
TD_API td_sampler *td_distributed_sampler(td_dataset *dataset, const td_sampler_options *options);

/** One more reference; one less. Both take NULL. */
TD_API td_sampler *td_sampler_retain(td_sampler *sampler);
TD_API void td_sampler_release(td_sampler *sampler);

/** The number of indices in an epoch; -1 for NULL. */
TD_API int64_t td_sampler_size(const td_sampler *sampler);

/** Sets the number of the next epoch. An epoch that has begun keeps its order. NULL is fine. */
TD_API void td_sampler_set_epoch(td_sampler *sampler, int64_t epoch);

/** The next index of the epoch, for loops without a loader. False at its end, and the next call
 *  begins the next epoch; also false on failure, see td_sampler_status(). */
TD_API bool td_sampler_next(td_sampler *sampler, int64_t *index);

/** TD_OK, or the status of the last td_sampler_next() that failed; td_last_error() has the text. */
TD_API td_status td_sampler_status(const td_sampler *sampler);

/** The position of a sampler. */
typedef struct td_sampler_position {
    int64_t epoch;
    int64_t taken; /* number of its indices that were returned; by a loader: in batches */
    uint64_t seed; /* of the epoch's order, for samplers that draw one */
    bool begun;    /* the epoch has an order */
    void *reserved[4];
} td_sampler_position;

/** The current position. */
TD_API void td_sampler_get_position(const td_sampler *sampler, td_sampler_position *position);

/**
 * Resumes at a position: the next index is the one that would have followed. Nothing is drawn from
 * the default generator for the rest of this epoch, since a generator state saved with the position
 * includes those draws.
 *
 * Errors: TD_ERR_STATE while a loader is in the middle of an epoch (td_loader_reset());
 * TD_ERR_INVALID if the position is outside of an epoch.
 */
TD_API td_status td_sampler_set_position(td_sampler *sampler, const td_sampler_position *position);

/** The ops table of a custom sampler. */
typedef struct td_sampler_ops {
    /** The number of indices in an epoch. */
    int64_t (*size)(void *self);

    /** Writes the indices of an epoch, size() of them. It must be deterministic in `epoch` and
     *  `seed`, so that positions can be restored; `seed` is 0 unless `draws_seed`. On failure it
     *  returns td_fail(). */
    td_status (*order)(void *self, int64_t epoch, uint64_t seed, int64_t *indices);

    /** Frees `self`. May be NULL. */
    void (*destroy)(void *self);

    /** Draw a seed from the default generator for each epoch. */
    bool draws_seed;
    void *reserved[4];
} td_sampler_ops;

/** Creates a sampler of `ops`, which must outlive it, and `self`, which it owns on success. */
TD_API td_sampler *td_sampler_create(const td_sampler_ops *ops, void *self);

/* ---- Loaders ---------------------------------------------------------------------------------- */

typedef struct td_loader td_loader;

typedef struct td_loader_options {
    int64_t batch_size;    /* 0: 1 */
    td_sampler *sampler;   /* NULL: a sequential one, or a random one with `shuffle` */
    bool shuffle;          /* not together with a sampler */
    bool drop_last;        /* drop an incomplete last batch */
    int workers;           /* threads that prefetch; 0: td_loader_next() reads */
    int prefetch;          /* number of batches to prefetch; 0: two for each worker */
    td_device *pin_memory; /* batches come in host memory that is pinned for this device, for
                              td_tensor_to_async(); NULL: in ordinary memory */
    void *reserved[4];
} td_loader_options;

/** Stacked samples: [size, …]. */
typedef struct td_batch {
    td_tensor *input;
    td_tensor *target; /* NULL if samples have none */
    int64_t size;
} td_batch;

/**
 * A loader of batches. It retains the dataset and the sampler, and starts the workers. The batches
 * and their order are the same for any number of workers.
 *
 * Errors: TD_ERR_INVALID for wrong options, or for both a sampler and `shuffle`; TD_ERR_NOMEM;
 * TD_ERR_SYSTEM if a thread cannot be started.
 */
TD_API td_loader *td_loader_create(td_dataset *dataset, const td_loader_options *options);

/** Frees it and its last batch, also in the middle of an epoch; waits for the samples that are
 *  being read. NULL is fine. */
TD_API void td_loader_destroy(td_loader *loader);

/**
 * The next batch of the epoch. It belongs to the loader until the next call; a tensor that was
 * retained stays valid, and its memory is not reused. Nor is pinned memory while a device copies from it: with
 * `pin_memory` the next call may follow td_tensor_to_async() at once.
 *
 * False at the end of the epoch, and the next call begins the next one. Also false on failure, and
 * for NULL: the epoch ends, and td_loader_status() says why; the error names the sample.
 *
 * When an epoch begins, a number is drawn from the default generator, as PyTorch's loaders always
 * do, so that later draws are the same.
 */
TD_API bool td_loader_next(td_loader *loader, td_batch *batch);

/** TD_OK if the last td_loader_next() returned a batch or reached the end of the epoch; otherwise
 *  its failure, and td_last_error() has the text. TD_ERR_INVALID for NULL. */
TD_API td_status td_loader_status(const td_loader *loader);

/** Abandons the epoch: the next td_loader_next() begins another one. NULL is fine. */
TD_API void td_loader_reset(td_loader *loader);

/** The number of batches of an epoch; -1 for NULL. */
TD_API int64_t td_loader_batches(const td_loader *loader);

/* ---- Progress ---------------------------------------------------------------------------------
 *
 *     td_progress *bar = td_progress_begin(&(td_progress_options){.total = td_loader_batches(loader),
 *                                                                 .label = "epoch 1"});
 *     … td_progress_step(bar, 1, loss) …
 *     td_progress_end(bar);
 *
 *     epoch 1   44% ████████▌           422/938  151.2 batch/s  0:03 left  loss 0.4321
 *
 * One line on standard error, redrawn at most ten times a second, by rank 0 only. Nothing is
 * written if standard error is no terminal. */

typedef struct td_progress td_progress;

typedef struct td_progress_options {
    int64_t total;     /* number of steps; 0: unknown */
    const char *label; /* NULL: none */
    const char *unit;  /* of a step; NULL: "batch" */
    bool lines;        /* if standard error is no terminal: one line at the end of each bar */
    void *reserved[4];
} td_progress_options;

/** Begins a bar. NULL without memory; the other two accept NULL. */
TD_API td_progress *td_progress_begin(const td_progress_options *options);

/** Advances by `steps`. `loss` is shown unless it is NAN. Cheap if nothing is drawn. */
TD_API void td_progress_step(td_progress *progress, int64_t steps, double loss);

/** Draws it a last time, ends the line and frees it. */
TD_API void td_progress_end(td_progress *progress);

#ifdef __cplusplus
}
#endif

#endif
