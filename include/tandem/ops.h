/* Operators on tensors. Each is differentiable (autograd.h) unless its comment says otherwise.
 *
 *     td_tensor *y = td_f_relu(td_add(td_matmul(x, w), b));
 *
 * Names. td_f_x() is the operator of which nn.h has a module td_x(): td_relu() makes a module, td_f_relu(x)
 * computes, as nn.ReLU and F.relu do. Every other operator is td_x(). A `_` at the end means in-place.
 *
 * Shapes broadcast as in PyTorch: from the last dimension on, sizes must be equal, or one of them 1
 * or missing. dtypes and devices of the operands must be the same; td_to_dtype() and td_tensor_to()
 * change them. A mismatch is TD_ERR_INVALID with an error that names the function and both.
 *
 * Ownership and errors are those of tensor.h: a result belongs to the innermost TD_SCOPE, or to the
 * caller; NULL in, NULL out.
 *
 * Threads. All functions may be called from several threads at once, also on the same tensors, as
 * long as none writes (in-place, td_tensor_copy()) what another reads or writes. */
#ifndef TANDEM_OPS_H
#define TANDEM_OPS_H

#include <tandem/autograd.h>
#include <tandem/random.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Copies ------------------------------------------------------------------------------------ */

/** A contiguous copy. */
TD_API td_tensor *td_clone(td_tensor *tensor);

/** The tensor itself, with one more reference, if it is contiguous; td_clone() otherwise. */
TD_API td_tensor *td_contiguous(td_tensor *tensor);

/** Copies the elements of `src` to `dst`, which has the same shape and dtype; the strides may be
 * any. They may overlap. TD_ERR_INVALID if shape or dtype differ, or if elements of `dst` share
 * memory (a stride of 0). */
TD_API td_status td_tensor_copy(td_tensor *dst, td_tensor *src);

/** The same, without waiting, between an accelerator and pinned host memory; see td_tensor_to_async(). */
TD_API td_status td_tensor_copy_async(td_tensor *dst, td_tensor *src);

/** The elements in another dtype: truncated from floating-point to integers, x != 0 for bool. The
 *  tensor itself, with one more reference, if it has that dtype. */
TD_API td_tensor *td_to_dtype(td_tensor *tensor, td_dtype dtype);

/** The elements on another device ("cpu", "cpu:1"); the tensor itself if it is there. The gradient
 *  is copied back. */
TD_API td_tensor *td_tensor_to(td_tensor *tensor, td_device *device);

/** The same without waiting: from pinned host memory (td_tensor_pin()), which must not change before the device's
 *  current stream has run the copy, and to the host, into pinned memory that may be read after the stream has run it. */
TD_API td_tensor *td_tensor_to_async(td_tensor *tensor, td_device *device);

/** The one element of a tensor as a number (the real part of a complex one); NaN with the last
 *  error set for NULL, or more than one element. Not differentiable. */
TD_API double td_item(td_tensor *tensor);

/* ---- Views --------------------------------------------------------------------------------------
 *
 * Each shares the storage of `tensor`. In-place changes through one are seen by the others, and
 * autograd follows them (see the end of this header). */

/** The same elements with dimensions `a` and `b` exchanged. */
TD_API td_tensor *td_transpose(td_tensor *tensor, int a, int b);

/** The same elements with the dimensions in the order of `dims`, which names each once. */
TD_API td_tensor *td_permute(td_tensor *tensor, const int *dims, int ndim);

/** `length` indices from `start` on in dimension `dim`. A negative start counts from the end. The
 * range must be inside the tensor. */
TD_API td_tensor *td_narrow(td_tensor *tensor, int dim, int64_t start, int64_t length);

/** Index `index` of dimension `dim`, which is removed. A negative index counts from the end. */
TD_API td_tensor *td_select(td_tensor *tensor, int dim, int64_t index);

/** Every `step`-th index of dimension `dim` from `start` on, below `end`. As in Python, negative
 * ones count from the end, and the range is clamped; INT64_MAX is the end. `step` is above 0.
 */
TD_API td_tensor *td_slice(td_tensor *tensor, int dim, int64_t start, int64_t end, int64_t step);

