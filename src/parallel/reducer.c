/* td_reducer: buckets over plain memory. A gradient in the caller's memory is copied into its
 * bucket when it is ready, and back at the end. */
#include "parallel/buckets.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td_reducer {
    struct td__buckets buckets;
    void **data; /* the caller's memory, or NULL */
    int count;
    int slice, slice_count; /* of this rank: the one that is computed now; how many there are */
    bool begun;
};

static td_status describe(const td_reducer_buffer *buffers, int count,
                          struct td__gradient *gradients)
{
    for (int i = 0; i < count; i++) {
        TD_TRY(td__check_reserved("td_reducer_create", buffers[i].reserved));
        if (!td_dtype_size(buffers[i].dtype) || buffers[i].count > INT64_MAX / 16)
            return td_fail(TD_ERR_INVALID, "td_reducer_create: buffer %d has %zu elements of %s", i,
                           buffers[i].count, td_dtype_name(buffers[i].dtype));
        gradients[i] = (struct td__gradient){.dtype = buffers[i].dtype,
                                             .ndim = 1,
                                             .shape = {(int64_t)buffers[i].count},
                                             .numel = (int64_t)buffers[i].count,
                                             .device = td__host_device()};
    }
    return TD_OK;
}

static td_status fill(td_reducer *reducer, const td_reducer_buffer *buffers, int count,
                      const td_reducer_options *options)
{
    struct td__gradient *gradients = calloc((size_t)count + 1, sizeof *gradients);
    reducer->data = calloc((size_t)count + 1, sizeof *reducer->data);
    td_status status = gradients && reducer->data ? TD_OK : td__fail_nomem("td_reducer_create");
    if (!status)
        status = describe(buffers, count, gradients);
    if (!status)
        status = td__verify_gradients("td_reducer_create", gradients, NULL, count, options->group);
    if (!status)
        status = td__buckets_init(&reducer->buckets, gradients, count, NULL,
                                  options->first_bucket_bytes, options->bucket_bytes);
    free(gradients);
    if (status)
        return status;
    for (int i = 0; i < count; i++)
        reducer->data[i] = buffers[i].data;
    reducer->count = count;
    reducer->buckets.group = options->group;
    reducer->buckets.hook = options->hook;
    reducer->buckets.slices = options->slices;
    return TD_OK;
}

static td_status check_slices(const td_reducer_options *options, int *count)
{
    int first;
    if (!options->slices)
        return TD_OK;
    if (options->hook.start || options->hook.finish)
        return td_fail(TD_ERR_INVALID, "td_reducer_create: slices are summed without a hook");
    return td_slice_range(options->slices, options->group, &first, count);
}

td_reducer *td_reducer_create(const td_reducer_buffer *buffers, int count,
                              const td_reducer_options *options)
{
    if (options && (td__check_reserved(__func__, options->reserved) ||
                    td__check_reserved(__func__, options->hook.reserved)))
        return NULL;
    if (count < 0 || (count > 0 && !buffers)) {
        td_fail(TD_ERR_INVALID, "td_reducer_create: the list of %d buffers is %s", count,
                buffers ? "of negative length" : "NULL");
        return NULL;
    }
    int slice_count = 1;
    if (options && check_slices(options, &slice_count))
        return NULL;
    td_reducer *reducer = calloc(1, sizeof *reducer);
    if (!reducer) {
        td__fail_nomem("td_reducer_create");
        return NULL;
    }
    reducer->slice_count = slice_count;
    if (fill(reducer, buffers, count, options ? options : &(td_reducer_options){0})) {
        free(reducer->data);
        free(reducer);
        return NULL;
    }
    return reducer;
}

static td_status check_index(const td_reducer *reducer, const char *call, int index)
{
    if (index >= 0 && index < reducer->count)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: there is no gradient %d; they are 0 to %d", call, index,
                   reducer->count - 1);
}

void *td_reducer_data(td_reducer *reducer, int index)
{
    if (!reducer)
        return td__null(__func__);
    if (check_index(reducer, "td_reducer_data", index))
        return NULL;
    return reducer->data[index] ? reducer->data[index]
                                : td_tensor_data(reducer->buckets.gradients[index].view);
}

td_status td_reducer_ready(td_reducer *reducer, int index)
{
    if (!reducer)
        return td__fail_null("td_reducer_ready");
    TD_TRY(check_index(reducer, "td_reducer_ready", index));
    if (!reducer->begun) {
        reducer->buckets.first_slice = reducer->slice == 0;
        reducer->buckets.last_slice = reducer->slice == reducer->slice_count - 1;
        TD_TRY(td__buckets_begin(&reducer->buckets));
        reducer->begun = true;
    }
    td_tensor *view = reducer->buckets.gradients[index].view;
    if (reducer->buckets.gradients[index].ready)
        return td_fail(TD_ERR_STATE,
                       "td_reducer_ready: gradient %d is ready already in this step; "
                       "td_reducer_wait() ends a step",
                       index);
    if (reducer->data[index] && td_tensor_nbytes(view))
        memcpy(td_tensor_data(view), reducer->data[index], td_tensor_nbytes(view));
    return td__buckets_ready(&reducer->buckets, index);
}

static td_status fail_missing(const td_reducer *reducer)
{
    char list[200] = "";
    size_t length = 0;
    int missing = 0;
    for (int i = 0; i < reducer->count; i++)
        if ((!reducer->begun || !reducer->buckets.gradients[i].ready) && missing++ < 16)
            length += (size_t)snprintf(list + length, sizeof list - length, "%s%d",
                                       length ? ", " : "", i);
    return td_fail(TD_ERR_STATE,
                   "td_reducer_wait: %d of %d gradients are not ready: %s%s; call "
                   "td_reducer_ready() for each",
                   missing, reducer->count, list, missing > 16 ? ", …" : "");
}

td_status td_reducer_wait(td_reducer *reducer)
{
    if (!reducer)
        return td__fail_null("td_reducer_wait");
    if (reducer->count == 0)
        return TD_OK;
    if (!reducer->begun || !td__buckets_complete(&reducer->buckets))
        return fail_missing(reducer);
    td_status status = td__buckets_finish(&reducer->buckets, NULL, NULL);
    reducer->begun = false;
    reducer->slice = status ? 0 : (reducer->slice + 1) % reducer->slice_count;
    if (reducer->slice)
        return status;
    for (int i = 0; i < reducer->count && !status; i++) {
        td_tensor *view = reducer->buckets.gradients[i].view;
        if (reducer->data[i] && td_tensor_nbytes(view))
            memcpy(reducer->data[i], td_tensor_data(view), td_tensor_nbytes(view));
    }
    return status;
}

void td_reducer_destroy(td_reducer *reducer)
{
    if (!reducer)
        return;
    td__buckets_free(&reducer->buckets);
    free(reducer->data);
    free(reducer);
}
