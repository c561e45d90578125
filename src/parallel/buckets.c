/* Buckets; see buckets.h. */
#include "parallel/buckets.h"

#include "base/clock.h"
#include "base/fail.h"
#include "group/work.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Assigning gradients to buckets ------------------------------------------------------------------- */

/* A bucket that is being filled. There is one for each dtype and device. */
struct open {
    td_dtype dtype;
    td_device *device;
    int bucket; /* -1: none open */
    size_t bytes;
    size_t limit;
};

static struct open *find_open(struct open *opens, int *count, const struct td__gradient *gradient,
                              size_t first_bytes)
{
    for (int i = 0; i < *count; i++)
        if (opens[i].dtype == gradient->dtype && opens[i].device == gradient->device)
            return &opens[i];
    struct open *open = &opens[(*count)++];
    *open = (struct open){
        .dtype = gradient->dtype, .device = gradient->device, .bucket = -1, .limit = first_bytes};
    return open;
}

/* Sets the `bucket` of each gradient, and returns the number of buckets; -1 without memory. A
 * bucket is closed when it reaches its limit. */
static int assign(struct td__gradient *gradients, int count, const int *order, size_t first_bytes,
                  size_t bytes)
{
    struct open *opens = calloc((size_t)count + 1, sizeof *opens);
    int open_count = 0, buckets = 0;
    if (!opens)
        return -1;
    for (int i = 0; i < count; i++) {
        struct td__gradient *gradient = &gradients[order ? order[i] : count - 1 - i];
        struct open *open = find_open(opens, &open_count, gradient, first_bytes);
        if (open->bucket < 0)
            open->bucket = buckets++;
        gradient->bucket = open->bucket;
        open->bytes += (size_t)gradient->numel * td_dtype_size(gradient->dtype);
        if (open->bytes >= open->limit)
            *open = (struct open){
                .dtype = open->dtype, .device = open->device, .bucket = -1, .limit = bytes};
    }
    free(opens);
    return buckets;
}

static bool is_lazy(const struct td__buckets *buckets)
{
    return buckets->lazy && !buckets->hook.start && !buckets->hook.finish;
}

/* The elements of a gradient and of the gap behind it: each begins at a multiple of 64 bytes. */
static int64_t padded(const struct td__gradient *gradient)
{
    int64_t step = 64 / (int64_t)td_dtype_size(gradient->dtype);
    return (gradient->numel + step - 1) / step * step;
}

/* The view of a member at element `at`. The gap behind it is 0: it is reduced, too. */
static td_status place_member(struct td_bucket *bucket, struct td__gradient *gradient, int64_t at)
{
    td_tensor *part = td__narrow(bucket->buffer, 0, at, gradient->numel);
    gradient->view = td__reshape(part, gradient->shape, gradient->ndim, NULL);
    td_tensor_release(part);
    if (!gradient->view)
        return td__error_status();
    int64_t gap = padded(gradient) - gradient->numel;
    if (!gap)
        return TD_OK;
    td_tensor *behind = td__narrow(bucket->buffer, 0, at + gradient->numel, gap);
    td_status status = behind ? td__kernels_of(behind)->fill(behind, 0) : td__error_status();
    td_tensor_release(behind);
    return status;
}

static void free_memory(struct td_bucket *bucket)
{
    for (int i = 0; i < bucket->member_count; i++) {
        struct td__gradient *gradient = &bucket->all->gradients[bucket->members[i]];
        td_tensor_release(gradient->view);
        gradient->view = NULL;
    }
    td_tensor_release(bucket->buffer);
    bucket->buffer = NULL;
}