/** The same elements, in the order of their indices, in another shape with as many. One size may be
 * -1: it follows from the others. A view if the strides allow it, otherwise a contiguous copy. */
TD_API td_tensor *td_reshape(td_tensor *tensor, const int64_t *shape, int ndim);

/** Dimensions `first` to `last` merged. */
TD_API td_tensor *td_f_flatten(td_tensor *tensor, int first, int last);

/** Sizes of 1 expanded to those of `shape`, without a copy; -1 keeps a size. New dimensions may be
 *  in front. */
TD_API td_tensor *td_expand(td_tensor *tensor, const int64_t *shape, int ndim);

/** Inserts a dimension of size 1 at `dim`; removes dimension `dim` if its size is 1. */
TD_API td_tensor *td_unsqueeze(td_tensor *tensor, int dim);
TD_API td_tensor *td_squeeze(td_tensor *tensor, int dim);

/** Views of `size` indices each along `dim`; the last may be smaller. *parts gets a list for
 *  td_free_list(), *count its length; the tensors are owned as every result is. */
TD_API td_status td_split(td_tensor *tensor, int64_t size, int dim, td_tensor ***parts, int *count);
TD_API void td_free_list(td_tensor **list);

/* ---- Concatenation ------------------------------------------------------------------------------ */

/** Concatenates tensors along `dim`; the other sizes must be the same. Empty tensors of one
 *  dimension are skipped. */
TD_API td_tensor *td_cat(td_tensor *const *tensors, int count, int dim);

/** Stacks tensors of one shape along a new dimension `dim`. */
TD_API td_tensor *td_stack(td_tensor *const *tensors, int count, int dim);

/* ---- Arithmetic --------------------------------------------------------------------------------- */

