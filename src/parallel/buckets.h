/* Buckets: gradients in few pieces of memory, each of which is reduced when it is full.
 *
 *     gradients   0  1  2  3  4  5         in the order of the layers
 *     bucket 0    5 4                      the first small, so that it is full soon
 *     bucket 1    3 2 1
 *     bucket 2    0                        a dtype of its own
 *
 * Buckets start strictly in their order, on every rank, whatever the order in which they are full:
 * so all ranks make the same calls in the same order. */
#ifndef TD_PARALLEL_BUCKETS_H
#define TD_PARALLEL_BUCKETS_H

#include "tensor/tensor_internal.h"

#include <tandem/parallel.h>

#include <pthread.h>

#define TD__BUCKET_BYTES ((size_t)25 << 20)
#define TD__FIRST_BUCKET_BYTES ((size_t)1 << 20)

/* One gradient, and its place. */
struct td__gradient {
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    int64_t numel;
    struct td__device *device;

    int bucket;
    td_tensor *view; /* of the bucket, with the shape above */
    bool ready;
};

struct td_bucket {
    struct td__buckets *all;
    int index;
    td_tensor *buffer;
    int *members; /* numbers of gradients */
    int member_count;
    int pending; /* members that are not ready */
    bool started;
    td_work *work; /* of the plain average */
    int64_t start_ns;
    void *data; /* the hook's */
    void (*free_data)(void *data);
};

struct td__buckets {
    td_group *group;
    td_comm_hook hook;
    double scale; /* of the results, on top of the average; 0: none */
    struct td__gradient *gradients;
    int gradient_count;
    struct td_bucket *buckets;
    int count;

    pthread_mutex_t lock; /* ready, pending, next: gradients may come from several threads */
    int next;             /* the bucket to start next */
    int *order;           /* gradients in the order in which they were ready */
    int ordered;

    td_ddp_stats stats;
};

/**
 * Makes buckets for gradients whose dtype, shape and device are filled in. `order` lists all of them
 * as they are expected to become ready; NULL: the last first. The lists are the caller's. Where it
 * fails, *buckets is as if td__buckets_free() had been called.
 */
td_status td__buckets_init(struct td__buckets *buckets, const struct td__gradient *gradients,
                           int count, const int *order, size_t first_bytes, size_t bytes);
void td__buckets_free(struct td__buckets *buckets);

/** Begins a pass: nothing is ready. */
void td__buckets_begin(struct td__buckets *buckets);

/** The view of a gradient has its value. Starts the buckets that are full now. */
td_status td__buckets_ready(struct td__buckets *buckets, int gradient);

/** Whether all gradients are ready. */
bool td__buckets_complete(const struct td__buckets *buckets);

/** Ends a pass in which all gradients are ready: waits for all buckets. */
td_status td__buckets_finish(struct td__buckets *buckets);

#endif
