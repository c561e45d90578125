/* Checkpointing: forward runs the segment without recording it. Backward runs it again on detached
 * inputs, and an inner backward pass through it inside the node. The inner pass also accumulates
 * the gradients of leaves that the segment uses without naming them as inputs (its parameters). The
 * node must run even if no input requires grad, so it has one input more: an empty dummy leaf that
 * does. */
#include "autograd/autocast.h"
#include "autograd/engine.h"
#include "autograd/op.h"
#include "base/fail.h"
#include "tensor/random_internal.h"

#include <stdlib.h>
#include <string.h>

struct input {
    td_tensor *alias;
    unsigned version;
    bool needs;
};

struct checkpoint {
    td_segment segment;
    void *arg;
    int count;
    struct input *inputs;
    struct td__random_states *random;   /* of the default generators, before the first run */
    struct td__autocast_state autocast; /* that of the first run */
};

static void free_checkpoint(void *data)
{
    struct checkpoint *checkpoint = data;
    for (int i = 0; i < checkpoint->count && checkpoint->inputs; i++)
        td_tensor_release(checkpoint->inputs[i].alias);
    free(checkpoint->inputs);
    free(checkpoint->random);
}

/* The inputs as leaves of the inner pass, in `leaves`, owned by the thread's scope. */
static td_status make_leaves(const struct checkpoint *checkpoint, td_tensor **leaves)
{
    for (int i = 0; i < checkpoint->count; i++) {
        const struct input *input = &checkpoint->inputs[i];
        if (!input->alias)
            continue;
        if (atomic_load(&input->alias->storage->version) != input->version)
            return td_fail(TD_ERR_STATE,
                           "td_checkpoint: input %d, of shape %s, was changed in place before its "
                           "segment ran again; change a td_clone() of it instead",
                           i, td__shape_of(input->alias));
        leaves[i] = td__adopt(td__alias(input->alias));
        if (!leaves[i])
            return TD_ERR_NOMEM;
        if (input->needs)
            TD_TRY(td_tensor_set_requires_grad(leaves[i], true));
    }
    return TD_OK;
}

/* Runs the segment with the random numbers and the autocast of its first run, and restores the states of the
 * generators and autocast afterwards. */
static td_tensor *run_again(const struct checkpoint *checkpoint, td_tensor **leaves)
{
    struct td__random_states *now = td__random_save();
    if (!now)
        return NULL;
    td__random_restore(checkpoint->random);
    bool grad_mode = td_set_grad_enabled(true);
    struct td__autocast_state before = td__autocast_switch(&checkpoint->autocast);
    td_tensor *result = checkpoint->segment(leaves, checkpoint->count, checkpoint->arg);
    td__autocast_resume(&before);
    td_set_grad_enabled(grad_mode);
    td__random_restore(now);
    free(now);
    return result;
}

/* The sink of an inner pass in an outer one that has a sink: the inputs of the segment get their
 * gradients here, and its parameters in the outer sink. */
struct inner_sink {
    const struct checkpoint *checkpoint;
    td_tensor **leaves;
    struct td__grad_sink outer;
};

static td_status accumulate_inner(void *arg, td_tensor *leaf, td_tensor *grad)
{
    const struct inner_sink *inner = arg;
    for (int i = 0; i < inner->checkpoint->count; i++)
        if (inner->leaves[i] == leaf)
            return td__leaf_accumulate(leaf->node, grad);
    return inner->outer.accumulate(inner->outer.arg, leaf, grad);
}

static td_status run_inner_pass(const struct checkpoint *checkpoint, td_tensor **leaves,
                                td_tensor *result, td_tensor *gradient)
{
    struct inner_sink inner = {checkpoint, leaves, td__running_sink()};
    struct td__pass_options options = {0};
    if (inner.outer.accumulate)
        options.sink = (struct td__grad_sink){accumulate_inner, &inner};
    return td__run_backward(&result, &gradient, 1, &options);
}

