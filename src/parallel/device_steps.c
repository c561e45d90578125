/* The four steps of DataParallel: replicate, scatter, apply, gather; see parallel.h.
 *
 * Scatter, copy and gather are recorded operators (td_narrow, td_tensor_to, td_cat), so backward
 * needs nothing here: it runs on the same workers, and accumulates the gradients of all replicas in
 * the module's parameters. */
#include "autograd/autocast.h"
#include "autograd/graph.h"
#include "base/fail.h"
#include "base/thread.h"

#include <tandem/parallel.h>

#include <stdio.h>
#include <stdlib.h>

static td_tensor *put_on(td_tensor *tensor, void *device)
{
    return td_tensor_to(tensor, device);
}

td_status td_replicate(td_module *module, td_device *const *devices, int count,
                       td_module **replicas)
{
    if (!module)
        return td__fail_null(__func__);
    for (int i = 0; i < count; i++) {
        {
            TD_SCOPE;
            replicas[i] = td_module_clone_with(module, put_on, devices[i]);
        }
        if (!replicas[i]) {
            while (i-- > 0)
                td_module_destroy(replicas[i]);
            return td__error_status();
        }
    }
    return TD_OK;
}

td_status td_scatter_to_devices(td_tensor *tensor, td_device *const *devices, int count, int dim,
                                td_tensor **parts, int *parts_count)
{
    if (!tensor)
        return td__fail_null(__func__);
    if (count < 1)
        return td_fail(TD_ERR_INVALID,
                       "td_scatter_to_devices: there must be at least one "
                       "device, not %d",
                       count);
    dim = td__find_dim(tensor, "td_scatter_to_devices", dim);
    if (dim < 0)
        return TD_ERR_INVALID;
    int64_t size = tensor->layout.shape[dim], each = (size + count - 1) / count;
    int made = 0;
    for (int64_t from = 0; made == 0 || from < size; from += each) {
        int64_t length = size - from < each ? size - from : each;
        parts[made] = td_tensor_to(td_narrow(tensor, dim, from, length), devices[made]);
        if (!parts[made])
            return td__error_status();
        made++;
    }
    *parts_count = made;
    return TD_OK;
}

/* One module's share of td_parallel_apply(). */
struct share {
    struct apply *apply;
    td_module *module;
    const td_tensor_list *inputs;
    td_stream *stream;      /* of the caller on its device: the inputs come from there */
    td_tensor_list results; /* one reference of each */
    td_status status;
    struct td__error error;
};

struct apply {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int unfinished;
    bool grad_mode;
    struct td__autocast_state autocast;
};

static void run_share(void *arg)
{
    struct share *share = arg;
    struct apply *apply = share->apply;
    bool before = td_set_grad_enabled(apply->grad_mode);
    struct td__autocast_state autocast = td__autocast_switch(&apply->autocast);
    {
        TD_STREAM_SCOPE(share->stream);
        TD_SCOPE;
        share->status = td_forward_list(share->module, share->inputs, &share->results);
        for (int i = 0; i < share->results.count; i++)
            td_tensor_retain(share->results.at[i]);
    }
    if (share->status)
        td__error_save(&share->error);
    td__autocast_resume(&autocast);
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

/* The results of all shares, owned by the caller's scope; none if one of them failed. */
static td_status collect(struct share *shares, int count, td_tensor_list *results)
{
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++)
        if (shares[i].status)
            status = td__error_restore(&shares[i].error);
    for (int i = 0; i < count; i++) {
        td_tensor_list *list = &shares[i].results;
        for (int k = 0; k < list->count; k++)
            if (status)
                td_tensor_release(list->at[k]);
            else
                list->at[k] = td__adopt(list->at[k]);
        results[i] = status ? (td_tensor_list){0} : *list;
    }
    return status;
}

td_status td_parallel_apply(td_module *const *modules, const td_tensor_list *inputs, int count,
                            td_tensor_list *results)
{
    struct share *shares = calloc(count > 0 ? (size_t)count : 1, sizeof *shares);
    if (!shares)
        return td__fail_nomem("td_parallel_apply");
    struct apply apply = {.unfinished = count > 0 ? count : 0,
                          .grad_mode = td_grad_enabled(),
                          .autocast = td__autocast_current()};
    pthread_mutex_init(&apply.lock, NULL);
    td__cond_init(&apply.changed);
    for (int i = 0; i < count; i++) {
        shares[i].apply = &apply;
        shares[i].module = modules[i];
        shares[i].inputs = &inputs[i];
        td_device *device = inputs[i].count > 0 ? td_tensor_device(inputs[i].at[0])
                                                : td__host_device();
        shares[i].stream = td_current_stream(device);
        if (td_device_submit(device, run_share, &shares[i])) /* its worker cannot be started */
            run_share(&shares[i]);
    }
    wait_for_shares(&apply);
    td_status status = collect(shares, count, results);
    pthread_mutex_destroy(&apply.lock);
    pthread_cond_destroy(&apply.changed);
    free(shares);
    return status;
}

td_tensor *td_gather_from_devices(td_tensor *const *tensors, int count, td_device *device, int dim)
{
    td_tensor **moved = calloc(count > 0 ? (size_t)count : 1, sizeof *moved), *result = NULL;
    if (!moved) {
        td__fail_nomem("td_gather_from_devices");
        return NULL;
    }
    {
        TD_SCOPE;
        bool well = true;
        for (int i = 0; i < count && well; i++) {
            moved[i] = td_tensor_to(tensors[i], device);
            if (moved[i] && td_tensor_ndim(moved[i]) == 0)
                moved[i] = td_unsqueeze(moved[i], 0);
            well = moved[i] != NULL;
        }
        if (well)
            result = td_scope_return(td_cat(moved, count, dim));
    }
    free(moved);
    return result;
}
