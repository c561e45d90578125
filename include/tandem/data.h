/* Data: datasets, the order in which their samples come, batches of them, and a progress bar.
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
 * Datasets and samplers are counted: what uses one keeps it. A function that returns one gives the
 * caller one reference, returns NULL where it fails (td_last_error() says why), and hands a NULL
 * dataset on as NULL with td_last_error() as it was.
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

/** A tensor for each row, the first dimension of both, which is as long in each: `input` and
 *  `target` are kept, not copied. `target` may be NULL: samples without one. */
TD_API td_dataset *td_tensor_dataset(td_tensor *input, td_tensor *target);

/** What becomes of the elements of IDX files. */
typedef enum td_pixels {
    TD_PIXELS_NORMALIZED, /* bytes as f32: scaled to [0, 1], less `mean`, divided by `std` */
    TD_PIXELS_UNIT,       /* bytes as f32, scaled to [0, 1] */
    TD_PIXELS_RAW,        /* as they are, in the file's dtype and shape */
} td_pixels;

typedef struct td_idx_options {
    td_pixels pixels;
    double mean, std; /* for TD_PIXELS_NORMALIZED; std 0: the dataset's known ones, where there are,
                              otherwise 0 and 1 */
    const char *directory; /* td_fashion_mnist(): where the files are */
    void *reserved[4];
} td_idx_options;

/**
 * Samples of two IDX files, such as those of MNIST, gzipped or not: their content says it. The first
 * dimension counts the samples. Images of two dimensions get a channel, [1, 28, 28]; labels become
 * i64. `labels_path` may be NULL: samples without a target. The files are read once, here.
 *
 * Errors: TD_ERR_SYSTEM where a file cannot be read; TD_ERR_INVALID where it is no whole IDX file, with
 * the offset and what was expected there, or the two do not fit together; TD_ERR_NOMEM.
 */
TD_API td_dataset *td_idx_dataset(const char *images_path, const char *labels_path,
                                  const td_idx_options *options);

typedef enum td_dataset_part {
    TD_TRAIN,
    TD_TEST,
} td_dataset_part;

/**
 * Fashion-MNIST: 60,000 images to train with or 10,000 to test, [1, 28, 28] f32, ten classes, i64.
 * Its files are looked for in options->directory; or else in $TANDEM_DATA/fashion-mnist and in
 * $TANDEM_DATA; or else where Debian's package dataset-fashion-mnist has put them. Where options give no
 * `std`, mean and std are those of the training images, 0.2860 and 0.3530.
 */
TD_API td_dataset *td_fashion_mnist(td_dataset_part part, const td_idx_options *options);

/** The bytes of a file as numbers, in pieces of `length`: of each, the input is [length] i64 and the
 * target the same one byte further on. The file stays open and is read as it is needed; a rest that is
 * too short is left out. */
TD_API td_dataset *td_text_dataset(const char *path, int64_t length);

/** The samples of `dataset` that `indices` names, `count` of them, in that order; copied. */
TD_API td_dataset *td_subset(td_dataset *dataset, const int64_t *indices, int64_t count);

typedef struct td_partition_options {
    int count;               /* how many parts; 0: one for each rank of the world */
    int which;               /* which one is wanted; with a count of 0, that of this rank */
    const double *fractions; /* `count` of them; NULL: equal ones */
    uint64_t seed;           /* of the shuffle; 0: 1234 */
    void *reserved[4];
} td_partition_options;

/**
 * One part of a dataset that is shuffled and cut into parts: those of DataPartitioner in PyTorch's
 * tutorial, index by index (Python's random.Random(seed).shuffle()). A part has fraction * size
 * samples, rounded down, and what is left at the end is in none. TD_ERR_STATE without a count and
 * without a world.
 */
TD_API td_dataset *td_partition_dataset(td_dataset *dataset, const td_partition_options *options);

/** One more reference; one less. Both take NULL. */
TD_API td_dataset *td_dataset_retain(td_dataset *dataset);
TD_API void td_dataset_release(td_dataset *dataset);

/** The number of samples; -1 for NULL. */
TD_API int64_t td_dataset_size(const td_dataset *dataset);

/** One half of a sample. */
typedef struct td_sample_spec {
    td_dtype dtype;
    int ndim; /* at most TD_MAX_DIMS - 1, since a batch has one more; -1 for a target: there is none */
    int64_t shape[TD_MAX_DIMS];
    void *reserved[4];
} td_sample_spec;

