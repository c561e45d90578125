/* Attention, y = softmax(scale q k^T + mask) v, in blocks of the matrix of scores.
 *
 *              keys: s
 *            +----+----+        A block is up to `rows` x KEYS. Forward, each row keeps the running maximum
 *      rows  | 1  | 2  |        of its scores and the sum of exponentials; when a later block has a
 *        l   +----+----+        greater score, the sums are rescaled.
 *            | 3  | 4  |
 *            +----+----+        Causal attention skips the blocks above the diagonal.
 *
 * Only lse, the log-sum-exp of each row, is saved. Backward, the blocks are recomputed, and p = e^(score - lse)
 * is the softmax. With d[i] = sum over e of dy[i, e] y[i, e]:
 *
 *     ds = p (dy v^T - d)     dq = scale ds k     dk = scale ds^T q     dv = p^T dy
 *
 * Heads are independent of one another: where there are as many as threads, each thread takes some of them, and
 * otherwise the products of a block are divided among the threads.
 *
 * Memory: two blocks and a few numbers for each of their rows, for each thread, independent of the sizes. Halves are
 * converted to f32 a batch index at a time. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "base/half.h"
#include "tensor/gemm.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <stdatomic.h>
#include <stdlib.h>

/* A pair of blocks stays in L2. Causal attention has fewer rows in a block, so that less is computed above the
 * diagonal. */
#define ROWS 128
#define CAUSAL_ROWS 64
#define KEYS 256

/* One matrix for each head of each batch: contiguous columns, strides in elements. */
struct matrices {
    char *data;
    int64_t batch, head, row;
};

struct attention {
    td_dtype dtype;       /* that is computed with */
    int64_t heads, items; /* items: heads of all batches */
    int64_t l, s, d, e;
    struct matrices q, k, v, y, grad_y, grad_q, grad_k, grad_v;
    void *lse; /* [items, l] or NULL */
    const char *mask;
    td_dtype mask_dtype;
    int64_t mask_strides[4];
    bool causal;
    double scale;
    /* Memory for one block and its rows, of the dtype: */
    void *scores, *grad_scores; /* [rows, keys] */
    void *most, *sums, *delta;  /* [rows]: maximum, sum of exponentials, d of above */
};

/* A block of the scores. */
struct block {
    int64_t item;
    int64_t first, rows; /* of q */
    int64_t from, keys;  /* of k */
};

#include "tensor/real_f32.h"
#include "tensor/cpu_attention_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_attention_loops.h"

/* Row `row` of item `item`. */
static void *row_of(const struct attention *a, const struct matrices *m, int64_t item, int64_t row)
{
    int64_t batch = item / a->heads, head = item % a->heads;
    return m->data +
           (batch * m->batch + head * m->head + row * m->row) * (int64_t)td_dtype_size(a->dtype);
}

/* How many keys the rows up to `last` attend to. */
static int64_t keys_seen(const struct attention *a, int64_t last)
{
    return a->causal && last + 1 < a->s ? last + 1 : a->s;
}

/* to = alpha x z^T for the block: x are rows of l, z rows of s, `depth` columns each. */
static td_status block_product(const struct attention *a, const struct block *b, void *to,
                               const struct matrices *x, const struct matrices *z, int64_t depth,
                               double alpha)
{
    return td__gemm(a->dtype, &(struct td__gemm){
                                  .m = b->rows,
                                  .n = b->keys,
                                  .k = depth,
                                  .a = row_of(a, x, b->item, b->first),
                                  .a_row = x->row,
                                  .a_col = 1,
                                  .b = row_of(a, z, b->item, b->from),
                                  .b_row = 1,
                                  .b_col = z->row,
                                  .c = to,
                                  .c_row = b->keys,
                                  .alpha = alpha,
                              });
}