/* The memory of one bucket, and the views of its members. */
td_status td__bucket_hold(struct td_bucket *bucket)
{
    struct td__gradient *gradients = bucket->all->gradients;
    const struct td__gradient *first = &gradients[bucket->members[0]];
    int64_t numel = 0;
    if (bucket->buffer)
        return TD_OK;
    for (int i = 0; i < bucket->member_count; i++)
        numel += padded(&gradients[bucket->members[i]]);
    bucket->buffer = td__empty("bucket", &numel, 1, first->dtype, first->device);
    td_status status = bucket->buffer ? TD_OK : td__error_status();
    if (!status && !is_lazy(bucket->all))
        status = td__kernels_of(bucket->buffer)->fill(bucket->buffer, 0);
    int64_t at = 0;
    for (int i = 0; i < bucket->member_count && !status; i++) {
        struct td__gradient *gradient = &gradients[bucket->members[i]];
        status = place_member(bucket, gradient, at);
        at += padded(gradient);
    }
    if (status)
        free_memory(bucket);
    return status;
}

void td__bucket_drop(struct td_bucket *bucket)
{
    if (is_lazy(bucket->all) && !bucket->work)
        free_memory(bucket);
}

td_tensor *td__buckets_view(struct td__buckets *buckets, int number)
{
    struct td__gradient *gradient = &buckets->gradients[number];
    pthread_mutex_lock(&buckets->lock);
    td_status status = td__bucket_hold(&buckets->buckets[gradient->bucket]);
    td_tensor *view = status ? NULL : gradient->view;
    pthread_mutex_unlock(&buckets->lock);
    return view;
}

static td_status make_buckets(struct td__buckets *buckets, const int *order)
{
    int count = buckets->gradient_count;
    buckets->buckets = calloc((size_t)buckets->count + 1, sizeof *buckets->buckets);
    if (!buckets->buckets)
        return td__fail_nomem("buckets");
    for (int b = 0; b < buckets->count; b++) {
        struct td_bucket *bucket = &buckets->buckets[b];
        bucket->all = buckets;
        bucket->index = b;
        bucket->members = calloc((size_t)count, sizeof *bucket->members);
        if (!bucket->members)
            return td__fail_nomem("buckets");
        for (int i = 0; i < count; i++) {
            int number = order ? order[i] : count - 1 - i;
            if (buckets->gradients[number].bucket == b)
                bucket->members[bucket->member_count++] = number;
        }
        if (!is_lazy(buckets))
            TD_TRY(td__bucket_hold(bucket));
    }
    return TD_OK;
}

td_status td__buckets_init(struct td__buckets *buckets, const struct td__gradient *gradients,
                           int count, const int *order, size_t first_bytes, size_t bytes)
{
    pthread_mutex_init(&buckets->lock, NULL);
    buckets->gradients = calloc((size_t)count + 1, sizeof *gradients);
    buckets->order = calloc((size_t)count + 1, sizeof *buckets->order);
    td_status status = buckets->gradients && buckets->order ? TD_OK : td__fail_nomem("buckets");
    if (!status) {
        memcpy(buckets->gradients, gradients, (size_t)count * sizeof *gradients);
        buckets->gradient_count = count;
        for (int i = 0; i < count; i++)
            buckets->gradients[i].view = NULL;
        buckets->count = assign(buckets->gradients, count, order,
                                first_bytes ? first_bytes : TD__FIRST_BUCKET_BYTES,
                                bytes ? bytes : TD__BUCKET_BYTES);
        if (buckets->count < 0) {
            buckets->count = 0;
            status = td__fail_nomem("buckets");
        }
    }
    if (!status)
        status = make_buckets(buckets, order);
    if (status)
        td__buckets_free(buckets);
    else
        buckets->stats.buckets = buckets->count;
    return status;
}

/* Waits for a work that a failed pass has left, before its memory is written again. */
static void drop_work(struct td_bucket *bucket)
{
    if (!bucket->work)
        return;
    td__work_finish(bucket->work);
    td_work_release(bucket->work);
    bucket->work = NULL;
}

static void drop_data(struct td_bucket *bucket)
{
    if (bucket->data && bucket->free_data)
        bucket->free_data(bucket->data);
    bucket->data = NULL;
}