/** What the samples consist of. Either pointer may be NULL. */
TD_API void td_dataset_describe(const td_dataset *dataset, td_sample_spec *input,
                                td_sample_spec *target);

/** Writes sample `index`, 0 to size - 1, to memory that is as large as td_dataset_describe() says.
 *  `target` may be NULL where there is none. Any number of threads may do so at once. */
TD_API td_status td_dataset_read(td_dataset *dataset, int64_t index, void *input, void *target);

/** A dataset of one's own. */
typedef struct td_dataset_ops {
    /** The number of samples. Called once, when the dataset is made. */
    int64_t (*size)(void *self);

    /** Fills in both; they are zero before: one element, f32 (see dtype.h for the first one). Called
     *  once, when the dataset is made. */
    void (*describe)(void *self, td_sample_spec *input, td_sample_spec *target);

    /** Writes the elements of sample `index`, which is in range, one after another. Called by any
     *  thread, and by several at once. Where it fails it returns td_fail(). */
    td_status (*read)(void *self, int64_t index, void *input, void *target);

    /** Frees `self`, by the thread that releases the dataset last. May be NULL. */
    void (*destroy)(void *self);
    void *reserved[4];
} td_dataset_ops;

/** Makes a dataset of `ops`, which must stay, and `self`, which it takes over where this succeeds. */
TD_API td_dataset *td_dataset_create(const td_dataset_ops *ops, void *self);

/* ---- Samplers ---------------------------------------------------------------------------------
 *
 * A sampler is the order of an epoch: a list of indices. It has a position in it, which moves as a
 * loader hands out batches; a checkpoint keeps that. One loader or one loop uses a sampler at a time. */

typedef struct td_sampler td_sampler;

/** 0, 1, 2, … */
TD_API td_sampler *td_sequential_sampler(td_dataset *dataset);

/** Another order in each epoch. Its seed is drawn from the default generator as the epoch begins, so
 *  that after td_manual_seed() the order is that of a DataLoader with shuffle=True in PyTorch. */
TD_API td_sampler *td_random_sampler(td_dataset *dataset);

typedef struct td_sampler_options {
    bool
        no_shuffle; /* 0, 1, 2, … instead of a random order, the same on all ranks: of seed + epoch */
    bool drop_last; /* leave out what cannot be divided evenly, instead of repeating some */
    uint64_t seed;
    int num_replicas; /* how many ranks there are; 0 (or -1): as many as in the world */
    int rank;         /* which one this is; 0: that of the world, where there is a world of
                            num_replicas, otherwise 0; -1: that of the world */
    void *reserved[4];
} td_sampler_options;

/**
 * The share of one rank: every num_replicas-th index from `rank` on, the same number for each rank;
 * index by index that of PyTorch's DistributedSampler. Without td_sampler_set_epoch() every epoch has
 * the same order. TD_ERR_STATE without a world where something is to be taken from it.
 */
TD_API td_sampler *td_distributed_sampler(td_dataset *dataset, const td_sampler_options *options);

/** One more reference; one less. Both take NULL. */
TD_API td_sampler *td_sampler_retain(td_sampler *sampler);
TD_API void td_sampler_release(td_sampler *sampler);

/** The number of indices in an epoch; -1 for NULL. */
TD_API int64_t td_sampler_size(const td_sampler *sampler);

/** The number of the next epoch to begin. One that is under way keeps its order. NULL is fine. */
TD_API void td_sampler_set_epoch(td_sampler *sampler, int64_t epoch);

/** The next index of the epoch, for who uses no loader. False at its end, and the next call begins the
 *  next one; false as well where it fails, and td_sampler_status() says so. */
TD_API bool td_sampler_next(td_sampler *sampler, int64_t *index);

/** TD_OK, or why the last td_sampler_next() returned false before the end; td_last_error() has the
 *  sentence. */
TD_API td_status td_sampler_status(const td_sampler *sampler);

/** Where a sampler is. */
typedef struct td_sampler_position {
    int64_t epoch;
    int64_t taken; /* how many of its indices were handed out; by a loader: in batches */
    uint64_t seed; /* that the epoch's order was made with, for samplers that draw one */
    bool begun;    /* whether the epoch has an order yet */
    void *reserved[4];
} td_sampler_position;

/** Where the sampler is now, in *position. */
TD_API void td_sampler_get_position(const td_sampler *sampler, td_sampler_position *position);