/* The rows of l of `to`, `width` columns: (+)= alpha block z, with the rows of s of z. */
static td_status to_rows(const struct attention *a, const struct block *b,
                         const struct matrices *to, int64_t width, const void *block,
                         const struct matrices *z, double alpha)
{
    return td__gemm(a->dtype, &(struct td__gemm){
                                  .m = b->rows,
                                  .n = width,
                                  .k = b->keys,
                                  .a = block,
                                  .a_row = b->keys,
                                  .a_col = 1,
                                  .b = row_of(a, z, b->item, b->from),
                                  .b_row = z->row,
                                  .b_col = 1,
                                  .c = row_of(a, to, b->item, b->first),
                                  .c_row = to->row,
                                  .alpha = alpha,
                                  .accumulate = b->from > 0,
                              });
}

/* The rows of s of `to`: += alpha block^T x, with the rows of l of x. */
static td_status to_keys(const struct attention *a, const struct block *b,
                         const struct matrices *to, int64_t width, const void *block,
                         const struct matrices *x, double alpha)
{
    return td__gemm(a->dtype, &(struct td__gemm){
                                  .m = b->keys,
                                  .n = width,
                                  .k = b->rows,
                                  .a = block,
                                  .a_row = 1,
                                  .a_col = b->keys,
                                  .b = row_of(a, x, b->item, b->first),
                                  .b_row = x->row,
                                  .b_col = 1,
                                  .c = row_of(a, to, b->item, b->from),
                                  .c_row = to->row,
                                  .alpha = alpha,
                                  .accumulate = true,
                              });
}

/* Sets rows `first` to `first + rows - 1` of an item to 0. */
static void clear_rows(const struct attention *a, const struct matrices *m, int64_t item,
                       int64_t first, int64_t rows, int64_t width)
{
    for (int64_t i = first; i < first + rows && width; i++)
        memset(row_of(a, m, item, i), 0, (size_t)width * td_dtype_size(a->dtype));
}

/* ---- Forwards -------------------------------------------------------------------------------- */

static td_status forward_rows(const struct attention *a, struct block b)
{
    bool f32 = a->dtype == TD_F32;
    (f32 ? begin_rows_f32 : begin_rows_f64)(a, &b);
    int64_t seen = keys_seen(a, b.first + b.rows - 1);
    for (b.from = 0; b.from < seen; b.from += KEYS) {
        b.keys = seen - b.from < KEYS ? seen - b.from : KEYS;
        TD_TRY(block_product(a, &b, a->scores, &a->q, &a->k, a->d, a->scale));
        (f32 ? soften_f32 : soften_f64)(a, &b, row_of(a, &a->y, b.item, b.first));
        TD_TRY(to_rows(a, &b, &a->y, a->e, a->scores, &a->v, 1));
    }
    (f32 ? end_rows_f32 : end_rows_f64)(a, &b, row_of(a, &a->y, b.item, b.first));
    return TD_OK;
}

/* ---- Backwards ------------------------------------------------------------------------------- */

static td_status backward_block(const struct attention *a, const struct block *b)
{
    TD_TRY(block_product(a, b, a->scores, &a->q, &a->k, a->d, a->scale));
    TD_TRY(block_product(a, b, a->grad_scores, &a->grad_y, &a->v, a->e, 1));
    (a->dtype == TD_F32 ? grad_scores_f32 : grad_scores_f64)(a, b);
    if (a->grad_v.data)
        TD_TRY(to_keys(a, b, &a->grad_v, a->e, a->scores, &a->grad_y, 1));
    if (a->grad_q.data)
        TD_TRY(to_rows(a, b, &a->grad_q, a->d, a->grad_scores, &a->k, a->scale));
    if (a->grad_k.data)
        TD_TRY(to_keys(a, b, &a->grad_k, a->d, a->grad_scores, &a->q, a->scale));
    return TD_OK;
}

static td_status backward_rows(const struct attention *a, struct block b)
{
    void *y = row_of(a, &a->y, b.item, b.first), *gy = row_of(a, &a->grad_y, b.item, b.first);
    (a->dtype == TD_F32 ? row_products_f32 : row_products_f64)(a, &b, y, gy);
    int64_t seen = keys_seen(a, b.first + b.rows - 1);
    if (seen == 0 && a->grad_q.data)
        clear_rows(a, &a->grad_q, b.item, b.first, b.rows, a->d);
    for (b.from = 0; b.from < seen; b.from += KEYS) {
        b.keys = seen - b.from < KEYS ? seen - b.from : KEYS;
        TD_TRY(backward_block(a, &b));
    }
    return TD_OK;
}

