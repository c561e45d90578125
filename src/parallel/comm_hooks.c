/* Built-in communication hooks: all-reduce, and all-reduce in half precision.
 *
 * Half precision: each element is divided by the number of ranks and rounded to f16 or bf16, the
 * all-reduce sums these (in f32, rounded once), and the sums are converted back. */
#include "base/fail.h"
#include "parallel/buckets.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>

/* A bucket's data between start and finish. */
struct halves {
    td_tensor *tensor;
    td_work *work;
};

/* Drops a work that a failed pass has left, before its memory is written again. */
static void drop_work(struct halves *halves)
{
    if (halves->work)
        td_work_wait(halves->work, 0);
    td_work_release(halves->work);
    halves->work = NULL;
}

static void free_halves(void *data)
{
    struct halves *halves = data;
    drop_work(halves);
    td_tensor_release(halves->tensor);
    free(halves);
}

static struct halves *halves_of(td_bucket *bucket, td_dtype dtype)
{
    struct halves *halves = td_bucket_data(bucket);
    if (halves)
        return halves;
    halves = calloc(1, sizeof *halves);
    if (halves)
        halves->tensor = td__empty_like_as(td_bucket_buffer(bucket), dtype);
    if (!halves || !halves->tensor) {
        free(halves);
        td__fail_nomem("communication hook");
        return NULL;
    }
    td_bucket_set_data(bucket, halves, free_halves);
    return halves;
}

static td_status start_halves(td_bucket *bucket, td_dtype dtype)
{
    struct halves *halves = halves_of(bucket, dtype);
    if (!halves)
        return TD_ERR_NOMEM;
    drop_work(halves);
    td_tensor *buffer = td_bucket_buffer(bucket);
    const td_kernels *kernels = td__kernels_of(buffer);
    td_group *group = td_bucket_group(bucket);
    TD_TRY(kernels->binary_scalar(TD_BINARY_MUL, buffer, buffer, 1.0 / td_get_world_size(group),
                                  false));
    TD_TRY(kernels->copy(halves->tensor, buffer));
    td_bucket_count_sent(bucket, td_tensor_nbytes(halves->tensor));
    return td_all_reduce(halves->tensor, TD_SUM, group, &halves->work);
}

static td_status start_fp16(td_bucket *bucket, void *arg)
{
    (void)arg;
    return start_halves(bucket, TD_F16);
}

static td_status start_bf16(td_bucket *bucket, void *arg)
{
    (void)arg;
    return start_halves(bucket, TD_BF16);
}

static td_status finish_halves(td_bucket *bucket, void *arg)
{
    (void)arg;
    struct halves *halves = td_bucket_data(bucket);
    td_status status = td_work_wait(halves->work, 0);
    td_work_release(halves->work);
    halves->work = NULL;
    TD_TRY(status);
    td_tensor *buffer = td_bucket_buffer(bucket);
    return td__kernels_of(buffer)->copy(buffer, halves->tensor);
}

td_comm_hook td_hook_all_reduce(void)
{
    return (td_comm_hook){.name = "all_reduce"};
}

td_comm_hook td_hook_fp16(void)
{
    return (td_comm_hook){.name = "fp16", .start = start_fp16, .finish = finish_halves};
}

td_comm_hook td_hook_bf16(void)
{
    return (td_comm_hook){.name = "bf16", .start = start_bf16, .finish = finish_halves};
}
