/* Matrix products, with the cases of torch.matmul.
 *
 * A vector on the left is a matrix of one row, one on the right a matrix of one column; the result
 * lacks these dimensions. The dimensions before the last two are the batch, and broadcast. With A
 * [M, K] and B [K, N] for each index of the batch:
 *
 *     Y = A B        grad_A = grad_Y B^T        grad_B = A^T grad_Y
 *
 * The gradient of a broadcast operand is a sum over the batch. If an operand has no batch
 * dimensions (weights), one product, or products that accumulate, form that sum; otherwise the
 * engine does. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <string.h>

/* Which of the operands were vectors. */
struct vectors {
    bool a, b;
};

/* The operands of the kernel: views in the scope. */
struct operands {
    td_tensor *a, *b;           /* [..., M, K], [..., K, N], the batches expanded to one shape */
    int64_t shape[TD_MAX_DIMS]; /* [..., M, N] */
    int ndim;
};

static td_tensor *as_left(td_tensor *a)
{
    return a->layout.ndim == 1 ? td__adopt(td__unsqueeze(a, 0)) : a;
}

static td_tensor *as_right(td_tensor *b)
{
    return b->layout.ndim == 1 ? td__adopt(td__unsqueeze(b, 1)) : b;
}

/* The result, or its gradient, with the dimensions of vectors inserted. */
static td_tensor *as_product(td_tensor *y, struct vectors vectors)
{
    if (vectors.b)
        y = td__adopt(td__unsqueeze(y, y->layout.ndim));
    if (y && vectors.a)
        y = td__adopt(td__unsqueeze(y, y->layout.ndim - 1));
    return y;
}

/* x expanded to the batch dimensions of `shape`. */
static td_tensor *with_batch(td_tensor *x, const int64_t *shape, int ndim)
{
    int64_t full[TD_MAX_DIMS];
    const struct td__layout *layout = &x->layout;
    if (layout->ndim == ndim && !memcmp(layout->shape, shape, (size_t)(ndim - 2) * sizeof shape[0]))
        return x;
    memcpy(full, shape, (size_t)ndim * sizeof full[0]);
    full[ndim - 2] = layout->shape[layout->ndim - 2];
    full[ndim - 1] = layout->shape[layout->ndim - 1];
    return td__adopt(td__expand("td_matmul", x, full, ndim));
}

static td_status refuse(const char *call, const td_tensor *a, const td_tensor *b, const char *what)
{
    TD_TRY(td__check_whole(a, call));
    TD_TRY(td__check_whole(b, call));
    return td_fail(TD_ERR_INVALID, "%s: the shapes %s and %s cannot be multiplied; %s", call,
                   td__shape_of(a), td__shape_of(b), what);
}

static td_status prepare(const char *call, td_tensor *a, td_tensor *b, struct operands *operands)
{
    TD_TRY(td__check_same(call, a, b));
    TD_TRY(td__check_float(call, a));
    if (a->layout.ndim == 0 || b->layout.ndim == 0)
        return refuse(call, a, b, "a tensor without dimensions has no product; use td_mul()");
    td_tensor *left = as_left(a), *right = as_right(b);
    if (!left || !right)
        return TD_ERR_NOMEM;
    const struct td__layout *x = &left->layout, *y = &right->layout;
    if (x->shape[x->ndim - 1] != y->shape[y->ndim - 2])
        return refuse(call, a, b,
                      "the last size of the first must equal the last but one of the second");
    int ndim = x->ndim > y->ndim ? x->ndim : y->ndim;
    for (int d = 0; d < ndim - 2; d++) {
        int64_t of_x = d < ndim - x->ndim ? 1 : x->shape[d - (ndim - x->ndim)];
        int64_t of_y = d < ndim - y->ndim ? 1 : y->shape[d - (ndim - y->ndim)];
        if (of_x != of_y && of_x != 1 && of_y != 1)
            return refuse(call, a, b, "the dimensions before the last two must broadcast");
        operands->shape[d] = of_x == 1 ? of_y : of_x;
    }
    operands->shape[ndim - 2] = x->shape[x->ndim - 2];
    operands->shape[ndim - 1] = y->shape[y->ndim - 1];
    operands->ndim = ndim;
    operands->a = with_batch(left, operands->shape, ndim);
    operands->b = with_batch(right, operands->shape, ndim);
    return operands->a && operands->b ? TD_OK : TD_ERR_NOMEM;
}