void td__buckets_free(struct td__buckets *buckets)
{
    for (int b = 0; b < buckets->count && buckets->buckets; b++) {
        struct td_bucket *bucket = &buckets->buckets[b];
        drop_work(bucket);
        drop_data(bucket);
        if (bucket->sums)
            td__slice_sums_free(bucket->sums);
        free(bucket->sums);
        td_tensor_release(bucket->buffer);
        free(bucket->members);
    }
    for (int i = 0; i < buckets->gradient_count; i++)
        td_tensor_release(buckets->gradients[i].view);
    free(buckets->buckets);
    free(buckets->gradients);
    free(buckets->order);
    pthread_mutex_destroy(&buckets->lock);
    buckets->buckets = NULL;
    buckets->gradients = NULL;
    buckets->order = NULL;
    buckets->count = buckets->gradient_count = 0;
}

/* ---- A pass ---------------------------------------------------------------------------------------- */

static td_status begin_slices(struct td_bucket *bucket)
{
    if (!bucket->sums)
        bucket->sums = calloc(1, sizeof *bucket->sums);
    return bucket->sums
               ? td__slice_sums_begin(bucket->sums, bucket->all->slices, bucket->all->group)
               : td__fail_nomem("buckets");
}

td_status td__buckets_begin(struct td__buckets *buckets)
{
    for (int b = 0; b < buckets->count; b++) {
        if (!is_lazy(buckets))
            TD_TRY(td__bucket_hold(&buckets->buckets[b]));
        TD_TRY(td__prepare_write(buckets->buckets[b].buffer));
        if (buckets->slices && buckets->first_slice)
            TD_TRY(begin_slices(&buckets->buckets[b]));
    }
    pthread_mutex_lock(&buckets->lock);
    for (int b = 0; b < buckets->count; b++)
        drop_work(&buckets->buckets[b]);
    for (int i = 0; i < buckets->gradient_count; i++)
        buckets->gradients[i].ready = false;
    for (int b = 0; b < buckets->count; b++) {
        buckets->buckets[b].pending = buckets->buckets[b].member_count;
        buckets->buckets[b].started = false;
    }
    buckets->next = 0;
    buckets->finished = 0;
    buckets->ordered = 0;
    pthread_mutex_unlock(&buckets->lock);
    return TD_OK;
}

static td_status start_average(struct td_bucket *bucket)
{
    struct td__buckets *all = bucket->all;
    char label[32];
    snprintf(label, sizeof label, "ddp bucket %d", bucket->index);
    td_set_call_label(label);
    td_status status = td_all_reduce(bucket->buffer, TD_AVG, all->group, &bucket->work);
    td_set_call_label(NULL);
    if (!status)
        all->stats.bytes += td_tensor_nbytes(bucket->buffer);
    return status;
}

/* The buffer has a slice. */
static td_status add_slice(struct td_bucket *bucket)
{
    TD_TRY(td__slice_sums_add(bucket->sums, bucket->buffer));
    if (!bucket->all->last_slice)
        return TD_OK;
    bucket->all->stats.bytes += td_tensor_nbytes(bucket->buffer);
    return td__slice_sums_start(bucket->sums, bucket->buffer);
}

/* With the lock held: starts, in order, all buckets that are full. */
static td_status start_full(struct td__buckets *buckets)
{
    const td_comm_hook *hook = &buckets->hook;
    while (buckets->next < buckets->count && !buckets->buckets[buckets->next].pending) {
        struct td_bucket *bucket = &buckets->buckets[buckets->next++];
        bucket->started = true;
        bucket->start_ns = td__now_ns();
        if (buckets->slices)
            TD_TRY(add_slice(bucket));
        else if (!hook->start && !hook->finish)
            TD_TRY(start_average(bucket));
        else if (hook->start)
            TD_TRY(hook->start(bucket, hook->arg));
    }
    return TD_OK;
}

td_status td__buckets_ready(struct td__buckets *buckets, int number)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&buckets->lock);
    struct td__gradient *gradient = &buckets->gradients[number];
    if (!gradient->ready) {
        gradient->ready = true;
        buckets->order[buckets->ordered++] = number;
        if (--buckets->buckets[gradient->bucket].pending == 0)
            status = start_full(buckets);
    }
    pthread_mutex_unlock(&buckets->lock);
    return status;
}

