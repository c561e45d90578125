/* For authors of devices: the kernels of a device, everything that computes with elements, one slot each.
 *
 * What a kernel may rely on: shapes, dtypes and devices were checked by the operator that calls it,
 * the results are allocated, no result overlaps an operand unless the slot says that it may, and
 * all tensors are on one device of the table's kind, which is td_tensor_device() of any of them. Strides may be any,
 * with 0 for a dimension that is broadcast, except where a slot asks for contiguous tensors; results never have a
 * stride of 0. A size may be 0. Kernels do not know autograd, and keep no tensor: the memory of all tensors stays
 * until the stream has run what the kernel enqueued.
 *
 * A kernel enqueues on td_current_stream() of the device and returns without waiting for it. td_tensor_data() is the
 * device's address. A kernel may fail with TD_ERR_NOMEM for its workspace, or with TD_ERR_UNSUPPORTED: a slot, or a
 * dtype, operation or size in a slot, that a device does not have. It must refuse these in the call, before anything is
 * enqueued or drawn from a generator; operators pass on dtypes that no device has, too, such as the exponential of
 * integers. The library then fails with a sentence that names operator and device, or computes it on the host
 * (TANDEM_FALLBACK=cpu when the device was opened). A slot that is NULL is the same. The text of every other failure
 * names the device.
 *
 * Results depend on the operands alone: the same bits each time.
 *
 * "Floats" are f32, f64, f16, bf16; the halves are computed in f32 and rounded once. "Numbers" are floats and
 * integers. Shapes follow the arguments: out [N, M].
 *
 * Threads. A kernel may be called by several threads at once.
 *
 * Growth. The table grows at its end, before `reserved`, also where another slot of the subject stands further up; slots
 * that a device's header did not have count as NULL. */
#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H

#include <tandem/device_ops.h>
#include <tandem/dtype.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_tensor td_tensor;       /* tensor.h */
typedef struct td_generator td_generator; /* random.h */

/* Saves: what the gradient needs, the operand x or the result y. */
typedef enum td_unary {
    TD_UNARY_NEG,        /* all but bool */
    TD_UNARY_ABS,        /* numbers; saves x */
    TD_UNARY_SIGN,       /* numbers */
    TD_UNARY_SQUARE,     /* all but bool; saves x */
    TD_UNARY_EXP,        /* floats; saves y */
    TD_UNARY_LOG,        /* floats; saves x */
    TD_UNARY_LOG1P,      /* floats; saves x */
    TD_UNARY_SQRT,       /* floats; saves y */
    TD_UNARY_RSQRT,      /* floats; saves y */
    TD_UNARY_RECIPROCAL, /* floats; saves y */
    TD_UNARY_SIN,        /* floats; saves x */
    TD_UNARY_COS,        /* floats; saves x */
    TD_UNARY_TANH,       /* floats; saves y */
    TD_UNARY_SIGMOID,    /* floats; saves y */
    TD_UNARY_RELU,       /* numbers; saves y */
    TD_UNARY_GELU,       /* floats; x * normal distribution(x), with erf; saves x */
    TD_UNARY_GELU_TANH,  /* floats; its approximation by tanh; saves x */
    TD_UNARY_SILU,       /* floats; x * sigmoid(x); saves x */
    TD_UNARY_FLOOR,      /* floats */
    TD_UNARY_CEIL,       /* floats */
    TD_UNARY_ROUND,      /* floats; half way to even */
    TD_UNARY_ERF,        /* floats; saves x */
    TD_UNARY_NOT,        /* all; the result is bool */
    TD_UNARY_ISNAN,      /* all; the result is bool */
} td_unary;

typedef enum td_binary {
    TD_BINARY_ADD,     /* all; bool: or */
    TD_BINARY_SUB,     /* all but bool */
    TD_BINARY_MUL,     /* all; bool: and */
    TD_BINARY_DIV,     /* floats, complex; integers towards 0, with 0 for a division by 0 */
    TD_BINARY_POW,     /* floats, and integers, which wrap around */
    TD_BINARY_MAXIMUM, /* numbers, bool; NaN where either is NaN */
    TD_BINARY_MINIMUM, /* the same */
    /* The result is bool. */
    TD_BINARY_EQ, /* all */
    TD_BINARY_NE, /* all */
    TD_BINARY_LT, /* numbers, bool; so are the next three */
    TD_BINARY_LE,
    TD_BINARY_GT,
    TD_BINARY_GE,
    TD_BINARY_AND, /* all: not 0 is true */
    TD_BINARY_OR,
    TD_BINARY_XOR,
} td_binary;