/* ---- Backward -------------------------------------------------------------------------------------- */

/* The matrix number i of a batch, for a kernel. */
static struct td_tensor matrix_at(const td_tensor *x, int64_t i)
{
    struct td_tensor matrix = {.owners = 1, .storage = x->storage, .offset = x->offset};
    int batch = x->layout.ndim - 2;
    for (int d = batch; d-- > 0; i /= x->layout.shape[d])
        matrix.offset += i % x->layout.shape[d] * x->layout.strides[d];
    matrix.layout = (struct td__layout){.dtype = x->layout.dtype, .ndim = 2};
    for (int d = 0; d < 2; d++) {
        matrix.layout.shape[d] = x->layout.shape[batch + d];
        matrix.layout.strides[d] = x->layout.strides[batch + d];
    }
    matrix.layout.numel = matrix.layout.shape[0] * matrix.layout.shape[1];
    return matrix;
}

static int64_t batch_of(const td_tensor *x)
{
    int64_t count = 1;
    for (int d = 0; d < x->layout.ndim - 2; d++)
        count *= x->layout.shape[d];
    return count;
}

/* grad [M, K] (+)= the sum of x y over the batch. */
static td_status sum_of_products(td_tensor *grad, const td_tensor *x, const td_tensor *y,
                                 bool accumulate)
{
    const td_kernels *kernels = td__kernels_of(grad);
    int64_t count = batch_of(x);
    if (count == 0 && !accumulate)
        return kernels->fill(grad, 0);
    for (int64_t i = 0; i < count; i++) {
        struct td_tensor a = matrix_at(x, i), b = matrix_at(y, i);
        TD_TRY(kernels->matmul(grad, &a, &b, 1, accumulate || i > 0));
    }
    return TD_OK;
}

/* [..., M, N] with all but the last dimension merged: a view where that is possible. */
static td_tensor *as_rows(td_tensor *x)
{
    int64_t columns = x->layout.shape[x->layout.ndim - 1], rows = 1;
    for (int d = 0; d < x->layout.ndim - 1; d++)
        rows *= x->layout.shape[d];
    return td__adopt(td__reshape(x, (int64_t[]){rows, columns}, 2, NULL));
}

/* The gradient x y [..., P, Q] of input `index`; all operands have the full batch. `is_matrix`: the
 * input has no batch dimensions. */
static td_status multiply_into(td_node *node, int index, td_tensor *x, td_tensor *y,
                               td_tensor **grad_input)
{
    const struct td__layout *input = td__input_layout(node, index);
    const struct td__layout *of_x = &x->layout;
    int ndim = of_x->ndim;
    int64_t shape[TD_MAX_DIMS];
    memcpy(shape, of_x->shape, sizeof shape);
    shape[ndim - 1] = y->layout.shape[ndim - 1];

    bool is_matrix = input->ndim <= 2;
    bool is_whole = input->ndim == ndim;
    for (int d = 0; is_whole && d < ndim - 2; d++)
        is_whole = input->shape[d] == shape[d];
    if (is_whole || is_matrix) {
        bool accumulate;
        td_tensor *grad = td__grad_target_or_new(node, index, &accumulate);
        if (!grad)
            return TD_ERR_NOMEM;
        *grad_input = grad;
        if (is_whole) {
            struct td_tensor out = td__view_as(grad, shape, ndim);
            return td__kernels_of(grad)->matmul(&out, x, y, 1, accumulate);
        }
        struct td_tensor out = td__view_as(grad, shape + ndim - 2, 2);
        return sum_of_products(&out, x, y, accumulate);
    }
    td_tensor *full = td__fresh("td_backward", shape, ndim, x);
    *grad_input = full;
    return full ? td__kernels_of(full)->matmul(full, x, y, 1, false) : TD_ERR_NOMEM;
}

