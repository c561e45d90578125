/* The representation of a loader.
 *
 *     order of the epoch   s s s s | s s s s | s s s s | s s s s | …          s: a sample's index
 *     batch                   0         1         2         3
 *     buffer                    0         1         2         0                 3 buffers: 2 read ahead
 *                          the user's  ready    being read
 *
 * Batch b is read into buffer b % buffer_count once the user has returned batch b - buffer_count.
 * Workers take pieces of a batch, a few rows each, strictly in the order of the epoch, and the last
 * one to finish signals that it is ready. The content does not depend on which thread reads which
 * row. */
#ifndef TD_DATA_LOADER_H
#define TD_DATA_LOADER_H

#include "base/thread.h"
#include "data/dataset.h"
#include "base/fail.h"

#include "tensor/tensor_internal.h"

struct td__batch_buffer {
    struct td__storage *input, *target; /* of a whole batch; NULL: none yet, or no target */
    int64_t left;                       /* rows that are still to be read */
    td_status status;                   /* of the first sample that failed */
    int64_t failed;                     /* its position in the order */
    struct td__error error;             /* of the sample that failed */
};

/* A few rows of a batch. */
struct td__piece {
    struct td__batch_buffer *buffer;
    int64_t from, to; /* positions in the order */
    int64_t row;      /* of the first one */
};

struct td_loader {
    td_dataset *dataset;
    td_sampler *sampler;
    td_loader_options options; /* with defaults filled in */
    unsigned generation;       /* fork generation: the threads stay in the parent */
    td_status status;

    struct td__batch_buffer *buffers;
    int buffer_count;
    td_batch current; /* the user's batch; NULL tensors: none */

    /* The epoch. */
    bool running;
    const int64_t *order;
    int64_t start, end; /* positions of the first sample, and behind the last */
    int64_t batches;    /* from `start` on */
    int64_t next;       /* the next batch for the user */

    /* For the workers, guarded by `lock`, an innermost lock. */
    pthread_mutex_t lock;
    pthread_cond_t work, ready;
    int64_t cursor; /* the position of the next sample to read; `end`: none is left */
    int64_t limit;  /* behind the last position that has a free buffer */
    int reading;    /* how many workers are reading a piece */
    bool stopping;
    int64_t piece; /* rows of a piece */
    int thread_count;
    pthread_t *threads;
};

/** Reads the rows of a piece, up to the first that fails: sets *failed, and the last error. */
td_status td__loader_read(td_loader *loader, const struct td__piece *piece, int64_t *failed);

/** Starts the threads of the options; ends them. */
td_status td__loader_start_workers(td_loader *loader);
void td__loader_stop_workers(td_loader *loader);

/** Lets the workers read from `cursor` up to `limit`. */
void td__loader_allow(td_loader *loader, int64_t cursor, int64_t limit);

/** Stops the workers, and waits until none is reading. */
void td__loader_halt(td_loader *loader);

/** Waits until all rows of a buffer are read. */
void td__loader_wait(td_loader *loader, struct td__batch_buffer *buffer);

#endif