/* ---- The kernels ------------------------------------------------------------------------------ */

/* `data` is the tensor's memory or a contiguous copy. */
static struct matrices matrices_of(const td_tensor *tensor, const void *data)
{
    const int64_t *shape = tensor->layout.shape, *strides = tensor->layout.strides;
    if (data != td_tensor_data(tensor))
        return (struct matrices){(char *)data, shape[1] * shape[2] * shape[3], shape[2] * shape[3],
                                 shape[3]};
    return (struct matrices){(char *)data, strides[0], strides[1], strides[2]};
}

static struct matrices operand(struct td__wide *w, const td_tensor *tensor)
{
    return matrices_of(tensor, td__widen(w, tensor));
}

static struct matrices result(struct td__wide *w, td_tensor *tensor)
{
    return tensor ? matrices_of(tensor, td__widen_out(w, tensor, false)) : (struct matrices){0};
}

static struct attention attention_of(struct td__wide *w, const td_tensor *q, const td_tensor *k,
                                     const td_tensor *v, const td_tensor *mask, bool causal,
                                     double scale)
{
    struct attention a = {
        .dtype = td__wide_dtype(q),
        .heads = q->layout.shape[1],
        .items = q->layout.shape[0] * q->layout.shape[1],
        .l = q->layout.shape[2],
        .s = k->layout.shape[2],
        .d = q->layout.shape[3],
        .e = v->layout.shape[3],
        .q = operand(w, q),
        .k = operand(w, k),
        .v = operand(w, v),
        .causal = causal,
        .scale = scale,
    };
    if (mask) {
        a.mask = td_tensor_data(mask);
        a.mask_dtype = mask->layout.dtype;
        memcpy(a.mask_strides, mask->layout.strides, sizeof a.mask_strides);
    }
    return a;
}

/* Heads of a thread. */
struct job {
    const struct attention *a;
    td_status (*rows)(const struct attention *, struct block);
    int64_t height; /* of a block */
    _Atomic(td_status) status;
};

/* Calls `rows` for all blocks of rows of the items. */
static td_status run_with(const struct job *job, struct attention *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++)
        for (int64_t first = 0; first < a->l; first += job->height)
            TD_TRY(job->rows(a, (struct block){.item = item,
                                               .first = first,
                                               .rows = a->l - first < job->height ? a->l - first
                                                                                  : job->height}));
    return TD_OK;
}

static void run_items(void *arg, int64_t begin, int64_t end)
{
    struct job *job = arg;
    struct attention a = *job->a;
    int64_t height = job->height, keys = a.s < KEYS ? a.s : KEYS;
    int64_t size = (int64_t)td_dtype_size(a.dtype);
    char *memory = malloc((size_t)(height * (2 * keys + 3) * size) + 1);
    td_status status = TD_ERR_NOMEM;
    if (memory) {
        a.scores = memory;
        a.grad_scores = memory + height * keys * size;
        a.most = memory + height * 2 * keys * size;
        a.sums = (char *)a.most + height * size;
        a.delta = (char *)a.sums + height * size;
        status = run_with(job, &a, begin, end);
    }
    free(memory);
    if (status)
        atomic_store(&job->status, status);
}

static td_status run(struct attention *a, td_status (*rows)(const struct attention *, struct block))
{
    int64_t height = a->causal ? CAUSAL_ROWS : ROWS;
    struct job job = {.a = a, .rows = rows, .height = a->l < height ? a->l : height};
    bool many = a->items >= td_get_num_threads();
    if (a->items && a->l)
        td__parallel_for(a->items, many ? 1 : a->items, run_items, &job);
    return job.status ? td__fail_nomem("attention") : TD_OK; /* nothing else can fail */
}

