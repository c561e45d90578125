/* What the files of the toy accelerator share.
 *
 * One lock guards everything but the memory of the devices, and one condition variable is signalled whenever anything
 * has changed. Kernels and copies run without the lock. */
#ifndef TANDEM_TESTS_TOY_MACHINE_H
#define TANDEM_TESTS_TOY_MACHINE_H

#include "toy_device.h"

#include <tandem/kernels.h>
#include <tandem/random.h>
#include <tandem/tensor.h>

#include <pthread.h>

struct toy_block;  /* toy_memory.c */
struct toy_pinned; /* toy_memory.c */
struct toy_event;  /* toy_event.c */
struct toy_stream; /* toy_stream.c */

enum toy_work { TOY_ALLOC, TOY_KERNEL, TOY_COPY, TOY_EVENT };

/* A failure that a test has requested. */
struct toy_request {
    int after; /* 1: the next one fails; 0: none */
    enum toy_when when;
};

struct toy_device {
    char name[8];
    bool is_open;
    bool held;
    bool copies_limited;
    int copies_left;

    int memory; /* memfd */
    size_t bytes;
    char *address; /* of the memory, as the library sees it: without any rights */
    char *mapping; /* of the same memory, as the device sees it */
    struct toy_block *blocks;

    struct toy_stream *streams;
    struct toy_event *events;
    uint64_t tickets; /* given to jobs */

    td_status failure; /* TD_OK: none */
    char failure_text[512];
    struct toy_request requests[TOY_EVENT];
    struct toy_counts counts;
};

struct toy_machine {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct toy_device devices[TOY_DEVICES];
    struct toy_pinned *pinned;
    uint64_t numbers; /* given to blocks and streams */
    size_t memory_bytes;
    int delay_us;
    uint64_t seed;
    enum toy_arithmetic arithmetic;
};

extern struct toy_machine toy_machine;

void toy_lock(void);
void toy_unlock(void);
void toy_wait(void);    /* until something has changed; unlocks meanwhile */
void toy_changed(void); /* wakes all waiters */

/** Locks, and checks that the device is open and has not failed; without the lock where that is not so. */
td_status toy_enter(struct toy_device *device);

/** Reports an error of the library, and aborts. */
_Noreturn void toy_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- Memory (toy_memory.c) --------------------------------------------------------------------- */

td_status toy_memory_open(struct toy_device *device);
void toy_memory_close(struct toy_device *device);
void toy_pinned_close(void);

td_status toy_alloc(void *self, size_t bytes, void **data);
void toy_free(void *self, void *data);
td_status toy_memory_info(void *self, size_t *available, size_t *total);
td_status toy_alloc_pinned(void *self, size_t bytes, void **data);
void toy_free_pinned(void *self, void *data);

/* Memory that something enqueued will use: of a device, or pinned, or of the host where `number` is 0. It must be in
 * one live block when it is enqueued, and in the same block when the stream gets there. */
struct toy_span {
    struct toy_device *device; /* NULL: the host's */
    void *data;
    size_t bytes;
    uint64_t number; /* of its block */
};

struct toy_span toy_span_on(struct toy_device *device, const void *data, size_t bytes,
                            const char *user);
struct toy_span toy_span_pinned(const void *data, size_t bytes, const char *user);

/** Where the stream's thread reads and writes it. */
void *toy_span_reach(const struct toy_span *span, const char *user);

/* ---- Streams and events (toy_stream.c, toy_event.c) -------------------------------------------- */

/* What a stream runs, and what it needs for it. */
struct toy_job {
    struct toy_job *next;
    enum toy_work work;
    const char *name; /* of the kernel or operation; a string constant */
    td_status (*run)(void *payload);
    void (*drop)(void *payload); /* frees what the payload refers to; NULL: nothing */
    uint64_t ticket;
    bool fails; /* when the stream gets there */
    _Alignas(max_align_t) unsigned char payload[];
};

/** A job with a copy of a payload; NULL without memory, with td_fail(). */
struct toy_job *toy_job_create(enum toy_work work, const char *name, td_status (*run)(void *),
                               const void *payload, size_t size);

/** Enqueues a job that can be requested to fail. Frees it where it cannot be enqueued. */
td_status toy_enqueue(struct toy_device *device, void *stream, struct toy_job *job);

/** Enqueues any job; with the lock. */
void toy_push(struct toy_device *device, void *stream, struct toy_job *job);

/** Waits until what is enqueued has run; with the lock. */
void toy_drain(struct toy_device *device);

void toy_streams_close(struct toy_device *device);
td_status toy_stream_create(void *self, int priority, void **stream);
void toy_stream_destroy(void *self, void *stream);
td_status toy_stream_synchronize(void *self, void *stream);
td_status toy_stream_query(void *self, void *stream, bool *done);
td_status toy_synchronize(void *self);

void toy_events_close(struct toy_device *device);
td_status toy_event_create(void *self, bool timing, void **event);
void toy_event_destroy(void *self, void *event);
td_status toy_event_record(void *self, void *event, void *stream);
td_status toy_event_wait(void *self, void *stream, void *event);
td_status toy_event_synchronize(void *self, void *event);
td_status toy_event_query(void *self, void *event, bool *done);
td_status toy_event_elapsed(void *self, void *start, void *end, double *milliseconds);

