/* DataParallel: one batch on several devices of one process; see parallel.h.
 *
 *     inputs ──┬─ parts 0 on cuda:0 ─ replica 0 ─┬── output
 *              └─ parts 1 on cuda:1 ─ replica 1 ─┘
 *
 * The four steps, which are public, are in device_steps.c. The module may be on any device:
 * replicas have copies of its tensors on theirs. If replica 0 has copies, too, its buffers are
 * copied back after each forward, so that running statistics are updated. */
#include "autograd/graph.h"
#include "base/fail.h"
#include "base/option_rules.h"

#include <tandem/parallel.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct data_parallel {
    td_device **devices; /* NULL: those of the module's kind, which td_module_to() may change */
    int count;           /* of devices; 0: all of the kind */
    int dim;
    td_device *output; /* NULL: where the module is */
};

/* ---- Devices ---------------------------------------------------------------------------------------- */

static void free_devices(void *data)
{
    struct data_parallel *parallel = data;
    free(parallel->devices);
}

/* Copies `devices`, or makes room for them if they are NULL. */
static td_status set_devices(struct data_parallel *parallel, td_device *const *devices, int count)
{
    parallel->count = count;
    parallel->devices = calloc((size_t)count, sizeof(td_device *));
    if (!parallel->devices)
        return td__fail_nomem("td_data_parallel");
    for (int i = 0; i < count && devices; i++)
        parallel->devices[i] = devices[i];
    return TD_OK;
}

/* How many devices of a kind there are by default: on the host one for each processor. */
static int default_count(const char *kind)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int count = td_device_count(kind);
    return !strcmp(kind, "cpu") && processors < count ? (int)processors : count;
}

static td_status check_count(int count, const char *kind)
{
    if (count <= td_device_count(kind))
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "td_data_parallel: device_count is %d, and there are %d devices of the module's "
                   "kind \"%s\"; pass fewer, or device_ids",
                   count, td_device_count(kind), kind);
}

/* ---- Inputs ----------------------------------------------------------------------------------------- */

/* The size of an input along `dim`; -1 if it has no such dimension. */
static int64_t size_along(const td_tensor *input, int dim)
{
    int ndim = td_tensor_ndim(input);
    return dim >= -ndim && dim < ndim ? td_tensor_size(input, dim < 0 ? dim + ndim : dim) : -1;
}

static int64_t find_batch(const td_tensor_list *inputs, int dim)
{
    int64_t batch = -1;
    for (int k = 0; k < inputs->count && batch < 0; k++)
        batch = size_along(inputs->at[k], dim);
    return batch;
}

/* Scatters the inputs to parts[i] of replica i, which is empty; *count is the number of replicas
 * needed. `list` holds one tensor for each device. */
static td_status scatter(const struct data_parallel *parallel, const td_tensor_list *inputs,
                         td_tensor **list, td_tensor_list *parts, int *count)
{
    int64_t batch = find_batch(inputs, parallel->dim);
    *count = 1;
    for (int k = 0; k < inputs->count; k++) {
        if (batch < 0 || size_along(inputs->at[k], parallel->dim) != batch)
            continue;
        TD_TRY(td_scatter_to_devices(inputs->at[k], parallel->devices, parallel->count,
                                     parallel->dim, list, count));
        for (int i = 0; i < *count; i++)
            parts[i].at[k] = list[i];
    }
    for (int i = 0; i < *count; i++) {
        parts[i].count = inputs->count;
        for (int k = 0; k < inputs->count; k++) {
            parts[i].names[k] = inputs->names[k];
            if (!parts[i].at[k])
                parts[i].at[k] = td_tensor_to(inputs->at[k], parallel->devices[i]);
            if (!parts[i].at[k])
                return td__error_status();
        }
    }
    return TD_OK;
}

/* Concatenates result k of all replicas, for each k. `list` is as for scatter(). */
static td_status gather(const struct data_parallel *parallel, const td_tensor_list *parts,
                        int count, td_tensor **list, td_tensor_list *results)
{
    for (int i = 1; i < count; i++)
        if (parts[i].count != parts[0].count)
            return td_fail(TD_ERR_INVALID,
                           "td_data_parallel: the module returned %d results on %s, and %d on %s",
                           parts[0].count, td_device_name(parallel->devices[0]), parts[i].count,
                           td_device_name(parallel->devices[i]));
    for (int k = 0; k < parts[0].count; k++) {
        for (int i = 0; i < count; i++)
            list[i] = parts[i].at[k];
        td_tensor *whole = parallel->count == 1 ? td_tensor_to(list[0], parallel->output)
                                                : td_gather_from_devices(
                                                      list, count, parallel->output, parallel->dim);
        TD_TRY(td_tensor_list_add(results, parts[0].names[k], whole));
    }
    return TD_OK;
}

/* ---- Running ---------------------------------------------------------------------------------------- */

static td_status copy_buffers(td_module *module, td_module *replica)
{
    td_state *to = td_module_buffers(module), *from = td_module_buffers(replica);
    td_status status = to && from ? TD_OK : td__fail_nomem("td_data_parallel");
    for (int i = 0; !status && i < td_state_count(to); i++)
        if (td_state_tensor(to, i) != td_state_tensor(from, i)) {
            TD_NO_GRAD;
            status = td_tensor_copy(td_state_tensor(to, i), td_state_tensor(from, i));
        }
    td_state_destroy(to);
    td_state_destroy(from);
    return status;
}

/* The device of the module's parameters, or of its buffers, or else of the input. */
static td_device *device_of(td_module *module, const td_tensor *input)
{
    td_state *parameters = td_module_parameters(module), *buffers = td_module_buffers(module);
    const td_state *any = parameters && td_state_count(parameters) ? parameters : buffers;
    td_device *device = td_tensor_device(any && td_state_count(any) ? td_state_tensor(any, 0)
                                                                    : input);
    td_state_destroy(parameters);
    td_state_destroy(buffers);
    return device;
}

