/* PowerSGD: gradients that are matrices are sent as products of two thin ones.
 *
 *     M [n, m]  ~  P Q^T           P [n, r], Q [m, r]: r (n + m) numbers instead of n m
 *
 *     start     M += what was lost last time · P = M Q · sum of P over the ranks begins
 *     finish    P made orthonormal · Q = M^T P · mean of Q over the ranks · error = M - P Q^T
 *               M = P Q^T
 *
 * The next pass starts with this Q (warm start), so the passes together are a power iteration for
 * the largest singular vectors of a slowly changing matrix. Gradients that would not become smaller
 * are averaged uncompressed, in one call a bucket.
 *
 * P and Q are stored transposed, so that rows are orthonormalised. Everything is computed by kernels
 * of the gradients' device, and what depends on the numbers, such as a row of zeros, is chosen there:
 * the host does not wait. Random numbers are drawn by the host, so that they are the same on all
 * kinds of devices. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "parallel/buckets.h"
#include "tensor/tensor_internal.h"

#include <tandem/random.h>

#include <math.h>
#include <stdlib.h>

#define LEAST_SHARE 1e-6 /* of the length of a row that must be independent of the others */

struct td_powersgd {
    td_powersgd_options options;
    int64_t step;
};

/* A gradient that is compressed. */
struct matrix {
    td_tensor *m;     /* [n, m], a view of the bucket */
    td_tensor *p, *q; /* [r, n] and [r, m], views of the memory for all */
    td_tensor *spare; /* [r, m]: random rows for those of Q that have become 0 */
    td_tensor *error; /* [n, m]; NULL without error feedback */
};

/* A gradient that is not. */
struct plain {
    td_tensor *gradient; /* of the bucket */
    td_tensor *packed;   /* a view of `rest`, of the same shape */
};

/* A bucket's state between passes. */
struct compressed {
    td_generator *generator;
    struct matrix *matrices;
    int matrix_count;
    struct plain *plains;
    int plain_count;
    td_tensor *p, *q,
        *rest;          /* one-dimensional buffers that are sent; rest is empty if all gradients
                                are compressed */
    td_tensor *number;  /* [1, 1]: of the dtype of the gradients */
    td_tensor *zero;    /* the same, with 0 */
    td_tensor *is_good; /* [1, 1], bool */
    td_work *p_work, *rest_work;
    bool averaging; /* this pass is not compressed: its work is rest_work */
    bool q_is_set;
};

static void drop_work(td_work **work)
{
    if (*work) {
        td_work_wait(*work, 0);
        td_work_release(*work);
    }
    *work = NULL;
}

static void free_compressed(void *data)
{
    struct compressed *c = data;
    drop_work(&c->p_work);
    drop_work(&c->rest_work);
    for (int i = 0; i < c->matrix_count; i++) {
        td_tensor_release(c->matrices[i].m);
        td_tensor_release(c->matrices[i].p);
        td_tensor_release(c->matrices[i].q);
        td_tensor_release(c->matrices[i].spare);
        td_tensor_release(c->matrices[i].error);
    }
    for (int i = 0; i < c->plain_count; i++)
        td_tensor_release(c->plains[i].packed);
    td_tensor_release(c->p);
    td_tensor_release(c->q);
    td_tensor_release(c->rest);
    td_tensor_release(c->number);
    td_tensor_release(c->zero);
    td_tensor_release(c->is_good);
    td_generator_destroy(c->generator);
    free(c->matrices);
    free(c->plains);
    free(c);
}

/* ---- Which gradients, and their memory --------------------------------------------------------------- */

