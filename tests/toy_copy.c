/* Copies and fills of the toy accelerator. Both sides of a copy are spans, which are looked up again when the stream
 * gets there. */
#include "toy_machine.h"

#include <stdlib.h>
#include <string.h>

struct copy {
    const char *name;
    struct toy_span to, from;
    void *aside; /* what was copied from the host before the call returned; for free() */
    unsigned char value;
};

static td_status run_copy(void *payload)
{
    struct copy *copy = payload;
    void *to = toy_span_reach(&copy->to, copy->name);
    const void *from = toy_span_reach(&copy->from, copy->name);
    if (copy->to.bytes)
        memcpy(to, from, copy->to.bytes);
    return TD_OK;
}

static td_status run_fill(void *payload)
{
    struct copy *copy = payload;
    void *to = toy_span_reach(&copy->to, copy->name);
    if (copy->to.bytes)
        memset(to, copy->value, copy->to.bytes);
    return TD_OK;
}

static void drop_copy(void *payload)
{
    free(((struct copy *)payload)->aside);
}

/* `in` and `out` are bytes from and to the host. */
static td_status enqueue(struct toy_device *device, void *stream, td_status (*run)(void *),
                         const struct copy *copy, size_t in, size_t out)
{
    struct toy_job *job = toy_job_create(TOY_COPY, copy->name, run, copy, sizeof *copy);
    if (!job) {
        free(copy->aside);
        return TD_ERR_NOMEM;
    }
    job->drop = drop_copy;
    td_status status = toy_enqueue(device, stream, job);
    if (status)
        return status;
    toy_lock();
    device->counts.copied_in += (int64_t)in;
    device->counts.copied_out += (int64_t)out;
    toy_unlock();
    return TD_OK;
}

/* Whether the device works, before its addresses are looked at. */
static td_status begin(struct toy_device *device)
{
    td_status status = toy_enter(device);
    if (!status)
        toy_unlock();
    return status;
}

td_status toy_copy_in(void *self, void *stream, void *data, const void *host, size_t bytes,
                      bool pinned)
{
    struct toy_device *device = self;
    td_status status = begin(device);
    if (status)
        return status;
    struct copy copy = {.name = "copy_in"};
    copy.to = toy_span_on(device, data, bytes, copy.name);
    if (pinned) {
        copy.from = toy_span_pinned(host, bytes, copy.name);
    } else {
        copy.aside = malloc(bytes + 1);
        if (!copy.aside)
            return td_fail(TD_ERR_NOMEM, "%s: no host memory for a copy of %zu bytes", device->name,
                           bytes);
        if (bytes)
            memcpy(copy.aside, host, bytes);
        copy.from = (struct toy_span){.data = copy.aside, .bytes = bytes};
    }
    return enqueue(device, stream, run_copy, &copy, bytes, 0);
}

td_status toy_copy_out(void *self, void *stream, void *host, const void *data, size_t bytes,
                       bool pinned)
{
    struct toy_device *device = self;
    td_status status = begin(device);
    if (status)
        return status;
    struct copy copy = {.name = "copy_out"};
    copy.from = toy_span_on(device, data, bytes, copy.name);
    copy.to = pinned ? toy_span_pinned(host, bytes, copy.name)
                     : (struct toy_span){.data = host, .bytes = bytes};
    if (bytes)
        memset(host, TOY_FRESH, bytes); /* a caller that does not wait reads this */
    return enqueue(device, stream, run_copy, &copy, 0, bytes);
}

td_status toy_copy_from(void *self, void *stream, void *to, void *other, const void *from,
                        size_t bytes)
{
    struct toy_device *device = self;
    td_status status = begin(device);
    if (status)
        return status;
    struct copy copy = {.name = self == other ? "copy" : "copy_from"};
    copy.to = toy_span_on(device, to, bytes, copy.name);
    copy.from = toy_span_on(other, from, bytes, copy.name);
    if ((char *)to < (char *)from + bytes && (char *)from < (char *)to + bytes)
        toy_die("%s: copy: %zu bytes at %p and at %p overlap", device->name, bytes, to, from);
    return enqueue(device, stream, run_copy, &copy, 0, 0);
}

td_status toy_copy_inside(void *self, void *stream, void *to, const void *from, size_t bytes)
{
    return toy_copy_from(self, stream, to, self, from, bytes);
}

td_status toy_fill_bytes(void *self, void *stream, void *data, unsigned char value, size_t bytes)
{
    struct toy_device *device = self;
    td_status status = begin(device);
    if (status)
        return status;
    struct copy copy = {.name = "fill", .value = value};
    copy.to = toy_span_on(device, data, bytes, copy.name);
    return enqueue(device, stream, run_fill, &copy, 0, 0);
}
