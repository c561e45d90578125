/* Buckets: contiguous memory for several gradients, reduced when all of them are ready.
 *
 *     gradients   0  1  2  3  4  5         in the order of the layers
 *     bucket 0    5 4                      the first is small, so that it is full early
 *     bucket 1    3 2 1
 *     bucket 2    0                        a dtype of its own
 *
 * Buckets are reduced strictly in their order, whatever the order in which they become full, so
 * that all ranks make the same calls in the same order. */
#ifndef TD_PARALLEL_BUCKETS_H
#define TD_PARALLEL_BUCKETS_H

#include "parallel/slices.h"
#include "tensor/tensor_internal.h"

#include <tandem/parallel.h>

#include <pthread.h>

#define TD__BUCKET_BYTES ((size_t)25 << 20)
#define TD__FIRST_BUCKET_BYTES ((size_t)1 << 20)

/* One gradient, and its bucket. */
struct td__gradient {
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    int64_t numel;
    td_device *device;

    int bucket;
    td_tensor *view; /* of the bucket, with the shape above; NULL while that has no memory */
    bool ready;
};

struct td_bucket {
    struct td__buckets *all;
    int index;
    td_tensor *buffer; /* NULL while it has no memory */
    int *members;      /* numbers of gradients */
    int member_count;
    int pending; /* members that are not ready */
    bool started;
    td_work *work;               /* of the plain average */
    struct td__slice_sums *sums; /* NULL: a pass has the whole batch of this rank */
    int64_t start_ns;
    void *data; /* the hook's */
    void (*free_data)(void *data);
};

struct td__buckets {
    td_group *group;
    td_comm_hook hook;
    double scale; /* of the results, on top of the average; 0: none */
    int slices; /* of a batch, each with a pass of its own; 0: a pass has the whole batch of this rank */
    bool first_slice, last_slice; /* of this rank, in this pass */
    bool
        lazy; /* a bucket has memory from its first gradient on to td__bucket_drop(); not with a hook */
    struct td__gradient *gradients;
    int gradient_count;
    struct td_bucket *buckets;
    int count;

    pthread_mutex_t lock; /* guards ready, pending and next: several threads may deliver
                             gradients */
    int next;             /* the next bucket to reduce */
    int finished;         /* the number of buckets that are reduced */
    int *order;           /* gradients in the order in which they became ready */
    int ordered;

    td_ddp_stats stats;
};

/**
 * Makes buckets for gradients whose dtype, shape and device are filled in. `order` lists all of
 * them in the expected order of readiness; NULL: the last first. The lists stay the caller's. On
 * failure *buckets is as after td__buckets_free().
 */
td_status td__buckets_init(struct td__buckets *buckets, const struct td__gradient *gradients,
                           int count, const int *order, size_t first_bytes, size_t bytes);
void td__buckets_free(struct td__buckets *buckets);

/** The view of a gradient, whose bucket gets memory if it has none; NULL without memory. */
td_tensor *td__buckets_view(struct td__buckets *buckets, int gradient);

/** Gives a bucket memory, if it has none. */
td_status td__bucket_hold(struct td_bucket *bucket);
/** Frees the memory of a lazy bucket that is reduced, except for what gradients of leaves still use. */
void td__bucket_drop(struct td_bucket *bucket);

/** Begins a pass: nothing is ready, and the buffers are not lent: until its end they may be written. */
td_status td__buckets_begin(struct td__buckets *buckets);

/** Marks a gradient, whose view has its value, as ready. Starts the reduction of buckets that are
 * now full. */
td_status td__buckets_ready(struct td__buckets *buckets, int gradient);

/** Whether all gradients are ready. */
bool td__buckets_complete(const struct td__buckets *buckets);

/** Before the end of a pass: completes the next bucket, if it is reduced already. *bucket is NULL if it is not. One
 *  thread at a time. */
td_status td__buckets_finish_next(struct td__buckets *buckets, struct td_bucket **bucket);
/** The bucket that is completed next; NULL: there is none. */
struct td_bucket *td__buckets_next(struct td__buckets *buckets);

/** Ends a pass in which all gradients are ready: waits for all buckets. each(), unless it is NULL, is called for each
 *  that was not complete before, in their order, until one has failed. */
td_status td__buckets_finish(struct td__buckets *buckets,
                             td_status (*each)(struct td_bucket *bucket, void *arg), void *arg);

/* ---- Verification (verify.c) ----------------------------------------------------------------- */

/** TD_ERR_MISMATCH on every rank if number, dtypes or shapes differ from those of the group's
 *  first rank; the error names both ranks and the parameter. `names` may be NULL. Collective. */
td_status td__verify_gradients(const char *call, const struct td__gradient *gradients,
                               const char *const *names, int count, td_group *group);

#endif