/* The sizes of a gradient as a matrix, and its rank; false if it is not compressed. */
static bool is_worth_it(const struct td_powersgd *p, const td_tensor *gradient, int64_t *n,
                        int64_t *m, int64_t *rank)
{
    const struct td__layout *layout = &gradient->layout;
    if (layout->ndim < 2 || !layout->numel || (layout->dtype != TD_F32 && layout->dtype != TD_F64))
        return false;
    *n = layout->shape[0];
    *m = layout->numel / *n;
    *rank = p->options.rank;
    *rank = *rank < *n ? *rank : *n;
    *rank = *rank < *m ? *rank : *m;
    return (double)(*n + *m) * (double)*rank * p->options.min_compression_rate <
           (double)*n * (double)*m;
}

/* A part of `memory` with the given shape, and *at behind it. */
static td_tensor *take(td_tensor *memory, int64_t *at, const int64_t *shape, int ndim)
{
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++)
        numel *= shape[d];
    td_tensor *part = td__narrow(memory, 0, *at, numel);
    td_tensor *view = td__reshape(part, shape, ndim, NULL);
    td_tensor_release(part);
    *at += numel;
    return view;
}

/* Draws normal numbers on the host, for a tensor of any device. */
static td_status draw(struct compressed *c, td_tensor *out)
{
    if (td__on_host(out))
        return td_normal_(out, 0, 1, c->generator);
    td_tensor *here = td__empty_pinned(out->storage->device, &out->layout);
    td_status status = here ? td_normal_(here, 0, 1, c->generator) : td__error_status();
    if (!status)
        status = td__tensor_copy_as(out, here, true);
    td_tensor_release(here);
    return status;
}

static td_status fill_matrix(const struct td_powersgd *p, struct compressed *c, td_tensor *gradient,
                             int64_t *at_p, int64_t *at_q)
{
    int64_t n, m, rank;
    is_worth_it(p, gradient, &n, &m, &rank);
    struct matrix *matrix = &c->matrices[c->matrix_count++];
    matrix->m = td__reshape(gradient, (int64_t[]){n, m}, 2, NULL);
    matrix->p = take(c->p, at_p, (int64_t[]){rank, n}, 2);
    matrix->q = take(c->q, at_q, (int64_t[]){rank, m}, 2);
    matrix->spare = td__empty_like(matrix->q);
    if (!p->options.no_error_feedback)
        matrix->error = td__zeros_like(matrix->m);
    bool good = matrix->m && matrix->p && matrix->q && matrix->spare &&
                (matrix->error || p->options.no_error_feedback);
    return good ? draw(c, matrix->spare) : td__fail_nomem("PowerSGD");
}

static td_status fill(const struct td_powersgd *p, struct compressed *c, td_bucket *bucket)
{
    td_tensor *buffer = td_bucket_buffer(bucket);
    int count = td_bucket_gradient_count(bucket);
    int64_t n, m, rank, sizes[3] = {0}; /* of P, of Q, of the rest */
    for (int i = 0; i < count; i++) {
        td_tensor *gradient = td_bucket_gradient(bucket, i);
        bool worth = is_worth_it(p, gradient, &n, &m, &rank);
        sizes[0] += worth ? rank * n : 0;
        sizes[1] += worth ? rank * m : 0;
        sizes[2] += worth ? 0 : gradient->layout.numel;
    }
    td_tensor **memory[] = {&c->p, &c->q, &c->rest};
    td_device *device = buffer->storage->device;
    td_dtype dtype = buffer->layout.dtype;
    for (int i = 0; i < 3; i++) {
        *memory[i] = td__empty("PowerSGD", &sizes[i], 1, dtype, device);
        if (!*memory[i])
            return td__error_status();
    }
    c->number = td__empty("PowerSGD", (int64_t[]){1, 1}, 2, dtype, device);
    c->zero = td__zeros_like(c->number);
    c->is_good = td__empty("PowerSGD", (int64_t[]){1, 1}, 2, TD_BOOL, device);
    if (!c->number || !c->zero || !c->is_good)
        return td__error_status();
    c->matrices = calloc((size_t)count + 1, sizeof *c->matrices);
    c->plains = calloc((size_t)count + 1, sizeof *c->plains);
    c->generator = td_generator_create(p->options.seed + (uint64_t)td_bucket_index(bucket),
                                       td__host_device());
    if (!c->matrices || !c->plains || !c->generator)
        return td__fail_nomem("PowerSGD");
    int64_t at[3] = {0};
    for (int i = 0; i < count; i++) {
        td_tensor *gradient = td_bucket_gradient(bucket, i);
        if (is_worth_it(p, gradient, &n, &m, &rank)) {
            TD_TRY(fill_matrix(p, c, gradient, &at[0], &at[1]));
            continue;
        }
        struct plain *plain = &c->plains[c->plain_count++];
        plain->gradient = gradient;
        plain->packed = take(c->rest, &at[2], gradient->layout.shape, gradient->layout.ndim);
        if (!plain->packed)
            return TD_ERR_NOMEM;
    }
    return TD_OK;
}