typedef enum td_reduce_kind {
    TD_REDUCE_KIND_SUM, /* all; integers and bool into any integer dtype. The error of an f32 sum does not
                        grow with the number of elements */
    TD_REDUCE_KIND_MEAN, /* floats */
    TD_REDUCE_KIND_PROD, /* all but bool */
    TD_REDUCE_KIND_MAX,  /* numbers, bool; NaN wins */
    TD_REDUCE_KIND_MIN,
    TD_REDUCE_KIND_ALL, /* all; the result is bool */
    TD_REDUCE_KIND_ANY,
    TD_REDUCE_KIND_SQUARES, /* floats: the sum of squares */
} td_reduce_kind;

/* Elementwise losses of two tensors: x the input, y the target. */
typedef enum td_pair_loss {
    TD_PAIR_LOSS_MSE,        /* (x - y)^2 */
    TD_PAIR_LOSS_L1,         /* |x - y| */
    TD_PAIR_LOSS_BCE_LOGITS, /* max(x, 0) - x y + log(1 + exp(-|x|)) */
} td_pair_loss;

/* How a window moves over an image. Index 0 is the height, 1 the width. */
typedef struct td_window {
    int64_t kernel[2];
    int64_t stride[2];
    int64_t padding[2];
    int64_t dilation[2];
    int64_t groups;         /* conv2d only */
    bool count_include_pad; /* avg_pool2d only */
} td_window;

/* Steps of optimizers. All tensors of one update are contiguous, of one shape and one dtype (floats); halves are
 * computed in f32. The arithmetic, in this order, each rounded to the dtype of the computation, is that of PyTorch. */

typedef struct td_sgd_update {
    td_tensor *parameter;
    const td_tensor *grad;
    td_tensor *buffer; /* of the momentum; NULL: none */
    double lr, momentum, dampening, weight_decay;
    bool nesterov, maximize;
    bool first; /* the momentum begins with this gradient */
    /** NULL; while a graph is being captured (td_graph_capture()) an address of the device, where the kernel finds the
     *  numbers for lr, momentum, dampening and weight_decay, in this order, each time it runs. */
    const double *numbers;
} td_sgd_update;

typedef struct td_adam_update {
    td_tensor *parameter;
    const td_tensor *grad;
    td_tensor *mean, *square;
    td_tensor *greatest; /* NULL without amsgrad */
    double beta1, beta2, eps;
    double weight_decay;    /* added to the gradient; 0: none */
    double shrink;          /* the parameter is multiplied by this first; 1: not at all */
    double size;            /* the learning rate over the first bias correction */
    double root_correction; /* the root of the second bias correction */
    bool maximize;
    /** As above, for beta1, beta2, eps, weight_decay, shrink, size and root_correction. */
    const double *numbers;
} td_adam_update;

#define TD_KERNELS_VERSION 1

