/* Tensors: creation, references, metadata and copies. */
#include "base/fail.h"
#include "tensor/deferred.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- Creation -------------------------------------------------------------------------------- */

td_tensor *td__tensor_over(struct td__storage *storage, int64_t offset,
                           const struct td__layout *layout)
{
    td_tensor *tensor = malloc(sizeof *tensor);
    if (!tensor) {
        td__fail_nomem("tensor");
        return NULL;
    }
    td__storage_retain(storage);
    *tensor = (td_tensor){
        .owners = 1,
        .storage = storage,
        .offset = offset,
        .layout = *layout,
        .history = atomic_load_explicit(&storage->history, memory_order_relaxed),
    };
    return tensor;
}

td_tensor *td__empty(const char *call, const int64_t *shape, int ndim, td_dtype dtype,
                     td_device *device)
{
    struct td__layout layout;
    if (td__layout_init(&layout, call, shape, ndim, NULL, dtype))
        return NULL;
    struct td__storage *storage = td__storage_create(device, call, td__layout_extent(&layout));
    if (!storage)
        return NULL;
    td_tensor *tensor = td__tensor_over(storage, 0, &layout);
    td__storage_release(storage);
    return tensor;
}

td_tensor *td__empty_like_as(const td_tensor *tensor, td_dtype dtype)
{
    if (!tensor)
        return td__null("td_empty_like");
    return td__empty("tensor", tensor->layout.shape, tensor->layout.ndim, dtype,
                     tensor->storage->device);
}

td_tensor *td__empty_like(const td_tensor *tensor)
{
    return tensor ? td__empty_like_as(tensor, tensor->layout.dtype) : NULL;
}

td_tensor *td__zeros_like(const td_tensor *tensor)
{
    td_tensor *zeros = td__empty_like(tensor);
    if (zeros && td__kernels_of(zeros)->fill(zeros, 0)) {
        td_tensor_release(zeros);
        return NULL;
    }
    return zeros;
}

td_tensor *td_empty(const int64_t *shape, int ndim, td_dtype dtype, td_device *device)
{
    device = td__use_device("td_empty", device);
    return device ? td__adopt(td__empty("td_empty", shape, ndim, dtype, device)) : NULL;
}

/* Sets all bytes of a new tensor to 0. */
static td_status clear(td_tensor *tensor)
{
    struct td__place place = td__place_of(tensor);
    if (td__is_meta(tensor->storage->device))
        return td__kernels_of(tensor)->fill(tensor, 0);
    if (!td__on_host(tensor))
        return td__fill_bytes(&place, 0, tensor->storage->bytes);
    if (tensor->layout.numel)
        memset(place.data, 0, tensor->storage->bytes);
    return TD_OK;
}

td_tensor *td_zeros(const int64_t *shape, int ndim, td_dtype dtype, td_device *device)
{
    device = td__use_device("td_zeros", device);
    td_tensor *tensor = device ? td__empty("td_zeros", shape, ndim, dtype, device) : NULL;
    if (tensor && clear(tensor)) {
        td_tensor_release(tensor);
        return NULL;
    }
    return td__adopt(tensor);
}

/* The largest integer of the dtype, plus one; the least is 0 where there is no sign, else -limit.
 */
static double limit_of(td_dtype dtype, bool *is_signed)
{
    *is_signed = dtype == TD_I8 || dtype == TD_I16 || dtype == TD_I32 || dtype == TD_I64;
    int bits = (int)td_dtype_size(dtype) * 8 - *is_signed;
    return bits == 64 ? 18446744073709551616.0 : (double)(UINT64_C(1) << bits);
}

static bool put_integer(void *element, td_dtype dtype, double value)
{
    bool is_signed;
    double limit = limit_of(dtype, &is_signed);
    double least = is_signed ? -limit : 0;
    /* Above least - 1: the fraction is cut off. For i64 there is no double between the two. */
    if (!(value < limit && (value >= least || value > least - 1)))
        return false;
    uint64_t bits = value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
    switch (td_dtype_size(dtype)) {
    case 1:
        *(uint8_t *)element = (uint8_t)bits;
        break;
    case 2:
        *(uint16_t *)element = (uint16_t)bits;
        break;
    case 4:
        *(uint32_t *)element = (uint32_t)bits;
        break;
    default:
        *(uint64_t *)element = bits;
    }
    return true;
}