static struct compressed *compressed_of(const struct td_powersgd *p, td_bucket *bucket)
{
    struct compressed *c = td_bucket_data(bucket);
    if (c)
        return c;
    c = calloc(1, sizeof *c);
    if (!c) {
        td__fail_nomem("PowerSGD");
        return NULL;
    }
    if (fill(p, c, bucket)) {
        free_compressed(c);
        return NULL;
    }
    td_bucket_set_data(bucket, c, free_compressed);
    return c;
}

/* ---- Orthonormal rows --------------------------------------------------------------------------------- */

static td_status multiply(td_tensor *out, td_tensor *a, td_tensor *b)
{
    return td__kernels_of(out)->matmul(out, a, b, 1, false);
}

/* `one`, which has one element, in the shape of `like`. */
static td_tensor *spread(td_tensor *one, const td_tensor *like)
{
    return td__expand("PowerSGD", one, like->layout.shape, like->layout.ndim);
}

/* row = row / its length, which stays in c->number. A row of zeros becomes NaN. */
static td_status normalise(struct compressed *c, td_tensor *row)
{
    const td_kernels *kernels = td__kernels_of(row);
    TD_TRY(kernels->norm(c->number, &row, 1, 2)); /* summed in f64: squares of f32 do not vanish */
    td_tensor *length = spread(c->number, row);
    td_status status = length ? kernels->binary(TD_BINARY_DIV, row, row, length) : TD_ERR_NOMEM;
    td_tensor_release(length);
    return status;
}

/* x = c->is_good ? x : other, which has one element or the shape of x. */
static td_status keep_good(struct compressed *c, td_tensor *x, td_tensor *other)
{
    td_tensor *good = spread(c->is_good, x), *instead = spread(other, x);
    td_status status = good && instead ? td__kernels_of(x)->where(x, good, x, instead)
                                       : TD_ERR_NOMEM;
    td_tensor_release(good);
    td_tensor_release(instead);
    return status;
}

/* row -= its part in the space of the rows of `before`, which are orthonormal or 0. Two passes, since normalising
 * amplifies the rounding error of the first. */
static td_status subtract_rows(td_tensor *row, td_tensor *before)
{
    const td_kernels *kernels = td__kernels_of(row);
    td_tensor *shares = td__empty("PowerSGD", (int64_t[]){1, before->layout.shape[0]}, 2,
                                  row->layout.dtype, row->storage->device);
    td_tensor *transposed = td__transpose(before, 0, 1);
    td_status status = shares && transposed ? TD_OK : TD_ERR_NOMEM;
    for (int turn = 0; turn < 2 && !status; turn++) {
        status = multiply(shares, row, transposed);
        if (!status)
            status = kernels->matmul(row, shares, before, -1, true);
    }
    td_tensor_release(shares);
    td_tensor_release(transposed);
    return status;
}