/* Runs `count` replicas; parts[i] has the inputs of the one on device i, and then its results. */
static td_status run(td_module *module, const struct data_parallel *parallel, td_tensor_list *parts,
                     int count)
{
    td_module **replicas = calloc((size_t)count, sizeof *replicas);
    td_tensor_list *results = calloc((size_t)count, sizeof *results);
    td_status status = replicas && results ? TD_OK : td__fail_nomem("td_data_parallel");
    if (!status)
        status = td_replicate(module, parallel->devices, count, replicas);
    if (!status) {
        status = td_parallel_apply(replicas, parts, count, results);
        if (!status)
            status = copy_buffers(module, replicas[0]);
        memcpy(parts, results, (size_t)count * sizeof *parts);
        for (int i = 0; i < count; i++)
            td_module_destroy(replicas[i]);
    }
    free(replicas);
    free(results);
    return status;
}

/* With the devices for a module on `home`; free_devices() frees them. */
static td_status resolve(const struct data_parallel *from, td_device *home,
                         struct data_parallel *resolved)
{
    *resolved = *from;
    if (!from->output)
        resolved->output = home;
    if (from->devices)
        return set_devices(resolved, from->devices, from->count);
    const char *kind = td_device_kind(home);
    TD_TRY(check_count(from->count, kind));
    int count = from->count ? from->count : default_count(kind);
    TD_TRY(set_devices(resolved, NULL, count));
    for (int i = 0; i < count; i++) {
        char name[48];
        snprintf(name, sizeof name, "%s:%d", kind, i);
        resolved->devices[i] = td_device_get(name);
    }
    return TD_OK;
}

static td_status run_on_devices(const struct data_parallel *parallel, td_module *inner,
                                const td_tensor_list *inputs, td_tensor_list *results)
{
    td_tensor_list *parts = calloc((size_t)parallel->count, sizeof *parts);
    td_tensor **list = calloc((size_t)parallel->count, sizeof *list);
    int count = 0;
    td_status status = parts && list ? TD_OK : td__fail_nomem("td_data_parallel");
    if (!status)
        status = scatter(parallel, inputs, list, parts, &count);
    if (!status)
        status = run(inner, parallel, parts, count);
    if (!status)
        status = gather(parallel, parts, count, list, results);
    free(parts);
    free(list);
    return status;
}

static td_status data_parallel_forward(td_module *module, const td_tensor_list *inputs,
                                       td_tensor_list *results)
{
    td_module *inner = td_child(module, 0);
    struct data_parallel parallel;
    td_status status = resolve(td_module_data(module), device_of(inner, inputs->at[0]), &parallel);
    if (!status) {
        status = run_on_devices(&parallel, inner, inputs, results);
        free_devices(&parallel);
    }
    return status;
}

/* ---- Making one ------------------------------------------------------------------------------------- */

static td_status copy_devices(void *data, const void *from)
{
    const struct data_parallel *other = from;
    return other->devices ? set_devices(data, other->devices, other->count) : TD_OK;
}

static td_status refuse_sending(const td_module *module, td_state *options)
{
    (void)module, (void)options;
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "a DataParallel module cannot be sent, since its devices are of this process; send the "
        "module inside, td_module_find(parallel, \"module\")");
}

static const td_module_ops data_parallel_ops = {
    .name = "DataParallel",
    .data_size = sizeof(struct data_parallel),
    .forward_list = data_parallel_forward,
    .free_data = free_devices,
    .clone_data = copy_devices,
    .save_options = refuse_sending,
};

static td_status check_devices(td_module *module, const td_data_parallel_options *options)
{
    if (options->device_count < 0 || (options->device_ids && options->device_count == 0))
        return td_fail(TD_ERR_INVALID,
                       "td_data_parallel: device_count is %d; it must be the number of "
                       "device_ids",
                       options->device_count);
    td_device *home = device_of(module, NULL); /* NULL: a module without tensors */
    if (!options->device_ids && home)
        TD_TRY(check_count(options->device_count, td_device_kind(home)));
    for (int i = 0; i < options->device_count && options->device_ids; i++)
        if (!td__use_device("td_data_parallel", options->device_ids[i]))
            return td__error_status();
    if (options->output_device && !td__use_device("td_data_parallel", options->output_device))
        return td__error_status();
    return TD_OK;
}

static td_module *make(td_module *module, const td_data_parallel_options *options)
{
    if (td__check_reserved("td_data_parallel", options->reserved) || check_devices(module, options))
        return NULL;
    td_module *wrapped = td_module_create(&data_parallel_ops);
    if (!wrapped)
        return NULL;
    struct data_parallel *parallel = td_module_data(wrapped);
    parallel->count = options->device_count;
    if (options->device_ids && set_devices(parallel, options->device_ids, options->device_count)) {
        *parallel = (struct data_parallel){0};
        td_module_destroy(wrapped);
        return NULL;
    }
    parallel->dim = options->dim;
    parallel->output = options->output_device ? options->output_device
                       : options->device_ids  ? options->device_ids[0]
                                              : NULL;
    return wrapped;
}

td_module *td_data_parallel(td_module *module, const td_data_parallel_options *options)
{
    if (!module)
        return td__null(__func__);
    td_module *wrapped = make(module, options ? options : &(td_data_parallel_options){0});
    if (!wrapped) {
        td_module_destroy(module);
        return NULL;
    }
    td_module_add_child(wrapped, "module", module);
    return td_module_finish(wrapped);
}