bool td__buckets_complete(const struct td__buckets *buckets)
{
    return buckets->ordered == buckets->gradient_count;
}

static td_status finish_bucket(struct td_bucket *bucket)
{
    const td_comm_hook *hook = &bucket->all->hook;
    td_status status = TD_OK;
    int64_t begin = bucket->start_ns, end = 0;
    if (bucket->all->slices && !bucket->all->last_slice)
        return TD_OK;
    if (bucket->all->slices) {
        status = td__slice_sums_finish(bucket->sums, bucket->buffer);
    } else if (hook->start || hook->finish) {
        status = hook->finish ? hook->finish(bucket, hook->arg) : TD_OK;
    } else {
        td__work_finish(bucket->work); /* its own timeout bounds it */
        status = td_work_wait(bucket->work, 0);
        td__work_times(bucket->work, &begin, &end);
        td_work_release(bucket->work);
        bucket->work = NULL;
    }
    bucket->all->stats.communication_ns += (end ? end : td__now_ns()) - begin;
    double scale = bucket->all->scale;
    if (!status && scale != 0)
        status = td__kernels_of(bucket->buffer)
                     ->binary_scalar(TD_BINARY_MUL, bucket->buffer, bucket->buffer, scale, false);
    return status;
}

struct td_bucket *td__buckets_next(struct td__buckets *buckets)
{
    return buckets->finished < buckets->count ? &buckets->buckets[buckets->finished] : NULL;
}

td_status td__buckets_finish_next(struct td__buckets *buckets, struct td_bucket **bucket)
{
    struct td_bucket *next = td__buckets_next(buckets);
    *bucket = NULL;
    pthread_mutex_lock(&buckets->lock);
    bool done = next && next->started && next->work && td_work_test(next->work);
    pthread_mutex_unlock(&buckets->lock);
    if (!done)
        return TD_OK;
    buckets->finished++;
    TD_TRY(finish_bucket(next));
    *bucket = next;
    return TD_OK;
}

td_status td__buckets_finish(struct td__buckets *buckets,
                             td_status (*each)(struct td_bucket *bucket, void *arg), void *arg)
{
    td_status status = TD_OK;
    while (buckets->finished < buckets->count) {
        struct td_bucket *bucket = &buckets->buckets[buckets->finished++];
        int64_t start = td__now_ns();
        td_status one = finish_bucket(bucket);
        buckets->stats.exposed_ns += td__now_ns() - start;
        if (!one && !status && each)
            one = each(bucket, arg);
        status = status ? status : one;
    }
    buckets->stats.passes += !buckets->slices || buckets->last_slice;
    return status;
}

/* ---- For hooks --------------------------------------------------------------------------------------- */

int td_bucket_index(const td_bucket *bucket)
{
    return bucket->index;
}

td_tensor *td_bucket_buffer(td_bucket *bucket)
{
    return bucket->buffer;
}

bool td_bucket_is_last(const td_bucket *bucket)
{
    return bucket->index == bucket->all->count - 1;
}

td_group *td_bucket_group(const td_bucket *bucket)
{
    return bucket->all->group;
}

int td_bucket_gradient_count(const td_bucket *bucket)
{
    return bucket->member_count;
}

td_tensor *td_bucket_gradient(td_bucket *bucket, int index)
{
    if (index < 0 || index >= bucket->member_count)
        return NULL;
    return bucket->all->gradients[bucket->members[index]].view;
}

void td_bucket_set_data(td_bucket *bucket, void *data, void (*free_fn)(void *data))
{
    if (data != bucket->data)
        drop_data(bucket);
    bucket->data = data;
    bucket->free_data = free_fn;
}

void *td_bucket_data(const td_bucket *bucket)
{
    return bucket->data;
}

void td_bucket_count_sent(td_bucket *bucket, size_t bytes)
{
    bucket->all->stats.bytes += bytes;
}