/* Gram-Schmidt for row i of x. `other` replaces a row of which only rounding errors are left, or that is not finite. */
static td_status make_orthonormal(struct compressed *c, td_tensor *x, int64_t i, td_tensor *other)
{
    td_tensor *row = td__narrow(x, 0, i, 1), *before = td__narrow(x, 0, 0, i);
    td_status status = row && before ? normalise(c, row) : TD_ERR_NOMEM;
    if (!status && i > 0)
        status = subtract_rows(row, before);
    if (!status)
        status = normalise(c, row);
    if (!status) /* false for NaN */
        status = td__kernels_of(x)->binary_scalar(TD_BINARY_GT, c->is_good, c->number, LEAST_SHARE,
                                                  false);
    if (!status)
        status = keep_good(c, row, other);
    td_tensor_release(row);
    td_tensor_release(before);
    return status;
}

static td_status orthonormalise(struct compressed *c, td_tensor *x)
{
    for (int64_t i = 0; i < x->layout.shape[0]; i++)
        TD_TRY(make_orthonormal(c, x, i, c->zero));
    return TD_OK;
}

/* The initial Q: random, or that of the last pass. Rows that have become 0 are replaced, since they would stay 0, and
 * the new ones made orthonormal, too. */
static td_status begin_q(const struct td_powersgd *p, struct compressed *c)
{
    for (int i = 0; i < c->matrix_count; i++) {
        td_tensor *q = c->matrices[i].q;
        if (!c->q_is_set || p->options.no_warm_start)
            TD_TRY(draw(c, q));
        for (int64_t row = 0; row < q->layout.shape[0]; row++) {
            td_tensor *spare = td__narrow(c->matrices[i].spare, 0, row, 1);
            td_status status = spare ? make_orthonormal(c, q, row, spare) : TD_ERR_NOMEM;
            td_tensor_release(spare);
            TD_TRY(status);
            TD_TRY(make_orthonormal(c, q, row, c->zero));
        }
    }
    c->q_is_set = true;
    return TD_OK;
}

/* ---- The hook -------------------------------------------------------------------------------------------- */

/* Starts the all-reduce of the uncompressed gradients. */
static td_status start_rest(struct compressed *c, td_bucket *bucket)
{
    if (!c->plain_count)
        return TD_OK;
    for (int i = 0; i < c->plain_count; i++)
        TD_TRY(td__kernels_of(c->rest)->copy(c->plains[i].packed, c->plains[i].gradient));
    td_bucket_count_sent(bucket, td_tensor_nbytes(c->rest));
    return td_all_reduce(c->rest, TD_AVG, td_bucket_group(bucket), &c->rest_work);
}

static td_status start(td_bucket *bucket, void *arg)
{
    struct td_powersgd *p = arg;
    struct compressed *c = compressed_of(p, bucket);
    if (!c)
        return TD_ERR_NOMEM;
    drop_work(&c->p_work); /* of a pass that failed */
    drop_work(&c->rest_work);
    td_tensor *buffer = td_bucket_buffer(bucket);
    c->averaging = p->step < p->options.start_step || !c->matrix_count;
    if (c->averaging) {
        td_bucket_count_sent(bucket, td_tensor_nbytes(buffer));
        return td_all_reduce(buffer, TD_AVG, td_bucket_group(bucket), &c->rest_work);
    }
    TD_TRY(start_rest(c, bucket));
    TD_TRY(begin_q(p, c));
    const td_kernels *kernels = td__kernels_of(buffer);
    for (int i = 0; i < c->matrix_count; i++) {
        struct matrix *matrix = &c->matrices[i];
        if (matrix->error)
            TD_TRY(kernels->binary(TD_BINARY_ADD, matrix->m, matrix->m, matrix->error));
        td_tensor *transposed = td__transpose(matrix->m, 0, 1);
        td_status status = transposed ? multiply(matrix->p, matrix->q, transposed) : TD_ERR_NOMEM;
        td_tensor_release(transposed);
        TD_TRY(status);
    }
    td_bucket_count_sent(bucket, td_tensor_nbytes(c->p));
    return td_all_reduce(c->p, TD_SUM, td_bucket_group(bucket), &c->p_work);
}