typedef struct td_kernels {
    uint32_t version; /* TD_KERNELS_VERSION */
    uint32_t size;    /* sizeof(td_kernels) */

    /* ---- Elements: out has the shape of the operands; out may be an operand ------------------ */

    /** out[i] = value, converted as td_full() does. That numbers among the arguments (here, in binary_scalar, add_scaled
     *  and clamp) fit the dtype was checked by the library. */
    td_status (*fill)(td_tensor *out, double value);
    /** out[i] = x[i], with conversion between any two dtypes: floats to integers truncate, and give some
     *  number if they do not fit; to bool != 0; complex to its real part. */
    td_status (*copy)(td_tensor *out, const td_tensor *x);
    td_status (*unary)(td_unary op, td_tensor *out, const td_tensor *x);
    /** The gradient of x: grad_x[i] = grad_y[i] * derivative, from what the operation saves (NULL
     *  where it saves nothing). Only for those with a gradient: NEG to ERF without SIGN, FLOOR,
     *  CEIL and ROUND. grad_x may be grad_y. */
    td_status (*unary_grad)(td_unary op, td_tensor *grad_x, const td_tensor *grad_y,
                            const td_tensor *saved);
    td_status (*binary)(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b);
    /** a op b; with `reversed` b op a. b is converted to the dtype of a first. */
    td_status (*binary_scalar)(td_binary op, td_tensor *out, const td_tensor *a, double b,
                               bool reversed);
    /** out = a + alpha * b, all but bool. */
    td_status (*add_scaled)(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha);
    /** out = condition ? a : b; condition is bool. */
    td_status (*where)(td_tensor *out, const td_tensor *condition, const td_tensor *a,
                       const td_tensor *b);
    /** Numbers; NaN stays NaN. */
    td_status (*clamp)(td_tensor *out, const td_tensor *x, double low, double high);

    /* ---- Reductions: out has the dimensions of x, with size 1 where bit d of `dims` is set, and its dtype
     * (bool for ALL and ANY). `out` may be i64 for sums and products of bool and integers, and f32 for those
     * of halves: then they are not rounded to the dtype of x. ------------------------------ */

    td_status (*reduce)(td_reduce_kind kind, td_tensor *out, const td_tensor *x, unsigned dims);
    /** The i64 index of the first greatest (or least) element along `dim`; a NaN comes before all
     *  others in both. out has size 1 there; the size of the dimension is not 0. */
    td_status (*arg_reduce)(bool least, td_tensor *out, const td_tensor *x, int dim);

    /* ---- Products (f32, f64, halves) --------------------------------------------------------- */

    /** out = alpha * a b, or out += alpha * a b. out [..., M, N], a [..., M, K], b [..., K, N]; the
     *  leading dimensions are equal (broadcast ones have stride 0). A transposed operand is a view
     *  and costs no copy. K may be 0: then zeros. out is contiguous in its last dimension. */
    td_status (*matmul)(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                        bool accumulate);
    /** out [N, O] = x [N, I] w^T [O, I] + bias [O], or without where bias is NULL. All contiguous. */
    td_status (*linear)(td_tensor *out, const td_tensor *x, const td_tensor *w,
                        const td_tensor *bias);
    /** x [N, C, H, W], w [O, C / groups, kh, kw], bias [O] or NULL, out [N, O, H', W']. All
     *  contiguous, also in the next two. */
    td_status (*conv2d)(td_tensor *out, const td_tensor *x, const td_tensor *w,
                        const td_tensor *bias, const td_window *window);
    td_status (*conv2d_grad_input)(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                   const td_window *window);
    /** grad_bias may be NULL. With `accumulate` both are added to. */
    td_status (*conv2d_grad_weight)(td_tensor *grad_w, td_tensor *grad_bias,
                                    const td_tensor *grad_y, const td_tensor *x,
                                    const td_window *window, bool accumulate);

    /* ---- Pooling: x [N, C, H, W], all contiguous, floats ------------------------------------- */

    /** indices (i32, shape of out): the index of each maximum in its H W image; may be NULL. NaN is
     *  greatest; of equal elements the first. */
    td_status (*max_pool2d)(td_tensor *out, td_tensor *indices, const td_tensor *x,
                            const td_window *window);
    /** Also for adaptive_max_pool2d: then window->kernel is 0. The indices suffice to scatter; the window tells those who gather
     *  which outputs may have a pixel as their maximum. */
    td_status (*max_pool2d_grad)(td_tensor *grad_x, const td_tensor *grad_y,
                                 const td_tensor *indices, const td_window *window);
    td_status (*avg_pool2d)(td_tensor *out, const td_tensor *x, const td_window *window);
    td_status (*avg_pool2d_grad)(td_tensor *grad_x, const td_tensor *grad_y,
                                 const td_window *window);
    /** Output row i covers rows floor(i H / H') to ceil((i + 1) H / H'). */
    td_status (*adaptive_avg_pool2d)(td_tensor *out, const td_tensor *x);
    td_status (*adaptive_avg_pool2d_grad)(td_tensor *grad_x, const td_tensor *grad_y);
    td_status (*adaptive_max_pool2d)(td_tensor *out, td_tensor *indices, const td_tensor *x);

    /* ---- Normalisation: contiguous, floats. Statistics are f32 (f64 for f64) ------------------ */

    /** x [N, C, S]: the operator merges what follows the channels into S. weight and bias [C] or
     *  NULL. While training: the statistics of the batch, which go to mean and rstd [C]; running_mean
     *  and running_var, where not NULL, move by `momentum` (the variance unbiased). Otherwise: those
     *  of running_*, and mean and rstd are not written (they may be NULL). */
    td_status (*batch_norm)(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                            const td_tensor *weight, const td_tensor *bias, td_tensor *running_mean,
                            td_tensor *running_var, bool training, double momentum, double eps);
    /** mean and rstd: while training those of batch_norm; otherwise of the running statistics. Each
     *  of the three results may be NULL. */
    td_status (*batch_norm_grad)(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                 const td_tensor *grad_y, const td_tensor *x,
                                 const td_tensor *weight, const td_tensor *mean,
                                 const td_tensor *rstd, bool training);
    /** x [R, D] by rows; weight and bias [D] or NULL; mean and rstd [R], or NULL. */
    td_status (*layer_norm)(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                            const td_tensor *weight, const td_tensor *bias, double eps);
    td_status (*layer_norm_grad)(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                 const td_tensor *grad_y, const td_tensor *x,
                                 const td_tensor *weight, const td_tensor *mean,
                                 const td_tensor *rstd);

    /* ---- Softmax: contiguous [A, D, B], over D; floats ---------------------------------------- */

    /** Softmax, or log-softmax. */
    td_status (*softmax)(td_tensor *out, const td_tensor *x, bool logarithm);
    /** From the result y. grad_x may be grad_y. */
    td_status (*softmax_grad)(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                              bool logarithm);

    /* ---- Attention: q [B, L, D], k [B, S, D], v [B, S, E] (B: batch times heads), the last
     * dimension with stride 1, the others any; f32, f64, halves --------------------------------- */

    /** out [N, H, L, E] = softmax(scale q k^T + mask) v for all batches N and heads H, without ever
     *  holding all of L S: q [N, H, L, D], k [N, H, S, D], v [N, H, S, E]. All of any strides, but
     *  of 1 in the last dimension. mask [N, H, L, S] is of q's dtype and added, broadcast by strides
     *  of 0, or NULL. causal: row i sees columns up to i only. lse [N, H, L] (f32, f64 for f64;
     *  contiguous): the logarithm of each row's sum, for the gradient; may be NULL. A fully masked
     *  row is 0. */
    td_status (*attention)(td_tensor *out, td_tensor *lse, const td_tensor *q, const td_tensor *k,
                           const td_tensor *v, const td_tensor *mask, bool causal, double scale);
    /** From the result y and lse. Each of the three results may be NULL. */
    td_status (*attention_grad)(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                                const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                                const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                                const td_tensor *mask, bool causal, double scale);

    /* ---- Indices (i64), checked by the kernel: TD_ERR_INVALID names the first bad one, its position and
     * the range; an accelerator reports it later, as a failure of the device. Any dtype ---------------- */

    /** out [..., n, ...] = x at the n indices along dim; index [n] contiguous. */
    td_status (*index_select)(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index);
    /** out at the indices along dim += src, in the order of the indices. */
    td_status (*index_add)(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src);
    /** out[i][j][k] = x[i][index[i][j][k]][k] for dim 1; out and index have one shape. */
    td_status (*gather)(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index);
    /** The other way round: out at index += src. */
    td_status (*scatter_add)(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src);

    /* ---- Losses: floats, contiguous ------------------------------------------------------------ */

    /** x [N, C, S] logarithms of probabilities, target [N, S] i64, weight [C] or NULL. out [N, S]:
     *  -weight[t] x[n, t, s], and 0 where t is ignore_index. A target outside 0 to C-1 is
     *  TD_ERR_INVALID, as above. factor (one element, f64), where not NULL: 1 over the sum of the weights that were
     *  used, for the mean. */
    td_status (*nll_loss)(td_tensor *out, td_tensor *factor, const td_tensor *x,
                          const td_tensor *target, const td_tensor *weight, int64_t ignore_index);
    /** grad_x [N, C, S] from the gradients of the losses: grad_y [N, S], or one element for all,
     *  times factor, which is 1 where NULL. */
    td_status (*nll_loss_grad)(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *factor,
                               const td_tensor *target, const td_tensor *weight,
                               int64_t ignore_index);
    /** grad_x [N, C, S] of cross_entropy, at the end of the table, from its operands and statistics: grad_y times
     *  weight[t] times the softmax of x, less 1 at the target; 0 at all classes of an ignored target. grad_y and factor as
     *  above. grad_x has the dtype of x and is rounded once; grad_y and weight have that of cross_entropy's out. */
    td_status (*cross_entropy_grad)(td_tensor *grad_x, const td_tensor *grad_y,
                                    const td_tensor *factor, const td_tensor *x,
                                    const td_tensor *statistics, const td_tensor *target,
                                    const td_tensor *weight, int64_t ignore_index);
    /** out has the shape of x and y, or one element: then the sum of all. Both times scale. */
    td_status (*pair_loss)(td_pair_loss loss, td_tensor *out, const td_tensor *x,
                           const td_tensor *y, double scale);
    /** grad_x = grad_y * scale * derivative; grad_y has the shape of x, or one element. */
    td_status (*pair_loss_grad)(td_pair_loss loss, td_tensor *grad_x, const td_tensor *grad_y,
                                const td_tensor *x, const td_tensor *y, double scale);

    /* ---- Dropout: contiguous, floats ------------------------------------------------------------ */

    /** keep (bool): one each for x[i * block … + block - 1], true with probability 1 - p, drawn from the
     *  generator: on the host as PyTorch does, else as random.h says. out = keep ? x / (1 - p) : 0. */
    td_status (*dropout)(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                         int64_t block, td_generator *generator);
    td_status (*dropout_grad)(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *keep,
                              double p, int64_t block);

    /* ---- Random numbers: out of any strides; the generator is the device's, see td_generator_take() -------------------------------- */

    td_status (*uniform)(td_tensor *out, double from, double to, td_generator *generator);
    td_status (*normal)(td_tensor *out, double mean, double std, td_generator *generator);
    td_status (*bernoulli)(td_tensor *out, double p, td_generator *generator);
    /** Integers from `from` to `from` + `range` - 1; a `range` of 0 is 2^64. */
    td_status (*random_range)(td_tensor *out, int64_t from, uint64_t range,
                              td_generator *generator);

    /* ---- Optimizers: all or nothing. Where one of these fails, no tensor has changed ------------------ */

    td_status (*sgd)(const td_sgd_update *updates, int count);
    td_status (*adam)(const td_adam_update *updates, int count);

    /* ---- Lists of tensors of any shapes and strides; floats -------------------------------------------- */

    /** out (one element, f32 or f64): the norm of all elements of all tensors as one vector. The sums of the tensors, as
     *  power_sums defines them, are added in order, and the root is NaN without a sign where the sum is NaN. */
    td_status (*norm)(td_tensor *out, td_tensor *const *x, int count, double power);
    /** x[i] *= factor (one element, f32 or f64), converted to the dtype of x[i] first; all of them. */
    td_status (*scale)(td_tensor *const *x, int count, const td_tensor *factor);
    /** x[i] *= factor, and found (one element, f32) = 1 if a product, rounded to the dtype, is not finite; else found
     *  stays. */
    td_status (*unscale)(td_tensor *const *x, int count, double factor, td_tensor *found);

    /* ---- Losses: cross entropy of logits ---------------------------------------------------------------- */

    /** nll_loss of the log-softmax of x [N, C, S] over C, without holding anything of the size of x: out [N, S] is
     *  -weight[t] ((x[n, t, s] - greatest) - log_sum). statistics [N, S, 2] (f32, f64 for f64) gets, for each position, the
     *  greatest logit and the logarithm of the sum of exp(x - greatest): two numbers, as their sum would be rounded
     *  at the magnitude of the first. out has the dtype of x, or is f32 where x is a half, and then not rounded; weight has
     *  the dtype of out. target, ignore_index and factor as for nll_loss. */
    td_status (*cross_entropy)(td_tensor *out, td_tensor *statistics, td_tensor *factor,
                               const td_tensor *x, const td_tensor *target, const td_tensor *weight,
                               int64_t ignore_index);

    /* ---- Faster ways for operators that have another one: where a device has NULL, or returns TD_ERR_UNSUPPORTED,
     * the library composes the slots above. The bits are the same, except where a slot says so ------------------ */

    /** ADD, SUB and MUL of f32 with f16 or bf16, either first; out is f32, and so is the computation. */
    td_status (*binary_mixed)(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b);
    /** sum = x + residual, out = layer_norm(sum); or, where residual and sum are NULL, out = layer_norm(x). All [R, D] and
     *  contiguous; mean, rstd, weight and bias as in layer_norm. Floats of any mixture without f64, or f64 alone: sums are
     *  computed in f32, rounded to the dtype of `sum`, and what is normalised is the rounded sum. out is rounded once. */
    td_status (*add_layer_norm)(td_tensor *out, td_tensor *sum, td_tensor *mean, td_tensor *rstd,
                                const td_tensor *x, const td_tensor *residual,
                                const td_tensor *weight, const td_tensor *bias, double eps);
    /** grad_x and grad_residual: both grad_sum + the gradient of layer_norm, each rounded once to its dtype, as the
     *  library's own sum of the two need not be. grad_sum may be NULL, and each of the four results; without a residual
     *  grad_residual is, and grad_sum need not be. */
    td_status (*add_layer_norm_grad)(td_tensor *grad_x, td_tensor *grad_residual,
                                     td_tensor *grad_weight, td_tensor *grad_bias,
                                     const td_tensor *grad_y, const td_tensor *grad_sum,
                                     const td_tensor *sum, const td_tensor *weight,
                                     const td_tensor *mean, const td_tensor *rstd);
    /** Linear layers with a GELU between them; floats, all contiguous. pre [N, H] = x [N, I] w^T [H, I] + bias [H], and out [N, H] = gelu_tanh(pre): of pre as it is stored, or before it
     *  is rounded to its dtype. bias may be NULL. */
    td_status (*linear_gelu)(td_tensor *out, td_tensor *pre, const td_tensor *x, const td_tensor *w,
                             const td_tensor *bias);
    /** grad_pre [N, H] = grad_y [N, O] w [O, H] * the derivative of gelu_tanh at pre [N, H], where w is the weight of the
     *  layer behind the GELU. grad_bias [1, H], where not NULL: the sum of the rows of grad_pre. */
    td_status (*linear_gelu_grad)(td_tensor *grad_pre, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *w,
                                  const td_tensor *pre);
    /** matmul of halves into f32, where no sum is rounded to their dtype: a and b f16 or bf16, both the same. */
    td_status (*matmul_f32)(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                            bool accumulate);

    /** out [count] (f64, contiguous): for each tensor the sum of the powers of the absolute values of its elements; a
     *  `power` of INFINITY is the greatest absolute value, and NaN where there is one. For 1, 2 and INFINITY the bits are
     *  the same on all devices: blocks of 1024 elements, in row-major order, are summed in f64, each from 256 sums of the
     *  elements that are 256 apart, from the first one on (squares of f64 are rounded), which are added by halves (0 + 128,
     *  1 + 129, …, then 0 + 64, …). Then neighbouring sums are added in pairs, 0 + 1, 2 + 3, …, where a last one without a
     *  neighbour stays, until one is left. */
    td_status (*power_sums)(td_tensor *out, td_tensor *const *x, int count, double power);

    /** out = relu(batch_norm(x) + residual), all [N, C, S], contiguous and of one dtype; residual may be NULL. weight and bias
     *  [C], or NULL, and running_mean and running_var are of that dtype or f32. The bits are those of batch_norm, binary and
     *  unary one by one, where all are of one dtype; half precision is rounded after each of the three. statistics [4, C]
     *  is written, also in evaluation: mean, rstd, and two rows of the kernel's own, for its gradient. */
    td_status (*batch_norm_relu)(td_tensor *out, td_tensor *statistics, const td_tensor *x,
                                 const td_tensor *residual, const td_tensor *weight,
                                 const td_tensor *bias, td_tensor *running_mean,
                                 td_tensor *running_var, bool training, double momentum,
                                 double eps);
    /** grad_residual is grad_y, and 0 where `out` is not above 0. Neither of the two is NULL with a residual; without one
     *  grad_residual is NULL, and `out` may be. Each of the other three results may be NULL. */
    td_status (*batch_norm_relu_grad)(td_tensor *grad_x, td_tensor *grad_residual,
                                      td_tensor *grad_weight, td_tensor *grad_bias,
                                      const td_tensor *grad_y, const td_tensor *x,
                                      const td_tensor *out, const td_tensor *weight,
                                      const td_tensor *statistics, bool training);

    void *reserved[6]; /* must be zero */
} td_kernels;

/** The kernels of the host, for a device that computes some things there. Tensors must be the host's. */
TD_API const td_kernels *td_host_kernels(void);

#ifdef __cplusplus
}
#endif

#endif
