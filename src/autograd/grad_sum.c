/* Sums of gradients, in an order that does not depend on timing; see pass.h. */
#include "autograd/pass.h"

#include <stdlib.h>

static bool may_change(const td_tensor *tensor)
{
    return td__is_unshared(tensor) && !td__layout_repeats(&tensor->layout);
}

td_status td__grad_add(td_tensor **sum, td_tensor *grad)
{
    if (!*sum) {
        *sum = td_tensor_retain(grad);
        return TD_OK;
    }
    const td_kernels *kernels = td__kernels_of(grad);
    if (may_change(*sum))
        return kernels->binary(TD_BINARY_ADD, *sum, *sum, grad);
    td_tensor *both = td__empty_like(grad);
    if (!both)
        return TD_ERR_NOMEM;
    td_status status = kernels->binary(TD_BINARY_ADD, both, *sum, grad);
    if (status) {
        td_tensor_release(both);
        return status;
    }
    td_tensor_release(*sum);
    *sum = both;
    return TD_OK;
}

/* Adds an owned gradient, or NULL. */
static td_status take(td_tensor **sum, td_tensor **grad)
{
    td_tensor *taken = *grad;
    if (!taken)
        return TD_OK;
    *grad = NULL;
    td_status status = td__grad_add(sum, taken);
    td_tensor_release(taken);
    return status;
}

td_status td__add_fed(struct td__walk_entry *entry)
{
    for (struct td__expected *expected = entry->expected; expected; expected = expected->next)
        for (int i = 0; i < expected->count; i++)
            TD_TRY(take(&entry->grads[expected->output_nr], &expected->fed[i].grad));
    return TD_OK;
}

/* ---- The order of edges --------------------------------------------------------------------------- */

static td_status allocate(struct td__edge_order *order, const struct td__walk *walk)
{
    size_t entries = (size_t)walk->count, inputs = 0;
    for (int i = 0; i < walk->count; i++)
        inputs += (size_t)walk->entries[i].node->input_count;
    order->edges = calloc(inputs + 1, sizeof *order->edges);
    order->number_of_input = calloc(inputs + 1, sizeof *order->number_of_input);
    order->first_input = calloc(entries + 1, sizeof *order->first_input);
    order->next = calloc(entries + 1, sizeof *order->next);
    order->first = calloc(entries + 1, sizeof *order->first);
    return order->edges && order->number_of_input && order->first_input && order->next &&
                   order->first
               ? TD_OK
               : td__fail_nomem("td_backward");
}

static int target_of(const struct td__walk *walk, const struct td__edge *edge)
{
    return (int)(td__walk_find(walk, edge->node) - walk->entries);
}

/* Fills in first and first_input. */
static void count_edges(struct td__edge_order *order, const struct td__walk *walk)
{
    int inputs = 0;
    for (int i = 0; i < walk->count; i++) {
        const struct td_node *node = walk->entries[i].node;
        order->first_input[i] = inputs;
        inputs += node->input_count;
        for (int k = 0; k < node->input_count; k++)
            if (node->inputs[k].node)
                order->first[target_of(walk, &node->inputs[k]) + 1]++;
    }
    for (int i = 0; i < walk->count; i++)
        order->first[i + 1] += order->first[i];
    order->edge_count = order->first[walk->count];
}

static void reset_next(struct td__edge_order *order, const struct td__walk *walk)
{
    for (int i = 0; i < walk->count; i++)
        order->next[i] = order->first[i];
}

td_status td__edge_order_init(struct td__edge_order *order, const struct td__walk *walk)
{
    int *by_sequence = td__walk_by_sequence(walk);
    td_status status = by_sequence ? allocate(order, walk) : TD_ERR_NOMEM;
    if (!status) {
        count_edges(order, walk);
        reset_next(order, walk);
    }
    for (int i = walk->count - 1; i >= 0 && !status; i--) {
        int source = by_sequence[i];
        const struct td_node *node = walk->entries[source].node;
        for (int k = 0; k < node->input_count; k++) {
            const struct td__edge *edge = &node->inputs[k];
            if (!edge->node)
                continue;
            int number = order->next[target_of(walk, edge)]++;
            order->number_of_input[order->first_input[source] + k] = number;
            order->edges[number].output_nr = edge->output_nr;
        }
    }
    if (!status)
        reset_next(order, walk);
    free(by_sequence);
    return status;
}

void td__edge_order_free(struct td__edge_order *order)
{
    for (int i = 0; i < order->edge_count; i++)
        td_tensor_release(order->edges[i].grad);
    free(order->edges);
    free(order->first);
    free(order->next);
    free(order->number_of_input);
    free(order->first_input);
}

td_status td__edge_order_deliver(struct td__edge_order *order, struct td__walk *walk, int source,
                                 int input, struct td__walk_entry *target, td_tensor *grad)
{
    int number = order->number_of_input[order->first_input[source] + input];
    int entry = (int)(target - walk->entries);
    order->edges[number].grad = td_tensor_retain(grad);
    order->edges[number].arrived = true;
    while (order->next[entry] < order->first[entry + 1]) {
        struct td__early *edge = &order->edges[order->next[entry]];
        if (!edge->arrived)
            break;
        TD_TRY(take(&target->grads[edge->output_nr], &edge->grad));
        order->next[entry]++;
    }
    return TD_OK;
}