static td_status wait_for(td_work **work)
{
    td_status status = *work ? td_work_wait(*work, 0) : TD_OK;
    td_work_release(*work);
    *work = NULL;
    return status;
}

/* error = 0 unless Q is finite: what a gradient that is not has lost is not added to the next one. All ranks have the
 * same Q, and it is not finite if the gradient of one of them is not. */
static td_status drop_bad_error(struct compressed *c, struct matrix *matrix)
{
    const td_kernels *kernels = td__kernels_of(matrix->m);
    TD_TRY(kernels->norm(c->number, &matrix->q, 1, INFINITY));
    TD_TRY(kernels->binary_scalar(TD_BINARY_LT, c->is_good, c->number, INFINITY, false));
    return keep_good(c, matrix->error, c->zero);
}

/* M = P Q^T, and the error. */
static td_status decompress(struct compressed *c, struct matrix *matrix)
{
    const td_kernels *kernels = td__kernels_of(matrix->m);
    if (matrix->error)
        TD_TRY(kernels->copy(matrix->error, matrix->m));
    td_tensor *p = td__transpose(matrix->p, 0, 1);
    td_status status = p ? multiply(matrix->m, p, matrix->q) : TD_ERR_NOMEM;
    td_tensor_release(p);
    if (!status && matrix->error)
        status = kernels->add_scaled(matrix->error, matrix->error, matrix->m, -1);
    return status || !matrix->error ? status : drop_bad_error(c, matrix);
}

static td_status finish_compressed(struct compressed *c, td_bucket *bucket)
{
    TD_TRY(wait_for(&c->p_work));
    for (int i = 0; i < c->matrix_count; i++) {
        TD_TRY(orthonormalise(c, c->matrices[i].p));
        TD_TRY(multiply(c->matrices[i].q, c->matrices[i].p, c->matrices[i].m));
    }
    td_bucket_count_sent(bucket, td_tensor_nbytes(c->q));
    TD_TRY(td_all_reduce(c->q, TD_AVG, td_bucket_group(bucket), NULL));
    for (int i = 0; i < c->matrix_count; i++)
        TD_TRY(decompress(c, &c->matrices[i]));
    for (int i = 0; i < c->plain_count; i++)
        TD_TRY(td__kernels_of(c->rest)->copy(c->plains[i].gradient, c->plains[i].packed));
    return TD_OK;
}

static td_status finish(td_bucket *bucket, void *arg)
{
    struct td_powersgd *p = arg;
    struct compressed *c = td_bucket_data(bucket);
    if (td_bucket_is_last(bucket))
        p->step++;
    TD_TRY(wait_for(&c->rest_work));
    return c->averaging ? TD_OK : finish_compressed(c, bucket);
}

td_powersgd *td_powersgd_create(const td_powersgd_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_powersgd_options with = options ? *options : (td_powersgd_options){0};
    with.rank = with.rank ? with.rank : 1;
    with.start_step = with.start_step ? with.start_step : 1000;
    with.min_compression_rate = td__option(with.min_compression_rate, 2);
    if (with.rank < 1 || !(with.min_compression_rate > 0)) {
        td_fail(TD_ERR_INVALID,
                "td_powersgd_create: the rank is %d, min_compression_rate is %g; both must be "
                "above 0",
                with.rank, with.min_compression_rate);
        return NULL;
    }
    td_powersgd *p = calloc(1, sizeof *p);
    if (!p) {
        td__fail_nomem("td_powersgd_create");
        return NULL;
    }
    p->options = with;
    return p;
}

void td_powersgd_destroy(td_powersgd *p)
{
    free(p);
}

td_comm_hook td_powersgd_hook(td_powersgd *p)
{
    return (td_comm_hook){.name = "powersgd", .start = start, .finish = finish, .arg = p};
}