/**
 * Goes on from there: the next index is the one that would have followed. Nothing is drawn from the
 * default generator for the rest of this epoch, since the state of the generator that belongs to such a
 * position has its draws behind it.
 *
 * Errors: TD_ERR_STATE while a loader is in the middle of an epoch (td_loader_reset());
 * TD_ERR_INVALID where the position is outside an epoch.
 */
TD_API td_status td_sampler_set_position(td_sampler *sampler, const td_sampler_position *position);

/** A sampler of one's own. */
typedef struct td_sampler_ops {
    /** The number of indices in an epoch. */
    int64_t (*size)(void *self);

    /** Writes the indices of an epoch, size() of them. The same numbers give the same order, so that a
     *  position can be found again; `seed` is 0 unless `draws_seed`. Where it fails it returns
     *  td_fail(). */
    td_status (*order)(void *self, int64_t epoch, uint64_t seed, int64_t *indices);

    /** Frees `self`. May be NULL. */
    void (*destroy)(void *self);

    /** A seed is drawn from the default generator for each epoch. */
    bool draws_seed;
    void *reserved[4];
} td_sampler_ops;

/** Makes a sampler of `ops`, which must stay, and `self`, which it takes over where this succeeds. */
TD_API td_sampler *td_sampler_create(const td_sampler_ops *ops, void *self);

/* ---- Loaders ---------------------------------------------------------------------------------- */

typedef struct td_loader td_loader;

typedef struct td_loader_options {
    int64_t batch_size;  /* 0: 1 */
    td_sampler *sampler; /* NULL: a sequential one, or a random one with `shuffle` */
    bool shuffle;        /* not together with a sampler */
    bool drop_last;      /* no last batch that is smaller than the others */
    int workers;         /* threads that read ahead; 0: the caller reads, when it asks */
    int prefetch;        /* how many batches they read ahead; 0: two for each worker */
    void *reserved[4];
} td_loader_options;

/** Samples, one behind the other: [size, …]. */
typedef struct td_batch {
    td_tensor *input;
    td_tensor *target; /* NULL where samples have none */
    int64_t size;
} td_batch;

/**
 * A loader of batches. It keeps the dataset and the sampler. The threads, if there are any, start
 * here. The batches and their order are the same for any number of workers.
 *
 * Errors: TD_ERR_INVALID for wrong options, or for both a sampler and `shuffle`; TD_ERR_NOMEM;
 * TD_ERR_SYSTEM where no thread can be started.
 */
TD_API td_loader *td_loader_create(td_dataset *dataset, const td_loader_options *options);

/** Frees it, in the middle of an epoch too; waits for the samples that are being read. The last batch
 *  goes with it. NULL is fine. */
TD_API void td_loader_destroy(td_loader *loader);

/**
 * The next batch of the epoch. It belongs to the loader until the next call; td_tensor_retain() keeps a
 * tensor of it longer, and its memory is not used again then.
 *
 * False at the end of the epoch, and the next call begins the next one. False as well where it fails,
 * for NULL too: the epoch ends there, and td_loader_status() says why, naming the sample.
 *
 * As an epoch begins, a number is drawn from the default generator, as PyTorch's loaders do whether or
 * not they need it, so that what is drawn later is the same.
 */
TD_API bool td_loader_next(td_loader *loader, td_batch *batch);

/** TD_OK where the last td_loader_next() returned a batch or the epoch's end; otherwise why not, and
 *  td_last_error() has the sentence. TD_ERR_INVALID for NULL. */
TD_API td_status td_loader_status(const td_loader *loader);

/** Leaves the epoch: the next call of td_loader_next() begins another one. NULL is fine. */
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
 * One line on standard error, drawn again at most ten times a second, by rank 0 alone. Nothing is
 * written where standard error is no terminal. */

typedef struct td_progress td_progress;

typedef struct td_progress_options {
    int64_t total;     /* how many steps; 0: not known */
    const char *label; /* NULL: none */
    const char *unit;  /* of a step; NULL: "batch" */
    bool lines;        /* where standard error is no terminal: one line at the end of each bar */
    void *reserved[4];
} td_progress_options;

/** Begins a bar. NULL without memory, which the other two take as well. */
TD_API td_progress *td_progress_begin(const td_progress_options *options);

/** `steps` more are done. `loss` is shown as it is; NAN: not at all. Cheap where nothing is drawn. */
TD_API void td_progress_step(td_progress *progress, int64_t steps, double loss);

/** Draws it a last time, ends the line and frees it. */
TD_API void td_progress_end(td_progress *progress);

#ifdef __cplusplus
}
#endif

#endif
