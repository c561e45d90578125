/* Large products of halves whose rows do not begin at multiples of 16 bytes, such as logits [N, 50257].
 *
 * Tensor cores are fed 16 bytes at a time: cuBLASLt is several times slower where addresses, leading dimensions, or
 * sizes of rows are not multiples of that. Copies with padded rows cost a pass over the matrix, which pays where each
 * element takes part in many multiplications:
 *
 *     out [m, n] = a [m, k] b [k, n]     a dimension along which the rows of a matrix go is padded to a multiple of 8 in
 *                                        all matrices that have it: with 0 in a and b; out is copied back without it
 *
 * It is done in pieces of m, so that the copies of a piece take bounded memory, which the next piece uses again. The
 * copy of b stays. TANDEM_CUDA_COPIES_MIB is the bound; 0 is without copies. */
#include "cuda/cuda_launch.h"
#include "cuda/lt_library.h"
#include "cuda/products.h"

#include <stdlib.h>

enum {
    UNIT = 8,
    ELEMENT = 2,
    ALIGNMENT = UNIT * ELEMENT,
    PIECE = 128,
    MOST_ROWS_OF_BLOCKS = 65535
};
static const double least_operations = 1 << 28; /* below, a slow product costs little */
static const double least_reuse = 192;          /* multiplications an element that is copied */

/* A matrix as it lies in memory: rows that follow one another at a distance. */
struct matrix {
    char *data;
    int64_t rows, columns, ld;
};

/* How a product is padded. */
struct padding {
    int64_t m, n, k;     /* sizes that are padded: of a piece, for m */
    bool a_by_k, b_by_k; /* the rows of a and b go along k */
    bool copies_a, copies_b, copies_out;
    int64_t piece; /* rows of out at a time */
};

static int64_t padded(int64_t size)
{
    return (size + UNIT - 1) / UNIT * UNIT;
}

static bool is_aligned(const void *data, int64_t ld)
{
    return (uintptr_t)data % ALIGNMENT == 0 && ld % UNIT == 0;
}

static int64_t bound(void)
{
    const char *text = getenv("TANDEM_CUDA_COPIES_MIB");
    return (int64_t)(text && *text ? strtol(text, NULL, 10) : 512) << 20;
}

/* Whether copies pay, and which. */
static bool plan(const struct product_args *args, td_dtype dtype, struct padding *padding)
{
    double m = (double)args->m, n = (double)args->n, k = (double)args->k;
    struct padding it = {.m = args->m, .n = args->n, .k = args->k};
    if ((dtype != TD_F16 && dtype != TD_BF16) || args->batch_dims || m * n * k < least_operations)
        return false;
    it.a_by_k = args->a_column == 1;
    it.b_by_k = args->b_row == 1;
    if ((!it.a_by_k && args->a_row != 1) || (!it.b_by_k && args->b_column != 1))
        return false;
    int64_t a_ld = it.a_by_k ? args->a_row : args->a_column;
    int64_t b_ld = it.b_by_k ? args->b_column : args->b_row;
    if (is_aligned(args->a, a_ld) && is_aligned(args->b, b_ld) &&
        is_aligned(args->out, args->out_row))
        return false;
    bool pads_m = !it.a_by_k && args->m % UNIT, pads_n = args->n % UNIT;
    bool pads_k = (it.a_by_k || it.b_by_k) && args->k % UNIT;
    it.n = pads_n ? padded(args->n) : args->n;
    it.k = pads_k ? padded(args->k) : args->k;
    it.copies_a = pads_m || pads_k || !is_aligned(args->a, a_ld);
    it.copies_b = pads_n || pads_k || !is_aligned(args->b, b_ld);
    it.copies_out = pads_n || !is_aligned(args->out, args->out_row);
    double copied = it.copies_a * m * k + it.copies_b * k * n + it.copies_out * m * n;
    int64_t row = (it.copies_a ? padded(it.k) : 0) + (it.copies_out ? it.n : 0);
    int64_t most = row ? bound() / ELEMENT / row : args->m;
    it.piece = most >= args->m ? args->m : most / PIECE * PIECE;
    *padding = it;
    return m * n * k >= least_reuse * copied && it.piece > 0 &&
           (!it.copies_b || padded(it.k) * padded(it.n) * ELEMENT <= bound());
}

