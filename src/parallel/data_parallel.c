/* DataParallel: one batch on several devices of one process; see parallel.h.
 *
 *     input ──┬─ part 0 on cpu:0 ─ replica 0 ─┬── output
 *             └─ part 1 on cpu:1 ─ replica 1 ─┘
 *
 * Dividing, copying and putting together are recorded operators (td_narrow, td_tensor_to, td_cat), so
 * backward needs nothing here: it runs on the same workers, and sums up the gradients of all replicas
 * in the module's own parameters. */
#include "autograd/graph.h"
#include "base/fail.h"
#include "base/thread.h"

#include <tandem/parallel.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- The four steps ------------------------------------------------------------------------------- */

static td_tensor *put_on(td_tensor *tensor, void *device)
{
    return td_tensor_to(tensor, device);
}

td_status td_replicate(td_module *module, const char *const *devices, int count,
                       td_module **replicas)
{
    if (!module)
        return TD_ERR_INVALID;
    for (int i = 0; i < count; i++) {
        TD_SCOPE
        replicas[i] = td_module_clone_with(module, put_on, (void *)devices[i]);
        if (!replicas[i]) {
            while (i-- > 0)
                td_module_destroy(replicas[i]);
            return td_last_status();
        }
    }
    return TD_OK;
}

td_status td_scatter_to_devices(td_tensor *tensor, const char *const *devices, int count, int dim,
                                td_tensor **parts, int *parts_count)
{
    if (!tensor)
        return TD_ERR_INVALID;
    if (count < 1)
        return td__fail(TD_ERR_INVALID, "td_scatter_to_devices: %d devices are too few", count);
    dim = td__find_dim(tensor, "td_scatter_to_devices", dim);
    if (dim < 0)
        return TD_ERR_INVALID;
    int64_t size = tensor->layout.shape[dim], each = (size + count - 1) / count;
    int made = 0;
    for (int64_t from = 0; made == 0 || from < size; from += each) {
        int64_t length = size - from < each ? size - from : each;
        parts[made] = td_tensor_to(td_narrow(tensor, dim, from, length), devices[made]);
        if (!parts[made])
            return td_last_status();
        made++;
    }
    *parts_count = made;
    return TD_OK;
}

/* One module's share of td_parallel_apply(). */
struct share {
    struct apply *apply;
    td_module *module;
    td_tensor *input;
    td_tensor *result; /* one reference */
    char message[1024];
};

struct apply {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int unfinished;
    bool grad_mode;
};

static void run_share(void *arg)
{
    struct share *share = arg;
    struct apply *apply = share->apply;
    bool before = td_set_grad_enabled(apply->grad_mode);
    TD_SCOPE
    share->result = td_tensor_retain(td_forward(share->module, share->input));
    if (!share->result)
        snprintf(share->message, sizeof share->message, "%s", td_last_error());
    td_set_grad_enabled(before);
    pthread_mutex_lock(&apply->lock);
    if (--apply->unfinished == 0)
        pthread_cond_broadcast(&apply->changed);
    pthread_mutex_unlock(&apply->lock);
}

static void wait_for_shares(struct apply *apply)
{
    pthread_mutex_lock(&apply->lock);
    while (apply->unfinished > 0)
        pthread_cond_wait(&apply->changed, &apply->lock);
    pthread_mutex_unlock(&apply->lock);
}

static td_status collect(struct share *shares, int count, td_tensor **results)
{
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++)
        if (!shares[i].result)
            status = td__fail(TD_ERR_STATE, "%s", shares[i].message);
    for (int i = 0; i < count; i++) {
        results[i] = status ? NULL : td__adopt(shares[i].result);
        if (status)
            td_tensor_release(shares[i].result);
    }
    return status;
}

td_status td_parallel_apply(td_module *const *modules, td_tensor *const *inputs, int count,
                            td_tensor **results)
{
    struct share *shares = calloc(count > 0 ? (size_t)count : 1, sizeof *shares);
    if (!shares)
        return td__fail_nomem("td_parallel_apply");
    struct apply apply = {.unfinished = count, .grad_mode = td_grad_enabled()};
    pthread_mutex_init(&apply.lock, NULL);
    td__cond_init(&apply.changed);
    for (int i = 0; i < count; i++) {
        shares[i] = (struct share){.apply = &apply, .module = modules[i], .input = inputs[i]};
        /* A device that cannot start its worker: then here. */
        if (td_device_submit(td_tensor_device(inputs[i]), run_share, &shares[i]))
            run_share(&shares[i]);
    }
    wait_for_shares(&apply);
    td_status status = collect(shares, count, results);
    pthread_mutex_destroy(&apply.lock);
    pthread_cond_destroy(&apply.changed);
    free(shares);
    return status;
}

td_tensor *td_gather_from_devices(td_tensor *const *tensors, int count, const char *device, int dim)
{
    td_tensor **moved = calloc(count > 0 ? (size_t)count : 1, sizeof *moved), *result = NULL;
    if (!moved) {
        td__fail_nomem("td_gather_from_devices");
        return NULL;
    }
    TD_SCOPE
    {
        bool well = true;
        for (int i = 0; i < count && well; i++) {
            moved[i] = td_tensor_to(tensors[i], device);
            well = moved[i] != NULL;
        }
        if (well)
            result = td_scope_return(td_cat(moved, count, dim));
    }
    free(moved);
    return result;
}

/* ---- The module ------------------------------------------------------------------------------------- */

struct data_parallel {
    int count, dim;
    char (*devices)[24];
    const char **names; /* the same as a list */
    char output[24];
};

