/* The public calls of a backward pass, and their checks. */
#include "autograd/engine.h"
#include "base/fail.h"
#include "base/option_rules.h"

#include <stdlib.h>

td_tensor *td__sum_to(td_tensor *x, const struct td__layout *target)
{
    const struct td__layout *from = &x->layout;
    int more = from->ndim - target->ndim;
    unsigned dims = 0;
    bool fits = more >= 0;
    int64_t shape[TD_MAX_DIMS];
    for (int d = 0; fits && d < from->ndim; d++) {
        int64_t size = d < more ? 1 : target->shape[d - more];
        if (d < more || size != from->shape[d])
            dims |= 1u << d;
        fits = d < more || size == from->shape[d] || size == 1;
        shape[d] = dims & 1u << d ? 1 : from->shape[d];
    }
    if (!fits) {
        td_fail(TD_ERR_INVALID, "a shape %s does not come of broadcasting %s", td__shape_of(x),
                td__shape_text(target->shape, target->ndim));
        return NULL;
    }
    if (!dims)
        return td_tensor_retain(x);
    td_tensor *sum = td__empty("td_backward", shape, from->ndim, from->dtype, x->storage->device);
    if (sum && td__kernels_of(x)->reduce(TD_REDUCE_KIND_SUM, sum, x, dims)) {
        td_tensor_release(sum);
        return NULL;
    }
    td_tensor *result = td__reshape(sum, target->shape, target->ndim, NULL);
    td_tensor_release(sum);
    return result;
}

static td_status check_output(const char *call, td_tensor *output, td_tensor *gradient)
{
    TD_TRY(td__refresh_node(output, call));
    if (!output->node)
        return td_fail(TD_ERR_INVALID,
                       "%s: the tensor of shape %s does not require grad: none of its inputs "
                       "does, or it was computed under TD_NO_GRAD",
                       call, td__shape_of(output));
    if (!gradient && output->layout.numel != 1)
        return td_fail(TD_ERR_INVALID,
                       "%s: a tensor of shape %s has more than one element; pass its gradient, "
                       "or reduce it to one element first",
                       call, td__shape_of(output));
    if (gradient &&
        (!td__same_shape(output, gradient) || gradient->layout.dtype != output->layout.dtype ||
         gradient->storage->device != output->storage->device))
        return td_fail(TD_ERR_INVALID, "%s: the gradient is %s %s on %s, the tensor %s %s on %s",
                       call, td_dtype_name(gradient->layout.dtype), td__shape_of(gradient),
                       gradient->storage->device->name, td_dtype_name(output->layout.dtype),
                       td__shape_of(output), output->storage->device->name);
    return TD_OK;
}

static td_tensor *ones_like(const td_tensor *tensor)
{
    td_tensor *ones = td__empty_like(tensor);
    if (ones && td__kernels_of(ones)->fill(ones, 1)) {
        td_tensor_release(ones);
        return NULL;
    }
    return ones;
}

static td_status seed(struct td__pass *pass, td_tensor *output, td_tensor *gradient)
{
    td_tensor *ones = gradient ? NULL : ones_like(output);
    if (!gradient && !ones)
        return TD_ERR_NOMEM;
    td_status status = td__pass_seed(pass, output->node, output->output_nr,
                                     gradient ? gradient : ones);
    td_tensor_release(ones);
    return status;
}

td_status td__run_backward(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                           const struct td__pass_options *options)
{
    struct td__pass *pass;
    TD_TRY(td__pass_open(options, &pass));
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++)
        status = seed(pass, outputs[i], gradients ? gradients[i] : NULL);
    if (!status)
        status = td__pass_start(pass);
    if (!status)
        td__pass_run(pass, TD__NEVER); /* closing returns its failure, too */
    td_status failure = td__pass_close(pass);
    return status ? status : failure;
}

static td_status run(const char *call, td_tensor *const *outputs, td_tensor *const *gradients,
                     int count, const struct td__pass_options *options)
{
    for (int i = 0; i < count; i++) {
        if (!outputs[i])
            return td__fail_null(call);
        TD_TRY(check_output(call, outputs[i], gradients ? gradients[i] : NULL));
    }
    return td__run_backward(outputs, gradients, count, options);
}

td_status td_backward(td_tensor *loss)
{
    return td_backward_from(&loss, NULL, 1, NULL);
}

td_status td_backward_from(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                           const td_backward_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    return run("td_backward", outputs, gradients, count,
               &(struct td__pass_options){.retain_graph = options && options->retain_graph});
}

td_status td_gradients(td_tensor *const *outputs, td_tensor *const *gradients, int output_count,
                       td_tensor *const *inputs, int input_count, td_tensor **results,
                       const td_backward_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    struct td__capture *captures = calloc(input_count > 0 ? (size_t)input_count : 1,
                                          sizeof *captures);
    if (!captures)
        return td__fail_nomem("td_gradients");
    td_status status = TD_OK;
    for (int i = 0; i < input_count && !status; i++) {
        td__try_refresh_node(inputs[i]);
        if (!inputs[i])
            status = TD_ERR_INVALID;
        else if (!inputs[i]->node)
            status = td_fail(TD_ERR_INVALID,
                             "td_gradients: input %d, of shape %s, does not require grad", i,
                             td__shape_of(inputs[i]));
        else
            captures[i] = (struct td__capture){.node = inputs[i]->node,
                                               .output_nr = inputs[i]->output_nr};
    }
    if (!status)
        status = run("td_gradients", outputs, gradients, output_count,
                     &(struct td__pass_options){.retain_graph = options && options->retain_graph,
                                                .captures = captures,
                                                .capture_count = input_count});
    for (int i = 0; i < input_count; i++) {
        if (status)
            td_tensor_release(captures[i].grad);
        else
            results[i] = td__adopt(captures[i].grad);
    }
    free(captures);
    return status;
}
