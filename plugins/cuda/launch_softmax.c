/* Launches the kernels of softmax.cu. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_rows.h"
#include "cuda/softmax_args.h"

#define FLOATS(name)                                                                               \
    {                                                                                              \
        [TD_F32] = TD__CUDA_KERNEL(softmax, name "_f32"),                                          \
        [TD_F64] = TD__CUDA_KERNEL(softmax, name "_f64"),                                          \
        [TD_F16] = TD__CUDA_KERNEL(softmax, name "_f16"),                                          \
        [TD_BF16] = TD__CUDA_KERNEL(softmax, name "_bf16"),                                        \
    }

/* Forward and backward: rows in registers, any rows, and columns. */
static struct {
    struct cuda_kernel rows[4], any[4], columns[4];
} forward = {TD__CUDA_ROW_KERNELS(softmax, "softmax"), FLOATS("softmax_any"),
             FLOATS("softmax_columns")},
  backward = {TD__CUDA_ROW_KERNELS(softmax, "softmax_grad"), FLOATS("softmax_grad_any"),
              FLOATS("softmax_grad_columns")};

static td_status run_softmax(td_tensor *out, const td_tensor *x, const td_tensor *grad_y,
                             bool logarithm)
{
    td_dtype dtype = td_tensor_dtype(x);
    int64_t size = td_tensor_size(x, 1);
    struct cuda_rows rows = td__cuda_rows(size, (const td_tensor *[]){out, x, grad_y}, 3);
    struct softmax_args args = {.out = td__cuda_vector(out),
                                .x = td__cuda_vector(x),
                                .grad_y = td__cuda_vector(grad_y),
                                .outer = td_tensor_size(x, 0),
                                .size = size,
                                .inner = td_tensor_size(x, 2),
                                .logarithm = logarithm,
                                .threads = rows.threads};
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    if (!td_tensor_numel(x))
        return TD_OK;
    if (args.inner != 1)
        return td__cuda_launch(grad_y ? &backward.columns[dtype] : &forward.columns[dtype], out,
                               td__cuda_grid_for(out, args.outer * args.inner, 1), &args);
    struct cuda_kernel *kernel = grad_y ? &backward.any[dtype] : &forward.any[dtype];
    if (rows.variant >= 0)
        kernel = grad_y ? &backward.rows[rows.variant] : &forward.rows[rows.variant];
    return td__cuda_launch_rows(kernel, out, &rows, (args.outer + rows.at_once - 1) / rows.at_once,
                                &args);
}

td_status td__cuda_softmax(td_tensor *out, const td_tensor *x, bool logarithm)
{
    return run_softmax(out, x, NULL, logarithm);
}

td_status td__cuda_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                                bool logarithm)
{
    return run_softmax(grad_x, y, grad_y, logarithm);
}
