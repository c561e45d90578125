/* Steps in graphs (td_graph_capture()). The kernel is captured with the addresses of its numbers; before each launch the
 * parameters count a step, and the numbers are written anew: those of the present learning rates. */
#include "optim/optimizer.h"

#include "base/fail.h"

#include <stdlib.h>

/* The parameters of a captured step. Indices: the list of parameters may move when a group is added. */
struct stepped {
    td_optimizer *optimizer;
    int buffers;
    int count;
    struct {
        int index;
        const struct td__storage *buffers[TD__BUFFERS_MOST]; /* not retained: only compared */
    } list[];
};

/* Numbers that several parameters share: those of one group and one count of steps. */
struct shared_numbers {
    const td_optimizer *optimizer;
    int index; /* of the first such parameter */
    int group;
    int64_t step; /* when it was captured */
    const double *address;
};

/* The graph writes to the buffers that it was captured with. */
static td_status check_buffers(const struct stepped *stepped)
{
    for (int i = 0; i < stepped->count; i++) {
        const struct td__parameter *parameter =
            &stepped->optimizer->parameters[stepped->list[i].index];
        for (int b = 0; b < stepped->buffers; b++)
            if (!parameter->buffers[b] ||
                parameter->buffers[b]->storage != stepped->list[i].buffers[b])
                return td_fail(TD_ERR_STATE,
                               "td_graph_launch: the state of %s is not that of the capture any "
                               "more; capture the step anew",
                               stepped->optimizer->kind->name);
    }
    return TD_OK;
}

static td_status count_steps(void *arg, void *values)
{
    (void)values;
    const struct stepped *stepped = arg;
    TD_TRY(check_buffers(stepped));
    for (int i = 0; i < stepped->count; i++) {
        struct td__parameter *parameter = &stepped->optimizer->parameters[stepped->list[i].index];
        parameter->steps++;
        td__tensor_bump_version(parameter->tensor);
        for (int b = 0; b < stepped->buffers; b++)
            td__tensor_bump_version(parameter->buffers[b]);
    }
    return TD_OK;
}

static td_status refresh_numbers(void *arg, void *values)
{
    const struct shared_numbers *shared = arg;
    const td_optimizer *optimizer = shared->optimizer;
    optimizer->kind->write_numbers(optimizer, shared->group,
                                   optimizer->parameters[shared->index].steps, values);
    return TD_OK;
}

static td_status capture_counts(td_graph *graph, const td_optimizer *optimizer,
                                const struct td__parameter_step *steps, int count)
{
    struct stepped *stepped = malloc(sizeof *stepped + (size_t)count * sizeof stepped->list[0]);
    if (!stepped)
        return td__fail_nomem("td_graph_capture");
    stepped->optimizer = (td_optimizer *)optimizer;
    stepped->buffers = optimizer->kind->buffer_count(&optimizer->numbers);
    stepped->count = count;
    for (int i = 0; i < count; i++) {
        stepped->list[i].index = (int)(steps[i].parameter - optimizer->parameters);
        for (int b = 0; b < stepped->buffers; b++)
            stepped->list[i].buffers[b] = steps[i].buffers[b]->storage;
    }
    return td__graph_values(graph, NULL, 0, count_steps, stepped, NULL);
}

static bool is_shared(const void *arg, const void *key)
{
    const struct shared_numbers *shared = arg, *wanted = key;
    return shared->optimizer == wanted->optimizer && shared->group == wanted->group &&
           shared->step == wanted->step;
}

td_status td__capture_numbers(const td_optimizer *optimizer, const struct td__parameter_step *steps,
                              int count, int i, const double **numbers)
{
    td_device *device = steps[i].tensor->storage->device;
    td_graph *graph = device->is_host ? NULL : td__capturing(device);
    *numbers = NULL;
    if (!graph)
        return TD_OK;
    if (i == 0)
        TD_TRY(capture_counts(graph, optimizer, steps, count));
    const struct shared_numbers wanted = {
        .optimizer = optimizer,
        .index = (int)(steps[i].parameter - optimizer->parameters),
        .group = steps[i].parameter->group,
        .step = steps[i].number,
    };
    struct shared_numbers *shared = td__graph_find(graph, refresh_numbers, is_shared, &wanted);
    if (!shared) {
        double values[TD__STEP_NUMBERS] = {0};
        const void *address;
        optimizer->kind->write_numbers(optimizer, wanted.group, wanted.step, values);
        shared = malloc(sizeof *shared);
        if (!shared)
            return td__fail_nomem("td_graph_capture");
        *shared = wanted;
        TD_TRY(td__graph_values(graph, values, sizeof values, refresh_numbers, shared, &address));
        shared->address = address;
    }
    *numbers = shared->address;
    return TD_OK;
}