/* Batch indices from n on of a tensor, `count` of them; NULL for NULL, with `view` unused. */
static td_tensor *batches_of(struct td_tensor *view, const td_tensor *tensor, int64_t n,
                             int64_t count)
{
    if (!tensor)
        return NULL;
    *view = (struct td_tensor){.owners = 1,
                               .storage = tensor->storage,
                               .offset = tensor->offset + n * tensor->layout.strides[0],
                               .layout = tensor->layout};
    if (tensor->layout.shape[0])
        view->layout.numel = tensor->layout.numel / tensor->layout.shape[0] * count;
    view->layout.shape[0] = count;
    return view;
}

/* How many batch indices are computed at once. Wide dtypes need no copies. */
static int64_t batches_at_once(const td_tensor *q)
{
    bool wide = td__wide_dtype(q) == q->layout.dtype;
    return wide && q->layout.shape[0] ? q->layout.shape[0] : 1;
}

static td_status attend(td_tensor *out, td_tensor *lse, const td_tensor *q, const td_tensor *k,
                        const td_tensor *v, const td_tensor *mask, bool causal, double scale)
{
    struct td__wide w = {0};
    struct attention a = attention_of(&w, q, k, v, mask, causal, scale);
    a.y = result(&w, out);
    a.lse = lse ? td_tensor_data(lse) : NULL;
    if (w.status == TD_OK)
        w.status = run(&a, forward_rows);
    return td__widen_end(&w);
}

td_status td__cpu_attention(td_tensor *out, td_tensor *lse, const td_tensor *q, const td_tensor *k,
                            const td_tensor *v, const td_tensor *mask, bool causal, double scale)
{
    struct td_tensor x[6];
    int64_t count = batches_at_once(q);
    for (int64_t n = 0; n < q->layout.shape[0]; n += count)
        TD_TRY(attend(batches_of(&x[0], out, n, count), batches_of(&x[1], lse, n, count),
                      batches_of(&x[2], q, n, count), batches_of(&x[3], k, n, count),
                      batches_of(&x[4], v, n, count), batches_of(&x[5], mask, n, count), causal,
                      scale));
    return TD_OK;
}

static td_status attend_grad(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                             const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                             const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                             const td_tensor *mask, bool causal, double scale)
{
    struct td__wide w = {0};
    struct attention a = attention_of(&w, q, k, v, mask, causal, scale);
    a.y = operand(&w, y);
    a.grad_y = operand(&w, grad_y);
    a.lse = td_tensor_data(lse);
    a.grad_q = result(&w, grad_q);
    a.grad_k = result(&w, grad_k);
    a.grad_v = result(&w, grad_v);
    if (w.status == TD_OK) {
        /* All rows add to the gradients of k and v; no row may attend to some keys. */
        for (int64_t item = 0; item < a.items; item++) {
            if (a.grad_k.data)
                clear_rows(&a, &a.grad_k, item, 0, a.s, a.d);
            if (a.grad_v.data)
                clear_rows(&a, &a.grad_v, item, 0, a.s, a.e);
        }
        w.status = run(&a, backward_rows);
    }
    return td__widen_end(&w);
}

td_status td__cpu_attention_grad(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                                 const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                                 const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                                 const td_tensor *mask, bool causal, double scale)
{
    struct td_tensor x[10];
    int64_t count = batches_at_once(q);
    for (int64_t n = 0; n < q->layout.shape[0]; n += count)
        TD_TRY(attend_grad(batches_of(&x[0], grad_q, n, count), batches_of(&x[1], grad_k, n, count),
                           batches_of(&x[2], grad_v, n, count), batches_of(&x[3], grad_y, n, count),
                           batches_of(&x[4], q, n, count), batches_of(&x[5], k, n, count),
                           batches_of(&x[6], v, n, count), batches_of(&x[7], y, n, count),
                           batches_of(&x[8], lse, n, count), batches_of(&x[9], mask, n, count),
                           causal, scale));
    return TD_OK;
}