static td_status grad_of_a(td_node *node, td_tensor *grad, td_tensor **grad_a)
{
    td_tensor *b = td_node_saved(node, 1);
    b = b ? as_right(b) : NULL;
    b = b ? with_batch(b, grad->layout.shape, grad->layout.ndim) : NULL;
    td_tensor *transposed = b ? td__adopt(td__transpose(b, -1, -2)) : NULL;
    TD_TRY(td__done(transposed));
    return multiply_into(node, 0, grad, transposed, grad_a);
}

static td_status grad_of_b(td_node *node, td_tensor *grad, td_tensor **grad_b)
{
    td_tensor *a = td_node_saved(node, 0);
    a = a ? as_left(a) : NULL;
    a = a ? with_batch(a, grad->layout.shape, grad->layout.ndim) : NULL;
    TD_TRY(td__done(a));
    if (td__input_layout(node, 1)->ndim <= 2 && grad->layout.ndim > 2) {
        /* The sum over the batch is one product of all rows. */
        a = as_rows(a);
        grad = as_rows(grad);
        if (!a || !grad)
            return TD_ERR_NOMEM;
    }
    td_tensor *transposed = td__adopt(td__transpose(a, -1, -2));
    if (!transposed)
        return TD_ERR_NOMEM;
    return multiply_into(node, 1, transposed, grad, grad_b);
}

static td_status matmul_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    const struct vectors *vectors = td_node_data(node);
    td_tensor *grad = as_product(grad_y[0], *vectors);
    if (!grad)
        return TD_ERR_NOMEM;
    if (td_node_needs(node, 0))
        TD_TRY(grad_of_a(node, grad, &grads[0]));
    if (td_node_needs(node, 1))
        TD_TRY(grad_of_b(node, grad, &grads[1]));
    return TD_OK;
}

/* ---- Forward --------------------------------------------------------------------------------------- */

static const td_function matmul_function = {.name = "td_matmul", .backward = matmul_backward};
static const td_function bmm_function = {.name = "td_bmm", .backward = matmul_backward};

static td_tensor *product(const td_function *function, td_tensor *a, td_tensor *b)
{
    struct operands operands;
    struct vectors vectors = {a->layout.ndim == 1, b->layout.ndim == 1};
    if (prepare(function->name, a, b, &operands))
        return NULL;
    int64_t shape[TD_MAX_DIMS];
    int ndim = operands.ndim;
    memcpy(shape, operands.shape, sizeof shape);
    if (vectors.a) {
        shape[ndim - 2] = shape[ndim - 1];
        ndim--;
    }
    if (vectors.b)
        ndim--;
    td_tensor *y = td__empty(function->name, shape, ndim, a->layout.dtype, a->storage->device);
    if (!y)
        return NULL;
    struct td_tensor out = td__view_as(y, operands.shape, operands.ndim);
    y = td__kept(y, td__kernels_of(y)->matmul(&out, operands.a, operands.b, 1, false));
    return td__result(function, y,
                      &(td_node_spec){.inputs = {a, b},
                                      .input_count = 2,
                                      .saved = {td__saved_if(td__would_record(b), a),
                                                td__saved_if(td__would_record(a), b)},
                                      .saved_count = 2,
                                      .data = &vectors,
                                      .data_size = sizeof vectors});
}

td_tensor *td_matmul(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_matmul, TD__CAST_MATMUL, a, b);
    td_tensor *y = NULL;
    if (!a || !b)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(product(&matmul_function, a, b));
    }
    return y;
}

td_tensor *td_bmm(td_tensor *a, td_tensor *b)
{
    TD__AUTOCAST_2(td_bmm, TD__CAST_BMM, a, b);
    td_tensor *y = NULL;
    if (!a || !b)
        return td__null(__func__);
    if (a->layout.ndim != 3 || b->layout.ndim != 3 || a->layout.shape[0] != b->layout.shape[0]) {
        refuse("td_bmm", a, b, "it needs [B, M, K] and [B, K, N]");
        return NULL;
    }
    {
        TD_SCOPE;
        y = td_scope_return(product(&bmm_function, a, b));
    }
    return y;
}