static td_tensor *run(td_module *module, const struct data_parallel *parallel,
                      td_tensor *const *parts, int count)
{
    td_module **replicas = calloc((size_t)count, sizeof *replicas);
    td_tensor **results = calloc((size_t)count, sizeof *results), *output = NULL;
    if (!replicas || !results) {
        td__fail_nomem("td_data_parallel");
    } else if (!td_replicate(td_child(module, 0), parallel->names, count, replicas)) {
        if (!td_parallel_apply(replicas, parts, count, results))
            output = td_gather_from_devices(results, count, parallel->output, parallel->dim);
        for (int i = 0; i < count; i++)
            td_module_destroy(replicas[i]);
    }
    free(replicas);
    free(results);
    return output;
}

static td_tensor *data_parallel_forward(td_module *module, td_tensor *const *inputs,
                                        int input_count)
{
    const struct data_parallel *parallel = td_module_data(module);
    if (input_count != 1) {
        td__fail(TD_ERR_INVALID, "td_data_parallel: it divides one input, not %d", input_count);
        return NULL;
    }
    td_tensor **parts = calloc((size_t)parallel->count, sizeof *parts), *output = NULL;
    int count;
    if (!parts) {
        td__fail_nomem("td_data_parallel");
        return NULL;
    }
    if (!td_scatter_to_devices(inputs[0], parallel->names, parallel->count, parallel->dim, parts,
                               &count))
        output = run(module, parallel, parts, count);
    free(parts);
    return output;
}

static void free_devices(void *data)
{
    struct data_parallel *parallel = data;
    free(parallel->devices);
    free(parallel->names);
}

static td_status set_devices(struct data_parallel *parallel, const char *const *devices, int count)
{
    parallel->count = count;
    parallel->devices = calloc((size_t)count, sizeof *parallel->devices);
    parallel->names = calloc((size_t)count, sizeof *parallel->names);
    if (!parallel->devices || !parallel->names) {
        free_devices(parallel);
        return td__fail_nomem("td_data_parallel");
    }
    for (int i = 0; i < count; i++) {
        if (devices)
            snprintf(parallel->devices[i], sizeof parallel->devices[i], "%.23s", devices[i]);
        else
            snprintf(parallel->devices[i], sizeof parallel->devices[i], "cpu:%d", i);
        parallel->names[i] = parallel->devices[i];
    }
    return TD_OK;
}

static td_status copy_devices(void *data, const void *from)
{
    const struct data_parallel *other = from;
    return set_devices(data, other->names, other->count);
}

static const td_module_ops data_parallel_ops = {
    .name = "DataParallel",
    .data_size = sizeof(struct data_parallel),
    .forward = data_parallel_forward,
    .free_data = free_devices,
    .clone_data = copy_devices,
};

static td_status check_tensors(const td_state *tensors, const char *device)
{
    for (size_t i = 0; i < td_state_count(tensors); i++) {
        const char *is_on = td_tensor_device(td_state_tensor(tensors, i));
        if (strcmp(is_on, device) != 0)
            return td__fail(
                TD_ERR_INVALID,
                "td_data_parallel: \"%s\" of the module is on %s; the whole module must "
                "be on %s, the first device: td_module_to() moves it",
                td_state_name(tensors, i), is_on, device);
    }
    return TD_OK;
}

static td_status check_devices(const td_data_parallel_options *options, td_module *module,
                               int count)
{
    for (int i = 0; i < count && options->device_ids; i++)
        if (!td__find_device("td_data_parallel", options->device_ids[i]))
            return TD_ERR_INVALID;
    if (options->output_device && !td__find_device("td_data_parallel", options->output_device))
        return TD_ERR_INVALID;
    td_state *parameters = td_module_parameters(module), *buffers = td_module_buffers(module);
    const char *first = options->device_ids ? options->device_ids[0] : "cpu:0";
    td_status status = parameters && buffers ? TD_OK : td__fail_nomem("td_data_parallel");
    if (!status)
        status = check_tensors(parameters, first);
    if (!status)
        status = check_tensors(buffers, first);
    td_state_destroy(parameters);
    td_state_destroy(buffers);
    return status;
}

static td_module *make(td_module *module, const td_data_parallel_options *options)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int most = td_device_count("cpu");
    int count = options->device_ids ? options->device_count
                : processors < most ? (int)processors
                                    : most;
    if (count < 1) {
        td__fail(TD_ERR_INVALID, "td_data_parallel: %d devices are too few", count);
        return NULL;
    }
    if (check_devices(options, module, count))
        return NULL;
    td_module *wrapped = td_module_create(&data_parallel_ops);
    if (!wrapped)
        return NULL;
    struct data_parallel *parallel = td_module_data(wrapped);
    if (set_devices(parallel, options->device_ids, count)) {
        *parallel = (struct data_parallel){0};
        td_module_destroy(wrapped);
        return NULL;
    }
    parallel->dim = options->dim;
    snprintf(parallel->output, sizeof parallel->output, "%.23s",
             options->output_device ? options->output_device : parallel->devices[0]);
    return wrapped;
}

td_module *td_data_parallel(td_module *module, const td_data_parallel_options *options)
{
    if (!module)
        return NULL;
    td_module *wrapped = make(module, options ? options : &(td_data_parallel_options){0});
    if (!wrapped) {
        td_module_destroy(module);
        return NULL;
    }
    td_module_add_child(wrapped, "module", module);
    return td_module_finish(wrapped);
}