static td_status checkpoint_backward(td_node *node, td_tensor *const *grad_outputs,
                                     td_tensor **grad_inputs)
{
    const struct checkpoint *checkpoint = td_node_data(node);
    td_tensor **leaves = calloc((size_t)checkpoint->count + 1, sizeof *leaves);
    if (!leaves)
        return td__fail_nomem("td_checkpoint");
    td_status status = make_leaves(checkpoint, leaves);
    if (!status) {
        td_tensor *result = run_again(checkpoint, leaves);
        if (!result)
            status = td__done(result);
        else if (td_tensor_requires_grad(result))
            status = run_inner_pass(checkpoint, leaves, result, grad_outputs[0]);
    }
    for (int i = 0; i < checkpoint->count && !status; i++)
        if (leaves[i] && checkpoint->inputs[i].needs)
            grad_inputs[i] = td__adopt(td_tensor_retain(td_tensor_grad(leaves[i])));
    free(leaves);
    return status;
}

static const td_function checkpoint_function = {
    .name = "td_checkpoint", .backward = checkpoint_backward, .free_data = free_checkpoint};

static td_status remember(struct checkpoint *checkpoint, td_tensor *const *inputs)
{
    int count = checkpoint->count;
    checkpoint->inputs = calloc(count > 0 ? (size_t)count : 1, sizeof *checkpoint->inputs);
    checkpoint->random = td__random_save();
    if (!checkpoint->inputs || !checkpoint->random)
        return td__fail_nomem("td_checkpoint");
    for (int i = 0; i < count; i++) {
        if (!inputs[i])
            continue;
        struct input *input = &checkpoint->inputs[i];
        input->alias = td__alias(inputs[i]);
        if (!input->alias)
            return TD_ERR_NOMEM;
        input->version = atomic_load(&inputs[i]->storage->version);
        input->needs = td_tensor_requires_grad(inputs[i]);
    }
    return TD_OK;
}

/* An empty leaf that requires grad. */
static td_tensor *make_dummy_leaf(td_device *device)
{
    td_tensor *tensor = td__empty("td_checkpoint", (int64_t[]){0}, 1, TD_F32, device);
    if (tensor && td_tensor_set_requires_grad(tensor, true)) {
        td_tensor_release(tensor);
        return NULL;
    }
    return tensor;
}

/* Records the segment as one node. Takes over the reference of `result`, which is raw. */
static td_tensor *record(struct checkpoint *checkpoint, td_tensor *result, td_tensor *const *inputs)
{
    int count = checkpoint->count;
    td_tensor **all = calloc((size_t)count + 1, sizeof *all);
    td_tensor *asking = all ? make_dummy_leaf(result->storage->device) : NULL;
    td_tensor *recorded = NULL;
    if (asking) {
        memcpy(all, inputs, (size_t)count * sizeof *all);
        all[count] = asking;
        recorded = td__result(&checkpoint_function, result,
                              &(td_node_spec){.more_inputs = all,
                                              .input_count = count + 1,
                                              .data = checkpoint,
                                              .data_size = sizeof *checkpoint});
    } else {
        td_tensor_release(result);
        td__fail_nomem("td_checkpoint");
    }
    td_tensor_release(asking);
    free(all);
    return recorded;
}

td_tensor *td_checkpoint(td_segment segment, void *arg, td_tensor *const *inputs, int count)
{
    if (!segment || count < 0 || (count > 0 && !inputs)) {
        td_fail(TD_ERR_INVALID, "td_checkpoint: the segment is NULL, or the inputs are fewer "
                                "than `count`");
        return NULL;
    }
    if (!td_grad_enabled())
        return segment(inputs, count, arg);
    struct checkpoint checkpoint = {
        .segment = segment, .arg = arg, .count = count, .autocast = td__autocast_current()};
    td_tensor *result = NULL;
    if (!remember(&checkpoint, inputs)) {
        {
            TD_SCOPE;
            TD_NO_GRAD;
            result = td__alias(segment(inputs, count, arg));
        }
    }
    td_tensor *recorded = result ? record(&checkpoint, result, inputs) : NULL;
    if (!recorded)
        free_checkpoint(&checkpoint);
    return recorded;
}