/* ---- Copies (toy_copy.c) ----------------------------------------------------------------------- */

td_status toy_copy_in(void *self, void *stream, void *data, const void *host, size_t bytes,
                      bool pinned);
td_status toy_copy_out(void *self, void *stream, void *host, const void *data, size_t bytes,
                       bool pinned);
td_status toy_copy_inside(void *self, void *stream, void *to, const void *from, size_t bytes);
td_status toy_copy_from(void *self, void *stream, void *to, void *other, const void *from,
                        size_t bytes);
td_status toy_fill_bytes(void *self, void *stream, void *data, unsigned char value, size_t bytes);

/* ---- Control (toy_control.c), with the lock ------------------------------------------------------ */

/** Whether a request makes this one fail, and when; counts it. */
bool toy_is_requested(struct toy_device *device, enum toy_work work, enum toy_when *when);

/** Makes it the device's failure, unless it has one. */
void toy_note_failure(struct toy_device *device, const char *name, td_status status,
                      const char *text);

/** td_fail() with the device's failure, or since it is not open; TD_OK without. */
td_status toy_failure(const struct toy_device *device);

void toy_control_reset(void);

/* ---- Kernels (toy_kernels.c, toy_lists.c, toy_random.c) ------------------------------------------- */

/* The slots of td_kernels for which there is a kernel. */
#define TOY_KERNELS(X)                                                                             \
    X(fill), X(copy), X(unary), X(unary_grad), X(binary), X(binary_scalar), X(add_scaled),         \
        X(where), X(clamp), X(reduce), X(arg_reduce), X(matmul), X(linear), X(conv2d),             \
        X(conv2d_grad_input), X(conv2d_grad_weight), X(max_pool2d), X(max_pool2d_grad),            \
        X(avg_pool2d), X(avg_pool2d_grad), X(adaptive_avg_pool2d), X(adaptive_avg_pool2d_grad),    \
        X(batch_norm), X(batch_norm_grad), X(layer_norm), X(layer_norm_grad), X(softmax),          \
        X(softmax_grad), X(attention), X(attention_grad), X(index_select), X(index_add),           \
        X(gather), X(scatter_add), X(nll_loss), X(nll_loss_grad), X(cross_entropy_grad),           \
        X(pair_loss), X(pair_loss_grad), X(dropout), X(dropout_grad), X(uniform), X(normal),       \
        X(bernoulli), X(random_range), X(sgd), X(adam), X(norm), X(scale), X(unscale),             \
        X(power_sums), X(linear_gelu), X(linear_gelu_grad), X(cross_entropy)

extern const td_kernels toy_kernels;

/**
 * Enqueues a kernel on the current stream of its tensors' device. `arguments` are `size` bytes, and tensors[0] to
 * tensors[count - 1] are the addresses in them where a pointer to a tensor is, or NULL. When the stream gets there,
 * run() gets a copy of the arguments, in which these point to tensors of the host over the device's memory.
 */
td_status toy_launch(const char *slot, td_status (*run)(void *arguments), const void *arguments,
                     size_t size, const void *const *tensors, int count);

/** td_fail() with TD_ERR_UNSUPPORTED: the toy has no kernel for `what` in a slot. */
td_status toy_unsupported(const char *slot, const char *what);

/** Whether a kernel is missing; counts one that has run. Both take the lock. */
bool toy_is_missing(const char *slot);
void toy_count_run(struct toy_device *device, const char *slot);

/* Kernels over lists of tensors (toy_lists.c). */
td_status toy_kernel_sgd(const td_sgd_update *updates, int count);
td_status toy_kernel_adam(const td_adam_update *updates, int count);
td_status toy_kernel_norm(td_tensor *out, td_tensor *const *x, int count, double power);
td_status toy_kernel_power_sums(td_tensor *out, td_tensor *const *x, int count, double power);
td_status toy_kernel_scale(td_tensor *const *x, int count, const td_tensor *factor);
td_status toy_kernel_unscale(td_tensor *const *x, int count, double factor, td_tensor *found);

/* Random numbers (toy_random.c). */
td_status toy_kernel_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                             int64_t block, td_generator *generator);
td_status toy_kernel_uniform(td_tensor *out, double from, double to, td_generator *generator);
td_status toy_kernel_normal(td_tensor *out, double mean, double std, td_generator *generator);
td_status toy_kernel_bernoulli(td_tensor *out, double p, td_generator *generator);
td_status toy_kernel_random_range(td_tensor *out, int64_t from, uint64_t range,
                                  td_generator *generator);

/* ---- Arithmetic (toy_arithmetic.c) -------------------------------------------------------------- */

/* A kernel whose arguments are ready: `places` are the offsets of the pointers to tensors, none of them NULL. */
struct toy_call {
    const char *slot;
    td_status (*run)(void *arguments);
    void *arguments;
    const size_t *places;
    int count;
};

td_status toy_run_call(const struct toy_call *call);

#endif