/* Makes one element of `value`; false where the dtype cannot hold it. */
static bool put_element(void *element, td_dtype dtype, double value)
{
    switch (dtype) {
    case TD_F32:
    case TD_COMPLEX64:
        *(float *)element = (float)value;
        return true;
    case TD_F64:
    case TD_COMPLEX128:
        *(double *)element = value;
        return true;
    case TD_F16:
        *(uint16_t *)element = td_f32_to_f16((float)value);
        return true;
    case TD_BF16:
        *(uint16_t *)element = td_f32_to_bf16((float)value);
        return true;
    case TD_BOOL:
        *(uint8_t *)element = value != 0;
        return true;
    default:
        return put_integer(element, dtype, value);
    }
}

/* Fills `bytes` bytes with copies of the first `element` bytes, each time doubling what is there.
 */
static void repeat(char *data, size_t element, size_t bytes)
{
    for (size_t done = element; done < bytes;) {
        size_t more = done < bytes - done ? done : bytes - done;
        memcpy(data + done, data, more);
        done += more;
    }
}

/* Fills a new tensor with copies of an element, which has the value `value`. */
static td_status fill_new(td_tensor *tensor, const char *element, double value)
{
    size_t size = td_dtype_size(tensor->layout.dtype);
    if (!td__on_host(tensor))
        return td__kernels_of(tensor)->fill(tensor, value);
    if (tensor->layout.numel) {
        memcpy(tensor->storage->data, element, size);
        repeat(tensor->storage->data, size, tensor->storage->bytes);
    }
    return TD_OK;
}

td_tensor *td_full(const int64_t *shape, int ndim, double value, td_dtype dtype, td_device *device)
{
    _Alignas(16) char element[16] = {0};
    if (td_dtype_size(dtype) && !put_element(element, dtype, value)) {
        td_fail(TD_ERR_INVALID, "td_full: %g is not in the range of %s", value,
                td_dtype_name(dtype));
        return NULL;
    }
    device = td__use_device("td_full", device);
    td_tensor *tensor = device ? td__empty("td_full", shape, ndim, dtype, device) : NULL;
    if (tensor && fill_new(tensor, element, value)) {
        td_tensor_release(tensor);
        return NULL;
    }
    return td__adopt(tensor);
}

static td_status record_array(td_tensor *tensor, const void *array)
{
    struct td__storage *storage = td__storage_of(td__host_device(), (void *)array,
                                                 td_tensor_nbytes(tensor), NULL, NULL);
    td_tensor *values = storage ? td__tensor_over(storage, 0, &tensor->layout) : NULL;
    if (storage)
        td__storage_release(storage);
    td_status status = values ? td__deferred_add_copy(tensor, values) : TD_ERR_NOMEM;
    td_tensor_release(values);
    return status;
}

td_tensor *td_from_array(const void *array, const int64_t *shape, int ndim, td_dtype dtype,
                         td_device *device)
{
    device = td__use_device("td_from_array", device);
    td_tensor *tensor = device ? td__empty("td_from_array", shape, ndim, dtype, device) : NULL;
    if (!tensor)
        return NULL;
    if (!array && tensor->layout.numel) {
        td_fail(TD_ERR_INVALID, "td_from_array: the array is NULL for a tensor of shape %s",
                td__shape_text(shape, ndim));
        td_tensor_release(tensor);
        return NULL;
    }
    struct td__place to = td__place_of(tensor),
                     from = {.device = td__host_device(), .data = (void *)array};
    td_status status = td__is_meta(device) ? record_array(tensor, array)
                                           : td__copy_between("td_from_array", &to, &from,
                                                              td_tensor_nbytes(tensor), false);
    if (status) {
        td_tensor_release(tensor);
        return NULL;
    }
    return td__adopt(tensor);
}

