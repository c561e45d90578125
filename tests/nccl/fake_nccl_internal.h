/* What the files of the fake NCCL share. */
#ifndef TANDEM_TESTS_FAKE_NCCL_INTERNAL_H
#define TANDEM_TESTS_FAKE_NCCL_INTERNAL_H

#include "fake_nccl.h"

#include <stdatomic.h>

enum { RANKS = 8, BOX_BYTES = 65536, AREA_BYTES = 2 << 20, OPS = 16 };

enum fake_kind {
    BROADCAST = 1,
    REDUCE,
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    SEND,
    RECV
};

enum fake_type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, TYPES };
enum fake_reduction { SUM, PRODUCT, MAX, MIN, AVG, BUILT_IN };

/* The part of a call that a rank publishes. */
struct fake_label {
    int kind, type, op, root;
    uint64_t count;
};

struct fake_box { /* from one rank to another: one chunk at a time */
    _Atomic uint64_t sent, taken;
    uint64_t bytes;
    char data[BOX_BYTES];
};

struct fake_shared {
    atomic_int attached;
    _Atomic uint64_t arrived[RANKS], finished[RANKS]; /* the number of the last collective */
    struct fake_label labels[RANKS];
    struct fake_box boxes[RANKS][RANKS];
    char areas[RANKS][AREA_BYTES];
};

struct fake_comm {
    int rank, size;
    struct fake_shared *shared;
    char path[512];
    atomic_int refs;     /* of the caller, and of each job */
    atomic_int pending;  /* jobs that have not run */
    atomic_bool aborted; /* what runs ends without a result */
    bool finalizing, joined;
    uint64_t collectives;
    double factors[OPS];
    bool used[OPS];
    struct fake_job *deferred; /* of a group call that is in progress … */
    int polls;                 /* … for so many more looks */
};

/* One call of NCCL. */
struct fake_op {
    struct fake_op *next;
    struct fake_label label;
    double factor; /* of the own input */
    uint64_t number;
    void *in, *out; /* held; NULL: none */
    size_t in_bytes, out_bytes, moved;
    int peer;
    bool is_over;
};

struct fake_job {
    struct fake_job *next;
    struct fake_comm *comm;
    void *stream;
    bool is_enqueued;
    struct fake_op *ops, **end;
};

extern const struct fake_device *fake_device;

size_t fake_type_size(int type);

/** Waits for a random time, if the environment says so. */
void fake_jitter(void);

/** acc = acc op other; scales by a factor; divides by the number of ranks. */
void fake_combine(void *acc, const void *other, size_t count, int type, int op);
void fake_scale(void *data, size_t count, int type, double factor);

/** Runs the operations of a job, on the thread of the stream. */
td_status fake_run_job(void *arg);
void fake_drop_job(void *arg);

#endif
