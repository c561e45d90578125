/* A device for tests of tdcheck: the kind "plain", whose memory is the host's, whose streams have run everything when a
 * call returns, and whose kernels are those of the host. TANDEM_PLAIN_FAULT names one thing that it does wrong, and each
 * must be found; tests/test_tdcheck.py lists them. */
#include <tandem/device_ops.h>
#include <tandem/kernels.h>
#include <tandem/plugin.h>
#include <tandem/tensor.h>

#include <stdlib.h>
#include <string.h>

static bool has_fault(const char *name)
{
    const char *fault = getenv("TANDEM_PLAIN_FAULT");
    return fault && !strcmp(fault, name);
}

/* ---- Memory, streams and copies ------------------------------------------------------------------------ */

static int count(void *arg)
{
    (void)arg;
    return 2;
}

static td_status open_device(void *arg, int index, void **self)
{
    (void)arg;
    *self = (void *)(intptr_t)(index + 1);
    return TD_OK;
}

static td_status alloc(void *self, size_t bytes, void **data)
{
    (void)self;
    *data = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!*data)
        return td_fail(TD_ERR_NOMEM, "plain: out of memory");
    memset(*data, 0xff, bytes);
    return TD_OK;
}

static void release(void *self, void *data)
{
    (void)self;
    free(data);
}

static td_status create(void **object)
{
    *object = malloc(1);
    return *object ? TD_OK : td_fail(TD_ERR_NOMEM, "plain: out of memory");
}

static td_status stream_create(void *self, int priority, void **stream)
{
    (void)self;
    (void)priority;
    return create(stream);
}

static td_status event_create(void *self, bool timing, void **event)
{
    (void)self;
    (void)timing;
    return create(event);
}

static td_status nothing(void *self)
{
    (void)self;
    return TD_OK;
}

static td_status nothing_with(void *self, void *object)
{
    (void)self;
    (void)object;
    return TD_OK;
}

static td_status nothing_between(void *self, void *one, void *other)
{
    (void)self;
    (void)one;
    (void)other;
    return TD_OK;
}

static td_status query(void *self, void *object, bool *done)
{
    (void)self;
    (void)object;
    *done = true;
    return TD_OK;
}

static td_status elapsed(void *self, void *start, void *end, double *milliseconds)
{
    *milliseconds = 0;
    return nothing_between(self, start, end);
}

static td_status copy_in(void *self, void *stream, void *data, const void *host, size_t bytes,
                         bool pinned)
{
    (void)pinned;
    if (bytes)
        memcpy(data, host, bytes - (has_fault("copy_in") && bytes > 4));
    return nothing_with(self, stream);
}

static td_status copy_out(void *self, void *stream, void *host, const void *data, size_t bytes,
                          bool pinned)
{
    return copy_in(self, stream, host, data, bytes, pinned);
}

static td_status copy(void *self, void *stream, void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    return nothing_with(self, stream);
}

static td_status fill(void *self, void *stream, void *data, unsigned char value, size_t bytes)
{
    memset(data, value, bytes);
    return nothing_with(self, stream);
}

/* ---- Faulty kernels ------------------------------------------------------------------------------------- */

static bool is_f32(const td_tensor *tensor)
{
    return td_tensor_dtype(tensor) == TD_F32 && td_tensor_numel(tensor) > 0;
}

/* exp is wrong by 1e-4 of each element. */
static td_status slightly_wrong(td_unary op, td_tensor *out, const td_tensor *x)
{
    td_status status = td_host_kernels()->unary(op, out, x);
    if (!status && op == TD_UNARY_EXP && is_f32(out))
        status = td_host_kernels()->binary_scalar(TD_BINARY_MUL, out, out, 1.0001, false);
    return status;
}

/* add leaves the last element of large contiguous results as it was. */
static td_status last_element(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b)
{
    float *last = NULL, before = 0;
    if (op == TD_BINARY_ADD && is_f32(out) && td_tensor_is_contiguous(out) &&
        td_tensor_numel(out) > 1000) {
        last = (float *)td_tensor_data(out) + td_tensor_numel(out) - 1;
        before = *last;
    }
    td_status status = td_host_kernels()->binary(op, out, a, b);
    if (last)
        *last = before;
    return status;
}

