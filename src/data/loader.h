/* What a loader is made of.
 *
 *     order of the epoch   s s s s | s s s s | s s s s | s s s s | …          s: a sample's index
 *     batch                   0         1         2         3
 *     slot                    0         1         2         0                 3 slots: 2 read ahead
 *                          the user's  ready    being read
 *
 * Batch b is read into slot b % slots, as soon as batch b - slots was given back. Workers take pieces of
 * a batch, a few rows each, strictly in the order of the epoch, and the last one to finish says that it
 * is ready. Which thread reads which row plays no part in what stands there. */
#ifndef TD_DATA_LOADER_H
#define TD_DATA_LOADER_H

#include "base/thread.h"
#include "data/dataset.h"
#include "base/fail.h"

#include "data/sampler.h"
#include "tensor/tensor_internal.h"

struct td__loader_slot {
    struct td__storage *input, *target; /* of a whole batch; NULL: none yet, or no target */
    int64_t left;                       /* rows that are still to be read */
    td_status status;                   /* of the first sample that failed */
    int64_t failed;                     /* its place in the order */
    struct td__error error;             /* of the sample that failed */
};

/* A few rows of a batch. */
struct td__piece {
    struct td__loader_slot *slot;
    int64_t from, to; /* places in the order */
    int64_t row;      /* of the first one */
};

struct td_loader {
    td_dataset *dataset;
    td_sampler *sampler;
    td_loader_options options; /* batch_size and prefetch with their real values */
    unsigned generation;       /* of forks: the threads stay with the parent */
    td_status status;

    struct td__loader_slot *slots;
    int slot_count;
    td_batch current; /* what the user has; NULL tensors: nothing */

    /* The epoch. */
    bool running;
    const int64_t *order;
    int64_t start, end; /* places in the order: of the first sample, and behind the last one */
    int64_t batches;    /* from `start` on */
    int64_t next;       /* the batch that the user gets next */

    /* For the workers; guarded by the lock, and nothing else is taken under it. */
    pthread_mutex_t lock;
    pthread_cond_t work, ready;
    int64_t cursor; /* the place of the next sample to be read; `end`: all are */
    int64_t limit;  /* behind the last place for which there is a free slot */
    int reading;    /* how many workers are in the middle of a piece */
    bool stopping;
    int64_t piece; /* the rows of one */
    int thread_count;
    pthread_t *threads;
};

/** Reads the rows of a piece, up to the first that fails. Fills in *failed then, the message is the last
 *  error. */
td_status td__loader_read(td_loader *loader, const struct td__piece *piece, int64_t *failed);

/** Starts the threads, as many as the options say; ends them. */
td_status td__loader_start_workers(td_loader *loader);
void td__loader_stop_workers(td_loader *loader);

/** What the workers may read, from now on: from `cursor` up to `limit`. */
void td__loader_allow(td_loader *loader, int64_t cursor, int64_t limit);

/** Takes the rest away from them, and waits until none is reading. */
void td__loader_halt(td_loader *loader);

/** Waits until all rows of a slot are read. */
void td__loader_wait(td_loader *loader, struct td__loader_slot *slot);

#endif