/** Element by element. */
TD_API td_tensor *td_add(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_sub(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_mul(td_tensor *a, td_tensor *b);
/** Integer division truncates; by 0 it is 0. */
TD_API td_tensor *td_div(td_tensor *a, td_tensor *b);
/** Integers wrap around. With a negative exponent they give 1 or -1 for these, and 0 for all others, as
 *  in PyTorch; td_pow_scalar() refuses such a number. */
TD_API td_tensor *td_pow(td_tensor *a, td_tensor *b);
/** The larger and the smaller one; NaN where either is NaN. If both are equal, each gets half of
 *  the gradient. */
TD_API td_tensor *td_maximum(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_minimum(td_tensor *a, td_tensor *b);

/** a + alpha * b. */
TD_API td_tensor *td_add_scaled(td_tensor *a, td_tensor *b, double alpha);

/** With a number, which is converted to the dtype of the tensor. */
TD_API td_tensor *td_add_scalar(td_tensor *a, double b);
TD_API td_tensor *td_sub_scalar(td_tensor *a, double b);
TD_API td_tensor *td_mul_scalar(td_tensor *a, double b);
TD_API td_tensor *td_div_scalar(td_tensor *a, double b);
TD_API td_tensor *td_pow_scalar(td_tensor *a, double b);
/** b - a, and b / a. */
TD_API td_tensor *td_rsub_scalar(td_tensor *a, double b);
TD_API td_tensor *td_rdiv_scalar(td_tensor *a, double b);

/** Elementwise functions. */
TD_API td_tensor *td_neg(td_tensor *x);
TD_API td_tensor *td_abs(td_tensor *x);
TD_API td_tensor *td_square(td_tensor *x);
TD_API td_tensor *td_exp(td_tensor *x);
/** The natural logarithm (td_log() writes to the log). */
TD_API td_tensor *td_ln(td_tensor *x);
/** ln(1 + x); roots and their reciprocals; trigonometric functions; the error function. */
TD_API td_tensor *td_log1p(td_tensor *x);
TD_API td_tensor *td_sqrt(td_tensor *x);
TD_API td_tensor *td_rsqrt(td_tensor *x);
TD_API td_tensor *td_reciprocal(td_tensor *x);
TD_API td_tensor *td_sin(td_tensor *x);
TD_API td_tensor *td_cos(td_tensor *x);
TD_API td_tensor *td_erf(td_tensor *x);
/** The gradient is 0 outside of low to high. */
TD_API td_tensor *td_clamp(td_tensor *x, double low, double high);
/** Not recorded: the gradient is 0 everywhere. */
TD_API td_tensor *td_sign(td_tensor *x);
TD_API td_tensor *td_floor(td_tensor *x);
TD_API td_tensor *td_ceil(td_tensor *x);
TD_API td_tensor *td_round(td_tensor *x);

/* ---- Comparison (results are bool; not differentiable) -------------------------------------------- */

/** Element by element, with a tensor or a number. NaN is equal to nothing. */
TD_API td_tensor *td_eq(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_ne(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_lt(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_le(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_gt(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_ge(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_eq_scalar(td_tensor *a, double b);
TD_API td_tensor *td_ne_scalar(td_tensor *a, double b);
TD_API td_tensor *td_lt_scalar(td_tensor *a, double b);
TD_API td_tensor *td_le_scalar(td_tensor *a, double b);
TD_API td_tensor *td_gt_scalar(td_tensor *a, double b);
TD_API td_tensor *td_ge_scalar(td_tensor *a, double b);
TD_API td_tensor *td_logical_and(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_logical_or(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_logical_xor(td_tensor *a, td_tensor *b);
TD_API td_tensor *td_logical_not(td_tensor *a);
TD_API td_tensor *td_isnan(td_tensor *a);
/** Whether shape, dtype and all elements are equal, and whether they are close:
 *  |a - b| <= atol + rtol |b|. False for NULL. */
TD_API bool td_equal(td_tensor *a, td_tensor *b);
TD_API bool td_allclose(td_tensor *a, td_tensor *b, double rtol, double atol);

/** condition (bool) ? a : b, element by element; all three broadcast. */
TD_API td_tensor *td_where(td_tensor *condition, td_tensor *a, td_tensor *b);

/** x with `value` where mask (bool, broadcast to x) is true. */
TD_API td_tensor *td_masked_fill(td_tensor *x, td_tensor *mask, double value);

/* ---- Reductions ----------------------------------------------------------------------------------
 *
 * Without a suffix they reduce all elements to a tensor of no dimensions; _dims reduces the listed
 * dimensions (an empty list: none), and keepdim keeps them with size 1. A tensor of no dimensions
 * accepts 0 and -1. Sums and products of bool and integers are i64, but for u64, as in PyTorch:
 * td_sum(td_eq(a, b)) counts. */

/** Of all elements. */
TD_API td_tensor *td_sum(td_tensor *x);
TD_API td_tensor *td_mean(td_tensor *x);
TD_API td_tensor *td_prod(td_tensor *x);
/** NaN propagates. The gradient is distributed evenly over all elements that have the value. An
 *  empty tensor is an error. */
TD_API td_tensor *td_max(td_tensor *x);
TD_API td_tensor *td_min(td_tensor *x);
/** Over the listed dimensions. */
TD_API td_tensor *td_sum_dims(td_tensor *x, const int *dims, int count, bool keepdim);
TD_API td_tensor *td_mean_dims(td_tensor *x, const int *dims, int count, bool keepdim);
/** The variance, divided by n - correction. */
TD_API td_tensor *td_var_dims(td_tensor *x, const int *dims, int count, int correction,
                              bool keepdim);
/** The maximum along `dim`; *indices, if not NULL, gets the i64 index of the first one, which gets
 *  the gradient. */
TD_API td_tensor *td_max_dim(td_tensor *x, int dim, bool keepdim, td_tensor **indices);
TD_API td_tensor *td_min_dim(td_tensor *x, int dim, bool keepdim, td_tensor **indices);
/** The i64 index along `dim`; not differentiable. */
TD_API td_tensor *td_argmax(td_tensor *x, int dim, bool keepdim);
TD_API td_tensor *td_argmin(td_tensor *x, int dim, bool keepdim);
/** The 2-norm of all elements. */
TD_API td_tensor *td_norm(td_tensor *x);
/** bool results; not differentiable. */
TD_API td_tensor *td_all(td_tensor *x);
TD_API td_tensor *td_any(td_tensor *x);

/* ---- Products ------------------------------------------------------------------------------------ */

/** As torch.matmul: vectors, matrices, and batches of them that broadcast. */
TD_API td_tensor *td_matmul(td_tensor *a, td_tensor *b);
/** Batches of matrices [B, M, K] [B, K, N], without broadcasting. */
TD_API td_tensor *td_bmm(td_tensor *a, td_tensor *b);
/** x [..., I] weight^T [O, I] + bias [O]; bias may be NULL. */
TD_API td_tensor *td_f_linear(td_tensor *x, td_tensor *weight, td_tensor *bias);

typedef struct td_conv2d_options {
    int64_t stride[2]; /* height, width; 0: 1 */
    int64_t padding[2];
    int64_t dilation[2]; /* 0: 1 */
    int64_t groups;      /* 0: 1 */
    bool no_bias;        /* for the module */
    void *reserved[4];
} td_conv2d_options;

/** x [N, C, H, W] (or [C, H, W]), weight [O, C / groups, kh, kw], bias [O] or NULL. */
TD_API td_tensor *td_f_conv2d(td_tensor *x, td_tensor *weight, td_tensor *bias,
                              const td_conv2d_options *options);

/* ---- Pooling: x [N, C, H, W] or [C, H, W] ---------------------------------------------------------- */

typedef struct td_pool2d_options {
    int64_t stride[2]; /* 0: the size of the kernel */
    int64_t padding[2];
    int64_t dilation[2];  /* max only; 0: 1 */
    bool exclude_padding; /* avg only: the mean does not count padding */
    void *reserved[4];
} td_pool2d_options;

/** The maximum, or the mean, of each window. */
TD_API td_tensor *td_f_max_pool2d(td_tensor *x, int64_t kernel_height, int64_t kernel_width,
                                  const td_pool2d_options *options);
TD_API td_tensor *td_f_avg_pool2d(td_tensor *x, int64_t kernel_height, int64_t kernel_width,
                                  const td_pool2d_options *options);
/** Windows such that the result has this size. */
TD_API td_tensor *td_f_adaptive_avg_pool2d(td_tensor *x, int64_t height, int64_t width);
TD_API td_tensor *td_f_adaptive_max_pool2d(td_tensor *x, int64_t height, int64_t width);

/* ---- Activations ----------------------------------------------------------------------------------- */

/** max(x, 0). */
TD_API td_tensor *td_f_relu(td_tensor *x);
/** x times the normal distribution function of x, by erf; or its approximation by tanh. */
TD_API td_tensor *td_f_gelu(td_tensor *x);
TD_API td_tensor *td_f_gelu_tanh(td_tensor *x);
/** x sigmoid(x); the hyperbolic tangent; 1 / (1 + exp(-x)). */
TD_API td_tensor *td_f_silu(td_tensor *x);
TD_API td_tensor *td_f_tanh(td_tensor *x);
TD_API td_tensor *td_f_sigmoid(td_tensor *x);
/** Softmax along `dim`, and its logarithm. */
TD_API td_tensor *td_f_softmax(td_tensor *x, int dim);
TD_API td_tensor *td_f_log_softmax(td_tensor *x, int dim);

/** In training: elements are zeroed with probability p, the others scaled by 1 / (1 - p), with the
 *  default generator of the device. Otherwise x itself. dropout2d: whole channels of [N, C, H, W]. */
TD_API td_tensor *td_f_dropout(td_tensor *x, double p, bool training);
TD_API td_tensor *td_f_dropout2d(td_tensor *x, double p, bool training);

/* ---- Normalisation ---------------------------------------------------------------------------------- */

/** x [N, C] or [N, C, …]; weight, bias [C] or NULL. running_mean and running_var [C] are updated
 *  in place in training (NULL: not tracked), and used otherwise. momentum 0.1 and eps 1e-5 are
 *  usual. */
TD_API td_tensor *td_batch_norm(td_tensor *x, td_tensor *running_mean, td_tensor *running_var,
                                td_tensor *weight, td_tensor *bias, bool training, double momentum,
                                double eps);
/**
 * relu(td_batch_norm(x, …) + residual), as blocks of convolutional networks have it, with the arguments of td_batch_norm();
 * residual has the shape of x, or is NULL: then nothing is added. A device may do it in fewer passes over the memory, with
 * the same bits in training, unless autocast is on.
 */
TD_API td_tensor *td_batch_norm_relu(td_tensor *x, td_tensor *residual, td_tensor *running_mean,
                                     td_tensor *running_var, td_tensor *weight, td_tensor *bias,
                                     bool training, double momentum, double eps);
/** Over the last `ndim` dimensions, which have the sizes of `shape`; weight and bias of that shape, or
 *  NULL. */
TD_API td_tensor *td_f_layer_norm(td_tensor *x, const int64_t *shape, int ndim, td_tensor *weight,
                                  td_tensor *bias, double eps);
/**
 * Layer norm of x + residual, of one shape, as blocks of a transformer have it. *sum, where `sum` is not NULL, is that sum,
 * in the wider dtype of the two: f32 for f32 and a half. With `residual` NULL it is the norm of x, and *sum is x itself, or
 * where that is recorded a result of this call over the memory of x: a block that continues from it gets the gradients of
 * both uses summed in one pass. weight and bias are of the sum's dtype, or f32.
 *
 * The norm is in the sum's dtype; under autocast for this kind of device in the dtype of autocast, into which the product
 * that follows would cast it: the product gets the same bits. It is computed in f32, or f64 for f64. A device may do all of
 * it in one pass over the memory.
 */
TD_API td_tensor *td_add_layer_norm(td_tensor *x, td_tensor *residual, const int64_t *shape,
                                    int ndim, td_tensor *weight, td_tensor *bias, double eps,
                                    td_tensor **sum);

/* ---- Attention --------------------------------------------------------------------------------------- */

typedef struct td_attention_options {
    td_tensor *mask; /* broadcasts to [..., L, S]: bool (true: attend) or added to the scores */
    bool causal;     /* row i attends to columns 0 to i */
    double dropout;  /* of the weights */
    double scale;    /* 0: 1 / sqrt(E) */
    void *reserved[4];
} td_attention_options;

/** Cuts a projection x [N, L, parts * E] into the heads of an attention: results[0] … results[parts - 1] are
 *  [N, heads, L, E / heads], for instance q, k and v. They share the memory of x; change none in place. */
TD_API td_status td_split_heads(td_tensor *x, int parts, int64_t heads, td_tensor **results);

/** softmax(q k^T scale + mask) v; q [..., L, E], k [..., S, E], v [..., S, F]. */
TD_API td_tensor *td_scaled_dot_product_attention(td_tensor *q, td_tensor *k, td_tensor *v,
                                                  const td_attention_options *options);

/* ---- Indices (i64) ------------------------------------------------------------------------------------- */

/** Rows of weight [V, D] for indices of any shape: [..., D]. Row padding_idx, if not negative,
 *  gets no gradient. */
TD_API td_tensor *td_f_embedding(td_tensor *indices, td_tensor *weight, int64_t padding_idx);
/** x at the indices [n] along `dim`. */
TD_API td_tensor *td_index_select(td_tensor *x, int dim, td_tensor *indices);
/** out[i][j] = x[i][index[i][j]] for dim 1; index has the sizes of x but for that dimension. */
TD_API td_tensor *td_take_along_dim(td_tensor *x, int dim, td_tensor *index);
/** i64 [..., classes] of 0 and 1 from classes [...]; not differentiable. */
TD_API td_tensor *td_one_hot(td_tensor *indices, int64_t classes);

/** 0, step, 2 step … below end, from start on; and `count` numbers from start to end. Numbers that
 *  the dtype cannot hold are an error; otherwise they are PyTorch's bit for bit (with AVX2 and one
 *  thread). For integer dtypes start, end and step are truncated. */
TD_API td_tensor *td_arange(double start, double end, double step, td_dtype dtype,
                            td_device *device);
TD_API td_tensor *td_linspace(double start, double end, int64_t count, td_dtype dtype,
                              td_device *device);
/** Ones; and tensors with the shape and dtype of another one: zeros, ones, uninitialised. */
TD_API td_tensor *td_ones(const int64_t *shape, int ndim, td_dtype dtype, td_device *device);
TD_API td_tensor *td_zeros_like(td_tensor *tensor);
TD_API td_tensor *td_ones_like(td_tensor *tensor);
TD_API td_tensor *td_empty_like(td_tensor *tensor);
/** x with zeros above (below) the diagonal `diagonal` of its last two dimensions. */
TD_API td_tensor *td_tril(td_tensor *x, int64_t diagonal);
TD_API td_tensor *td_triu(td_tensor *x, int64_t diagonal);

/* ---- Losses ---------------------------------------------------------------------------------------------
 *
 * The mean by default; see td_loss_options. */

typedef enum td_reduction { TD_REDUCE_MEAN, TD_REDUCE_SUM, TD_REDUCE_NONE } td_reduction;

typedef struct td_loss_options {
    td_reduction reduction;
    td_tensor *weight; /* class weights [C]: nll_loss and cross_entropy only */
    bool ignore;       /* ignore targets that are ignore_index; -100 is always ignored */
    int64_t ignore_index;
    double label_smoothing; /* cross_entropy only */
    void *reserved[4];
} td_loss_options;

/** x [N, C, …] log-probabilities, target [N, …] i64 classes. */
TD_API td_tensor *td_nll_loss(td_tensor *x, td_tensor *target);
TD_API td_tensor *td_nll_loss_with(td_tensor *x, td_tensor *target, const td_loss_options *options);
/** x [N, C, …] logits: nll_loss of their log_softmax, in one step. x is saved for the backward pass, so that it must not be
 *  changed in place before. */
TD_API td_tensor *td_cross_entropy(td_tensor *x, td_tensor *target);
TD_API td_tensor *td_cross_entropy_with(td_tensor *x, td_tensor *target,
                                        const td_loss_options *options);
/** x and target of one shape (the target does not require grad). */
TD_API td_tensor *td_mse_loss(td_tensor *x, td_tensor *target);
TD_API td_tensor *td_mse_loss_with(td_tensor *x, td_tensor *target, const td_loss_options *options);
TD_API td_tensor *td_l1_loss(td_tensor *x, td_tensor *target);
TD_API td_tensor *td_l1_loss_with(td_tensor *x, td_tensor *target, const td_loss_options *options);
TD_API td_tensor *td_bce_with_logits(td_tensor *x, td_tensor *target);
TD_API td_tensor *td_bce_with_logits_with(td_tensor *x, td_tensor *target,
                                          const td_loss_options *options);

/* ---- In place --------------------------------------------------------------------------------------------
 *
 * They change `x` itself; b broadcasts to it. A leaf that requires grad, and a view of one, can
 * only be changed under TD_NO_GRAD. Backward fails if a tensor that it saved was changed.
 *
 * Autograd follows in-place changes through views: the base of x and all its other views become
 * results of the change. Tensors that only share the memory (td_detach(), and views made under
 * TD_NO_GRAD) cannot follow, and using them afterwards is an error. */

/** Each writes to x what the function without the _ returns; td_fill_() a value, td_zero_() 0.
 * TD_ERR_INVALID if x does not fit. */
TD_API td_status td_fill_(td_tensor *x, double value);
TD_API td_status td_zero_(td_tensor *x);
TD_API td_status td_add_(td_tensor *x, td_tensor *b);
TD_API td_status td_sub_(td_tensor *x, td_tensor *b);
TD_API td_status td_mul_(td_tensor *x, td_tensor *b);
TD_API td_status td_div_(td_tensor *x, td_tensor *b);
TD_API td_status td_add_scaled_(td_tensor *x, td_tensor *b, double alpha);
TD_API td_status td_add_scalar_(td_tensor *x, double b);
TD_API td_status td_mul_scalar_(td_tensor *x, double b);
TD_API td_status td_f_relu_(td_tensor *x);
TD_API td_status td_clamp_(td_tensor *x, double low, double high);

#ifdef __cplusplus
}
#endif

#endif