td_tensor *td_from_blob(void *data, const int64_t *shape, int ndim, const int64_t *strides,
                        td_dtype dtype, td_device *device, td_blob_free_fn free_fn, void *arg)
{
    struct td__layout layout;
    if (td__layout_init(&layout, "td_from_blob", shape, ndim, strides, dtype))
        return NULL;
    if (!data && layout.numel) {
        td_fail(TD_ERR_INVALID, "td_from_blob: data is NULL for a tensor of shape %s",
                td__shape_text(shape, ndim));
        return NULL;
    }
    device = td__use_device("td_from_blob", device);
    if (device && td__is_meta(device)) {
        td_fail(TD_ERR_INVALID,
                "td_from_blob: the device is %s, which has no memory; name the device of the data",
                device->name);
        return NULL;
    }
    struct td__storage *storage = device ? td__storage_of(device, data, td__layout_extent(&layout),
                                                          NULL, NULL)
                                         : NULL;
    if (!storage)
        return NULL;
    td_tensor *tensor = td__adopt(td__tensor_over(storage, 0, &layout));
    if (tensor) { /* otherwise the caller keeps the memory */
        storage->free_fn = free_fn;
        storage->arg = arg;
    }
    td__storage_release(storage);
    return tensor;
}

td_tensor *td_tensor_retain(td_tensor *tensor)
{
    if (tensor)
        atomic_fetch_add_explicit(&tensor->owners, 1, memory_order_relaxed);
    return tensor;
}

void (*td__tensor_on_destroy)(td_tensor *tensor);

void td_tensor_release(td_tensor *tensor)
{
    if (!tensor || atomic_fetch_sub_explicit(&tensor->owners, 1, memory_order_acq_rel) > 1)
        return;
    if (tensor->node || tensor->idle || atomic_load_explicit(&tensor->base, memory_order_relaxed))
        td__tensor_on_destroy(tensor);
    td__storage_release(tensor->storage);
    free(tensor->shard);
    free(tensor);
}

/* ---- Metadata -------------------------------------------------------------------------------- */

void *td_tensor_data(const td_tensor *tensor)
{
    if (!tensor || !tensor->storage->data)
        return NULL;
    return (char *)tensor->storage->data +
           tensor->offset * (int64_t)td_dtype_size(tensor->layout.dtype);
}

td_dtype td_tensor_dtype(const td_tensor *tensor)
{
    return tensor ? tensor->layout.dtype : (td_dtype)-1;
}

int td_tensor_ndim(const td_tensor *tensor)
{
    return tensor ? tensor->layout.ndim : -1;
}

int td__find_dim(const td_tensor *tensor, const char *call, int dim)
{
    int ndim = tensor->layout.ndim;
    if (dim >= -ndim && dim < ndim)
        return dim < 0 ? dim + ndim : dim;
    td_fail(TD_ERR_INVALID, "%s: there is no dimension %d in a tensor of shape %s", call, dim,
            td__shape_of(tensor));
    return -1;
}

int td__wrap_dim(const td_tensor *tensor, const char *call, int dim)
{
    bool is_number = tensor->layout.ndim == 0 && (dim == 0 || dim == -1);
    return is_number ? 0 : td__find_dim(tensor, call, dim);
}

/* One of the `ndim` numbers, or -1 and the last error. */
static int64_t number_of(const td_tensor *tensor, const int64_t *numbers, int dim, const char *call)
{
    if (!tensor) {
        td__fail_null(call);
        return -1;
    }
    dim = td__find_dim(tensor, call, dim);
    return dim < 0 ? -1 : numbers[dim];
}

int64_t td_tensor_size(const td_tensor *tensor, int dim)
{
    return number_of(tensor, tensor ? tensor->layout.shape : NULL, dim, "td_tensor_size");
}

const int64_t *td_tensor_shape(const td_tensor *tensor)
{
    return tensor ? tensor->layout.shape : NULL;
}

int64_t td_tensor_stride(const td_tensor *tensor, int dim)
{
    return number_of(tensor, tensor ? tensor->layout.strides : NULL, dim, "td_tensor_stride");
}

int64_t td_tensor_numel(const td_tensor *tensor)
{
    return tensor ? tensor->layout.numel : 0;
}