/* relu gives 0 for NaN. */
static td_status no_nan(td_unary op, td_tensor *out, const td_tensor *x)
{
    td_status status = td_host_kernels()->unary(op, out, x);
    if (!status && op == TD_UNARY_RELU && is_f32(out) && td_tensor_is_contiguous(out))
        for (int64_t i = 0; i < td_tensor_numel(out); i++) {
            float *at = (float *)td_tensor_data(out) + i;
            *at = *at > 0 ? *at : 0;
        }
    return status;
}

/* clamp writes to the element after each one of a result with strides. */
static td_status beside(td_tensor *out, const td_tensor *x, double low, double high)
{
    td_status status = td_host_kernels()->clamp(out, x, low, high);
    if (!status && is_f32(out) && td_tensor_ndim(out) == 1 && td_tensor_stride(out, 0) == 2)
        ((float *)td_tensor_data(out))[1] = 7;
    return status;
}

/* The gradient of tanh has the wrong sign. */
static td_status gradient(td_unary op, td_tensor *grad_x, const td_tensor *grad_y,
                          const td_tensor *saved)
{
    td_status status = td_host_kernels()->unary_grad(op, grad_x, grad_y, saved);
    if (!status && op == TD_UNARY_TANH)
        status = td_host_kernels()->unary(TD_UNARY_NEG, grad_x, grad_x);
    return status;
}

/* matmul waits for its stream. */
static td_status waiting(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                         bool accumulate)
{
    td_status status = td_stream_synchronize(td_current_stream(td_tensor_device(out)));
    return status ? status : td_host_kernels()->matmul(out, a, b, alpha, accumulate);
}

/* linear reads f32 as if it had fewer bits. */
static td_status few_bits(td_tensor *out, const td_tensor *x, const td_tensor *w,
                          const td_tensor *bias)
{
    td_status status = td_host_kernels()->linear(out, x, w, bias);
    if (!status && is_f32(out))
        for (int64_t i = 0; i < td_tensor_numel(out); i++) {
            float *at = (float *)td_tensor_data(out) + i;
            *at = td_f16_to_f32(td_f32_to_f16(*at));
        }
    return status;
}

static td_status uniform_constant(td_tensor *out, double from, double to, td_generator *generator)
{
    (void)generator;
    return td_host_kernels()->fill(out, (from + to) / 2);
}

static td_kernels kernels;

static void set_kernels(void)
{
    kernels = *td_host_kernels();
    if (has_fault("unary"))
        kernels.unary = slightly_wrong;
    if (has_fault("last"))
        kernels.binary = last_element;
    if (has_fault("nan"))
        kernels.unary = no_nan;
    if (has_fault("beside"))
        kernels.clamp = beside;
    if (has_fault("gradient"))
        kernels.unary_grad = gradient;
    if (has_fault("wait"))
        kernels.matmul = waiting;
    if (has_fault("bits"))
        kernels.linear = few_bits;
    if (has_fault("uniform"))
        kernels.uniform = uniform_constant;
    if (has_fault("missing")) {
        kernels.softmax = NULL;
        kernels.where = NULL;
    }
}

static td_status init(void)
{
    static const td_device_ops ops = {
        .version = TD_DEVICE_OPS_VERSION,
        .size = sizeof ops,
        .kind = "plain",
        .count = count,
        .open = open_device,
        .alloc = alloc,
        .free = release,
        .stream_create = stream_create,
        .stream_destroy = release,
        .stream_synchronize = nothing_with,
        .stream_query = query,
        .event_create = event_create,
        .event_destroy = release,
        .event_record = nothing_between,
        .event_wait = nothing_between,
        .event_synchronize = nothing_with,
        .event_query = query,
        .event_elapsed = elapsed,
        .synchronize = nothing,
        .copy_in = copy_in,
        .copy_out = copy_out,
        .copy = copy,
        .fill = fill,
        .kernels = &kernels,
    };
    set_kernels();
    return td_register_device(&ops, NULL);
}

TD_PLUGIN("plain", "1.0", init)