static td_status copy(const td_tensor *tensor, struct matrix to, struct matrix from)
{
    static struct cuda_kernel kernel = TD__CUDA_KERNEL(products, "copy_padded_2");
    enum { EACH_BLOCK = PADDED_THREADS * PADDED_EACH };
    struct padded_args args = {.from = from.data,
                               .to = to.data,
                               .from_rows = from.rows,
                               .from_columns = from.columns,
                               .from_ld = from.ld,
                               .rows = to.rows,
                               .columns = to.columns,
                               .to_ld = to.ld};
    int64_t rows = to.rows < MOST_ROWS_OF_BLOCKS ? to.rows : MOST_ROWS_OF_BLOCKS;
    struct cuda_grid grid = {
        .blocks = {(unsigned)((to.columns + EACH_BLOCK - 1) / EACH_BLOCK), (unsigned)rows},
        .threads = PADDED_THREADS};
    return td__cuda_launch(&kernel, tensor, grid, &args);
}

/* A new matrix of this size, with rows that are aligned; NULL data without memory. */
static struct matrix make(const td_tensor *tensor, int64_t rows, int64_t columns)
{
    int64_t ld = padded(columns);
    td_tensor *memory = td__cuda_workspace(tensor, (size_t)(rows * ld * ELEMENT));
    return (struct matrix){memory ? td_tensor_data(memory) : NULL, rows, columns, ld};
}

/* Copies an operand to a new matrix of `rows` by `columns`. */
static td_status pad(const td_tensor *tensor, struct matrix from, int64_t rows, int64_t columns,
                     struct matrix *to)
{
    *to = make(tensor, rows, columns);
    return to->data ? copy(tensor, *to, from) : TD_ERR_NOMEM;
}

/* b and bias, once for all pieces. */
static td_status pad_b(struct product_args *args, const struct padding *it, td_tensor *out)
{
    struct matrix from = it->b_by_k
                             ? (struct matrix){(char *)args->b, args->n, args->k, args->b_column}
                             : (struct matrix){(char *)args->b, args->k, args->n, args->b_row};
    struct matrix to, bias = {(char *)args->bias, 1, args->n, args->n};
    if (it->copies_b) {
        td_status status = pad(out, from, it->b_by_k ? it->n : it->k, it->b_by_k ? it->k : it->n,
                               &to);
        if (status)
            return status;
        args->b = to.data;
        *(it->b_by_k ? &args->b_column : &args->b_row) = to.ld;
    }
    if (!args->bias || it->n == args->n)
        return TD_OK;
    td_status status = pad(out, bias, 1, it->n, &to);
    args->bias = to.data;
    return status;
}

/* Rows `from` to `from` + `rows` of out. `args` has the copy of b. */
static td_status multiply_piece(const struct product_args *args, const struct padding *it,
                                int64_t from, int64_t rows, td_tensor *out,
                                td_status (*multiply)(const struct product_args *, td_tensor *))
{
    TD_SCOPE;
    struct product_args piece = *args;
    struct matrix a, whole,
        target = {(char *)args->out + from * args->out_row * ELEMENT, rows, args->n, args->out_row};
    td_status status = TD_OK;
    piece.m = it->a_by_k || !it->copies_a ? rows : padded(rows);
    piece.n = it->n;
    piece.k = it->k;
    piece.a = (const char *)args->a + from * args->a_row * ELEMENT;
    piece.out = target.data;
    if (it->copies_a) {
        struct matrix source = it->a_by_k
                                   ? (struct matrix){(char *)piece.a, rows, args->k, args->a_row}
                                   : (struct matrix){(char *)piece.a, args->k, rows,
                                                     args->a_column};
        status = pad(out, source, it->a_by_k ? rows : it->k, it->a_by_k ? it->k : piece.m, &a);
        if (status)
            return status;
        piece.a = a.data;
        *(it->a_by_k ? &piece.a_row : &piece.a_column) = a.ld;
    }
    bool copies_out = it->copies_out || piece.m != rows;
    if (copies_out) {
        whole = make(out, piece.m, it->n);
        if (!whole.data)
            return TD_ERR_NOMEM;
        if (args->accumulate)
            status = copy(out, whole, target);
        piece.out = whole.data;
        piece.out_row = whole.ld;
    }
    if (!status)
        status = multiply(&piece, out);
    return status || !copies_out ? status : copy(out, target, whole);
}

td_status td__cuda_multiply_padded(const struct product_args *args, td_tensor *out,
                                   td_status (*multiply)(const struct product_args *, td_tensor *),
                                   bool *done)
{
    TD_SCOPE;
    struct padding it;
    struct product_args with_b = *args;
    *done = false;
    if (!plan(args, td_tensor_dtype(out), &it))
        return TD_OK;
    td_status status = td__cuda_enter(td__cuda_device_of(out));
    if (status || !td__lt_open())
        return status;
    *done = true;
    status = pad_b(&with_b, &it, out);
    for (int64_t row = 0; row < args->m && !status; row += it.piece)
        status = multiply_piece(&with_b, &it, row,
                                args->m - row < it.piece ? args->m - row : it.piece, out, multiply);
    return status;
}
