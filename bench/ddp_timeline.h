/* When the device has run the parts of a step of DistributedDataParallel: figures, and a picture. */
#ifndef TD_BENCH_DDP_TIMELINE_H
#define TD_BENCH_DDP_TIMELINE_H

#include <stddef.h>

enum { TIMELINE_BUCKETS = 64 };

/* Milliseconds since the start of the step. */
struct ddp_timeline {
    double backward, backward_end, step_end;
    int buckets;
    double ready[TIMELINE_BUCKETS]; /* the bucket is full */
    double end[TIMELINE_BUCKETS];   /* it is reduced */
    size_t bytes[TIMELINE_BUCKETS];
};

/* When the reduction of a bucket begins: it is full, and the one before has ended. */
double ddp_timeline_start(const struct ddp_timeline *timeline, int bucket);

/* Milliseconds of all reductions; of these, during the backward pass. */
double ddp_timeline_reduction(const struct ddp_timeline *timeline);
double ddp_timeline_hidden(const struct ddp_timeline *timeline);

/* Writes a picture; 0, or -1 with errno. */
int ddp_timeline_draw(const struct ddp_timeline *timeline, const char *title, const char *path);

#endif