size_t td_tensor_nbytes(const td_tensor *tensor)
{
    return tensor ? (size_t)tensor->layout.numel * td_dtype_size(tensor->layout.dtype) : 0;
}

bool td_tensor_is_meta(const td_tensor *tensor)
{
    return tensor && td__is_meta(tensor->storage->device);
}

td_device *td_tensor_device(const td_tensor *tensor)
{
    return tensor ? tensor->storage->device : NULL;
}

bool td_tensor_is_contiguous(const td_tensor *tensor)
{
    return tensor && td__layout_is_contiguous(&tensor->layout);
}

/* ---- Copies ---------------------------------------------------------------------------------- */

td_tensor *td__clone(td_tensor *tensor)
{
    td_tensor *copy = td__empty_like(tensor);
    if (copy && td__transfer("td_clone", copy, tensor, true)) {
        td_tensor_release(copy);
        return NULL;
    }
    return copy;
}

td_tensor *td__contiguous(td_tensor *tensor)
{
    return td_tensor_is_contiguous(tensor) ? td_tensor_retain(tensor) : td__clone(tensor);
}

td_tensor *td__alias(td_tensor *tensor)
{
    return tensor ? td__tensor_over(tensor->storage, tensor->offset, &tensor->layout) : NULL;
}

static td_status check_copy(const td_tensor *dst, const td_tensor *src)
{
    if (!dst || !src)
        return td_fail(TD_ERR_INVALID, "td_tensor_copy: %s is NULL", dst ? "src" : "dst");
    const struct td__layout *to = &dst->layout, *from = &src->layout;
    if (to->dtype != from->dtype)
        return td_fail(TD_ERR_INVALID, "td_tensor_copy: dst has dtype %s, src has %s",
                       td_dtype_name(to->dtype), td_dtype_name(from->dtype));
    if (to->ndim != from->ndim ||
        memcmp(to->shape, from->shape, (size_t)to->ndim * sizeof to->shape[0]))
        return td_fail(TD_ERR_INVALID, "td_tensor_copy: dst has the shape %s, src has %s",
                       td__shape_text(to->shape, to->ndim),
                       td__shape_text(from->shape, from->ndim));
    if (td__layout_repeats(to))
        return td_fail(TD_ERR_INVALID,
                       "td_tensor_copy: elements of dst share memory, its strides are %s; copy to "
                       "a td_clone() of it",
                       td__shape_text(to->strides, to->ndim));
    return TD_OK;
}

/* Extents may overlap without a common element; then the temporary copy only costs time. */
static bool are_apart(const td_tensor *a, const td_tensor *b)
{
    const char *x = td_tensor_data(a), *y = td_tensor_data(b);
    return a->storage->device != b->storage->device || x + td__layout_extent(&a->layout) <= y ||
           y + td__layout_extent(&b->layout) <= x;
}

td_status td__tensor_copy_as(td_tensor *dst, td_tensor *src, bool async)
{
    TD_TRY(check_copy(dst, src));
    TD_TRY(td__prepare_write(dst));
    if (td_tensor_is_meta(dst)) {
        TD_TRY(td__deferred_add_copy(dst, src));
        td__tensor_bump_version(dst);
        return TD_OK;
    }
    const struct td__layout *to = &dst->layout, *from = &src->layout;
    bool same = td_tensor_data(dst) == td_tensor_data(src) &&
                dst->storage->device == src->storage->device &&
                !memcmp(to->strides, from->strides, (size_t)to->ndim * sizeof to->strides[0]);
    if (same || to->numel == 0)
        return TD_OK;
    td_tensor *aside = are_apart(dst, src) ? td_tensor_retain(src) : td__clone(src);
    if (!aside)
        return TD_ERR_NOMEM;
    td_status status = td__transfer("td_tensor_copy", dst, aside, async);
    td_tensor_release(aside);
    if (!status)
        td__tensor_bump_version(dst);
    return status;
}

td_status td__tensor_copy(td_tensor *dst, td_tensor *src)
{
    return td__tensor_copy_as(dst, src, false);
}
