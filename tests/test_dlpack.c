/* DLPack: both structs in and out, ownership, what is refused, and PyTorch on the other side. */
#include <tandem/dlpack.h>

/* What a program has that includes DLPack's own header, after ours. */
typedef struct {
    int32_t device_type, device_id;
} DLDevice;
typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
typedef struct DLManagedTensorVersioned {
    struct {
        uint32_t major, minor;
    } version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

#include "runner.h"
#include "toy_device.h"

#include <tandem/autograd.h>
#include <tandem/ops.h>

#include "tensor/tensor_internal.h"

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>

static int deleted; /* how often a deleter was called */

static void count_old(DLManagedTensor *self)
{
    CHECK(self->manager_ctx == &deleted);
    deleted++;
}

static void count_new(DLManagedTensorVersioned *self)
{
    CHECK(self->manager_ctx == &deleted);
    deleted++;
}

static float numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
static int64_t shape_34[] = {3, 4};

/* [3, 4] f32 on the host, contiguous by NULL strides. */
static DLManagedTensor sample(void)
{
    return (DLManagedTensor){.dl_tensor = {.data = numbers,
                                           .device = {1, 0},
                                           .ndim = 2,
                                           .dtype = {2, 32, 1},
                                           .shape = shape_34},
                             .manager_ctx = &deleted,
                             .deleter = count_old};
}

static DLManagedTensorVersioned sample_versioned(uint64_t flags)
{
    return (DLManagedTensorVersioned){.version = {1, 1},
                                      .manager_ctx = &deleted,
                                      .deleter = count_new,
                                      .flags = flags,
                                      .dl_tensor = sample().dl_tensor};
}

static float at(td_tensor *tensor, int64_t i, int64_t j)
{
    const float *data = td_tensor_data(tensor);
    return data[i * td_tensor_stride(tensor, 0) + j * td_tensor_stride(tensor, 1)];
}

/* ---- Import ------------------------------------------------------------------------------------- */

TEST(imports_without_a_copy)
{
    DLManagedTensor managed = sample();
    td_tensor *x = td_from_dlpack(&managed, NULL);
    CHECK(x && td_tensor_data(x) == numbers);
    CHECK_STR(td_device_name(td_tensor_device(x)), "cpu");
    CHECK_EQ(td_tensor_dtype(x), TD_F32);
    CHECK(td_tensor_is_contiguous(x) && td_tensor_size(x, 1) == 4);
    CHECK_OK(td_mul_scalar_(x, 2));
    CHECK(numbers[11] == 22); /* the producer sees it */
    td_tensor *view = td_select(x, 0, 1);
    td_tensor_release(x);
    CHECK_EQ(deleted, 0);
    td_tensor_release(view);
    CHECK_EQ(deleted, 1);
}

TEST(imports_strides_and_offsets)
{
    DLManagedTensor managed = sample();
    int64_t shape[] = {4, 2}, strides[] = {1, 4};
    managed.dl_tensor.shape = shape;
    managed.dl_tensor.strides = strides;
    managed.dl_tensor.byte_offset = 4 * sizeof(float);
    td_tensor *x = td_from_dlpack(&managed, td_device_get("cpu:1"));
    CHECK(x && td_tensor_data(x) == numbers + 4);
    CHECK(at(x, 0, 0) == 4 && at(x, 1, 0) == 5 && at(x, 3, 1) == 11);
    CHECK_STR(td_device_name(td_tensor_device(x)), "cpu:1");
    td_tensor_release(x);
    CHECK_EQ(deleted, 1);

    int64_t one[] = {1, 4}, backwards[] = {-4, 1}; /* the stride of a single index means nothing */
    managed = sample();
    managed.dl_tensor.shape = one;
    managed.dl_tensor.strides = backwards;
    x = td_from_dlpack(&managed, NULL);
    CHECK(x && td_tensor_is_contiguous(x));
    td_tensor_release(x);
}

TEST(imports_numbers_and_empty_tensors)
{
    DLManagedTensor managed = sample();
    managed.dl_tensor.ndim = 0;
    managed.dl_tensor.shape = NULL;
    managed.dl_tensor.byte_offset = 12;
    td_tensor *x = td_from_dlpack(&managed, NULL);
    CHECK(x && td_tensor_numel(x) == 1 && td_item(x) == 3);
    td_tensor_release(x);

    int64_t empty[] = {3, 0}, odd[] = {-7, 9};
    managed = sample();
    managed.dl_tensor.shape = empty;
    managed.dl_tensor.strides = odd;
    managed.dl_tensor.data = NULL;
    managed.deleter = NULL; /* there need not be one */
    x = td_from_dlpack(&managed, NULL);
    CHECK(x && td_tensor_numel(x) == 0 && td_tensor_size(x, 0) == 3);
    td_tensor_release(x);
    CHECK_EQ(deleted, 1);
}

static void check_refused(DLManagedTensor managed, td_device *device, td_status status,
                          const char *text)
{
    CHECK(!td_from_dlpack(&managed, device));
    CHECK_EQ(td_last_status(), status);
    CHECK_CONTAINS(td_last_error(), "td_from_dlpack: ");
    CHECK_CONTAINS(td_last_error(), text);
    CHECK_EQ(deleted, 0); /* the producer keeps it */
}

#define REFUSED(change, status, text)                                                              \
    do {                                                                                           \
        DLManagedTensor managed = sample();                                                        \
        DLTensor *t = &managed.dl_tensor;                                                          \
        change;                                                                                    \
        check_refused(managed, NULL, status, text);                                                \
    } while (0)

TEST(refuses_what_does_not_fit)
{
    int64_t many[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, negative[] = {3, -4}, back[] = {-4, 1};
    int64_t huge[] = {INT64_C(1) << 40, INT64_C(1) << 40}, far[] = {INT64_MAX, 1};
    REFUSED(t->ndim = -1, TD_ERR_INVALID, "-1 dimensions");
    REFUSED((t->ndim = 9, t->shape = many), TD_ERR_UNSUPPORTED, "9 dimensions");
    REFUSED(t->ndim = INT32_MAX, TD_ERR_UNSUPPORTED, "dimensions");
    REFUSED(t->shape = NULL, TD_ERR_INVALID, "shape is NULL");
    REFUSED(t->shape = negative, TD_ERR_INVALID, "negative in [3, -4]");
    REFUSED(t->strides = back, TD_ERR_INVALID, "the stride of dimension 0 is negative in [-4, 1]");
    REFUSED(t->shape = huge, TD_ERR_INVALID, "too large");
    REFUSED(t->strides = far, TD_ERR_INVALID, "too large");
    REFUSED(t->data = NULL, TD_ERR_INVALID, "data is NULL");
    REFUSED(t->byte_offset = UINT64_MAX - 3, TD_ERR_INVALID, "past the end of memory");
    REFUSED(t->byte_offset = 2, TD_ERR_INVALID, "alignment of 4 bytes");
    REFUSED(t->dtype.lanes = 4, TD_ERR_UNSUPPORTED, "4 lanes");
    REFUSED(t->dtype.lanes = 0, TD_ERR_UNSUPPORTED, "0 lanes");
    REFUSED(t->dtype.bits = 8, TD_ERR_UNSUPPORTED, "type code 2 (float) of 8 bits");
    REFUSED((t->dtype = (DLDataType){1, 16, 1}), TD_ERR_UNSUPPORTED, "type code 1 (uint) of 16");
    REFUSED((t->dtype = (DLDataType){3, 64, 1}), TD_ERR_UNSUPPORTED, "opaque");
    REFUSED((t->dtype = (DLDataType){10, 8, 1}), TD_ERR_UNSUPPORTED, "type code 10");
    REFUSED(t->device.device_type = 8, TD_ERR_UNSUPPORTED, "8 (kDLMetal)");
    REFUSED(t->device.device_type = 99, TD_ERR_UNSUPPORTED, "99");
    REFUSED(t->device.device_type = -1, TD_ERR_UNSUPPORTED, "-1 (none)");
    REFUSED((t->device = (DLDevice){2, 7}), TD_ERR_INVALID, "cuda:7");
    REFUSED((t->device = (DLDevice){2, -1}), TD_ERR_INVALID, "cuda:-1");
    check_refused(sample(), td_device_get("cuda:0"), TD_ERR_INVALID, "td_tensor_to()");
    CHECK(!td_from_dlpack(NULL, NULL));
    CHECK_CONTAINS(td_last_error(), "is NULL");
}

TEST(refuses_later_versions)
{
    DLManagedTensorVersioned managed = sample_versioned(0);
    managed.version.major = 2;
    CHECK(!td_from_dlpack_versioned(&managed, NULL));
    CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), "version 2.1 of DLPack");
    CHECK_EQ(deleted, 0);
    managed.version.major = 1;
    managed.version.minor = 9; /* a later minor version only adds */
    td_tensor *x = td_from_dlpack_versioned(&managed, NULL);
    CHECK(x && at(x, 2, 3) == 11);
    td_tensor_release(x);
    CHECK_EQ(deleted, 1);
}

TEST(read_only_memory_is_copied_before_a_write)
{
    DLManagedTensorVersioned managed = sample_versioned(TD_DLPACK_READ_ONLY);
    td_tensor *x = td_from_dlpack_versioned(&managed, NULL), *row = td_select(x, 0, 2);
    CHECK(td_tensor_data(x) == numbers);
    td_tensor *sum = td_add(x, x);
    CHECK(td_tensor_data(x) == numbers && at(sum, 0, 1) == 2);
    CHECK_EQ(deleted, 0);
    CHECK_OK(td_mul_scalar_(row, 2));
    CHECK_EQ(deleted, 1);
    CHECK(td_tensor_data(x) != numbers && at(x, 2, 3) == 22 && at(x, 0, 1) == 1);
    CHECK(numbers[11] == 11);
    td_tensor_release(row);
    td_tensor_release(sum);
    td_tensor_release(x);
    CHECK_EQ(deleted, 1);
}

/* ---- Export ------------------------------------------------------------------------------------- */

static const struct {
    td_dtype dtype;
    uint8_t code, bits;
} dtypes[] = {
    {TD_F32, 2, 32},       {TD_F64, 2, 64},         {TD_F16, 2, 16}, {TD_BF16, 4, 16},
    {TD_I8, 0, 8},         {TD_U8, 1, 8},           {TD_I16, 0, 16}, {TD_I32, 0, 32},
    {TD_I64, 0, 64},       {TD_U32, 1, 32},         {TD_U64, 1, 64}, {TD_BOOL, 6, 8},
    {TD_COMPLEX64, 5, 64}, {TD_COMPLEX128, 5, 128},
};

TEST(all_dtypes_go_out_and_in)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        td_tensor *x = td_full(TD_SHAPE(2, 3), 1, dtypes[i].dtype, NULL);
        DLManagedTensor *managed = td_to_dlpack(x);
        CHECK(managed != NULL);
        CHECK_EQ(managed->dl_tensor.dtype.code, dtypes[i].code);
        CHECK_EQ(managed->dl_tensor.dtype.bits, dtypes[i].bits);
        CHECK_EQ(managed->dl_tensor.dtype.lanes, 1);
        td_tensor *back = td_from_dlpack(managed, NULL);
        CHECK(back && td_tensor_dtype(back) == dtypes[i].dtype);
        CHECK(td_tensor_data(back) == td_tensor_data(x));
        td_tensor_release(x); /* the memory lives on */
        td_tensor *same = td_full(TD_SHAPE(2, 3), 1, dtypes[i].dtype, NULL);
        CHECK_MEM(td_tensor_data(back), td_tensor_data(same), td_tensor_nbytes(same));
        td_tensor_release(same);
        td_tensor_release(back);
    }
}

TEST(exports_views_with_their_strides)
{
    td_tensor *x = td_from_array(numbers, TD_SHAPE(3, 4), TD_F32, td_device_get("cpu:1"));
    td_tensor *rows = td_narrow(x, 0, 1, 2), *view = td_transpose(rows, 0, 1);
    DLManagedTensorVersioned *managed = td_to_dlpack_versioned(view, 0);
    const DLTensor *t = &managed->dl_tensor;
    CHECK_EQ(managed->version.major, 1);
    CHECK_EQ(managed->flags, 0);
    CHECK(t->device.device_type == 1 && t->device.device_id == 0 && t->ndim == 2);
    CHECK(t->shape[0] == 4 && t->shape[1] == 2 && t->strides[0] == 1 && t->strides[1] == 4);
    CHECK(t->byte_offset == 0 && t->data == (float *)td_tensor_data(x) + 4);
    td_tensor_release(view);
    td_tensor_release(rows);
    td_tensor_release(x);
    CHECK(((float *)t->data)[7] == 11);
    managed->deleter(managed);

    td_tensor *empty = td_zeros(TD_SHAPE(0, 3), TD_I64, NULL),
              *number = td_full(NULL, 0, 7, TD_I64, NULL);
    DLManagedTensor *none = td_to_dlpack(empty), *one = td_to_dlpack(number);
    CHECK(none->dl_tensor.ndim == 2 && none->dl_tensor.shape[0] == 0);
    CHECK(one->dl_tensor.ndim == 0 && *(int64_t *)one->dl_tensor.data == 7);
    none->deleter(none);
    one->deleter(one);
    td_tensor_release(empty);
    td_tensor_release(number);
}

TEST(flags_of_an_export)
{
    td_tensor *x = td_from_array(numbers, TD_SHAPE(3, 4), TD_F32, NULL);
    DLManagedTensorVersioned *managed = td_to_dlpack_versioned(x, TD_DLPACK_READ_ONLY);
    CHECK(managed->flags == 1 && managed->dl_tensor.data == td_tensor_data(x));
    managed->deleter(managed);
    managed = td_to_dlpack_versioned(x, TD_DLPACK_COPIED);
    CHECK(managed->flags == 2 && managed->dl_tensor.data != td_tensor_data(x));
    CHECK(((float *)managed->dl_tensor.data)[11] == 11);
    managed->deleter(managed);
    CHECK(!td_to_dlpack_versioned(x, 4));
    CHECK_CONTAINS(td_last_error(), "0x4");
    td_tensor_release(x);
}

TEST(a_tensor_that_requires_grad_is_refused)
{
    td_tensor *x = td_zeros(TD_SHAPE(3), TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    td_tensor *y = td_mul_scalar(x, 2), *free = td_detach(x);
    for (int i = 0; i < 2; i++) {
        CHECK(!td_to_dlpack(i ? x : y));
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), "td_to_dlpack: the tensor requires grad");
        CHECK_CONTAINS(td_last_error(), "td_detach()");
    }
    CHECK(!td_to_dlpack_versioned(x, TD_DLPACK_COPIED));
    DLManagedTensor *managed = td_to_dlpack(free);
    CHECK(managed && managed->dl_tensor.data == td_tensor_data(x));
    managed->deleter(managed);
    CHECK(!td_to_dlpack(NULL));
    td_tensor_release(free);
    td_tensor_release(y);
    td_tensor_release(x);
}

/* ---- With leases -------------------------------------------------------------------------------- */

TEST(exported_memory_does_not_move)
{
    td_tensor *x = td_from_array(numbers, TD_SHAPE(3, 4), TD_F32, NULL);
    struct td__lease *lease = NULL;
    CHECK_OK(td__storage_lend(x->storage, &lease));
    const float *lent = td__lease_data(lease);
    DLManagedTensor *managed = td_to_dlpack(x); /* the reader keeps the former memory */
    CHECK(managed->dl_tensor.data != lent && managed->dl_tensor.data == td_tensor_data(x));
    ((float *)managed->dl_tensor.data)[0] = 42;
    CHECK(lent[0] == 0 && at(x, 0, 0) == 42);
    td__lease_return(lease);
    CHECK(!td__is_unshared(x));
    CHECK_FAILS(td__storage_lend(x->storage, &lease), TD_ERR_INVALID, "exported");
    CHECK_OK(td_mul_scalar_(x, 2));
    CHECK(((float *)managed->dl_tensor.data)[0] == 84);
    managed->deleter(managed);
    CHECK(td__is_unshared(x));
    CHECK_OK(td__storage_lend(x->storage, &lease));
    td__lease_return(lease);
    td_tensor_release(x);

    DLManagedTensor imported = sample(); /* the producer's memory is not ours alone */
    x = td_from_dlpack(&imported, NULL);
    CHECK(!td__is_unshared(x));
    CHECK_FAILS(td__storage_lend(x->storage, &lease), TD_ERR_INVALID, "imported");
    td_tensor_release(x);
}

static void *export_often(void *arg)
{
    for (int i = 0; i < 500; i++) {
        DLManagedTensor *managed = td_to_dlpack(arg);
        td_tensor *x = td_from_dlpack(managed, NULL);
        CHECK(x && *(float *)td_tensor_data(x) == 7);
        td_tensor_release(x);
    }
    return NULL;
}

static void *lend_often(void *arg)
{
    td_tensor *tensor = arg;
    for (int i = 0; i < 500; i++) {
        struct td__lease *lease;
        if (td__storage_lend(tensor->storage, &lease))
            continue; /* it is exported at present */
        CHECK(*(const float *)td__lease_data(lease) == 7);
        td__lease_return(lease);
    }
    return NULL;
}

TEST(threads_export_and_lend_at_once)
{
    td_tensor *x = td_full(TD_SHAPE(100), 7, TD_F32, NULL);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_create(&threads[i], NULL, i < 2 ? export_often : lend_often, x));
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    CHECK(td__is_unshared(x));
    td_tensor_release(x);
}

/* ---- An accelerator ------------------------------------------------------------------------------ */

TEST(memory_of_an_accelerator)
{
    static td_device_ops
        ops; /* the toy's kind, which has no type, and another name for one that has */
    CHECK_OK(toy_register());
    td_device *toy = td_device_get("toy:1");
    td_tensor *x = td_full(TD_SHAPE(2, 3), 5, TD_F32, toy);
    CHECK(x != NULL);
    CHECK(!td_to_dlpack(x));
    CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), "td_device_ops.dlpack_type");
    td_tensor_release(x);
    /* 0 is no type, and not that of a kind without one. */
    REFUSED(t->device.device_type = 0, TD_ERR_UNSUPPORTED, "0 (none)");
    DLManagedTensor none = sample();
    none.dl_tensor.device = (DLDevice){0, 1};
    check_refused(none, toy, TD_ERR_INVALID, "0 (none), which is not toy:1");
    check_refused(none, td_device_get("meta"), TD_ERR_INVALID, "meta");
    check_refused(sample(), td_device_get("meta"), TD_ERR_INVALID, "meta");

    ops = *toy_ops();
    ops.kind = "ext";
    ops.dlpack_type = 12;
    CHECK_OK(td_register_device(&ops, NULL));
    td_device *ext = td_device_get("ext:1");
    x = td_full(TD_SHAPE(2, 3), 5, TD_F32, ext);
    DLManagedTensor *managed = td_to_dlpack(x);
    CHECK(managed && managed->dl_tensor.data == td_tensor_data(x));
    CHECK(managed->dl_tensor.device.device_type == 12 && managed->dl_tensor.device.device_id == 1);
    td_tensor_release(x);
    CHECK(!td_from_dlpack(managed, td_device_get("ext:0")));
    CHECK_CONTAINS(td_last_error(), "is not ext:0");
    td_tensor *y = td_from_dlpack(managed, NULL);
    CHECK(y && td_tensor_device(y) == ext);
    CHECK_OK(td_mul_scalar_(y, 2)); /* enqueued; the deleter waits for it */
    td_tensor *sum = td_add(y, y);
    td_tensor_release(y);
    {
        TD_SCOPE;
        CHECK(td_item(td_sum(sum)) == 120);
    }
    td_tensor_release(sum);

    x = td_full(TD_SHAPE(2, 3), 5, TD_F32, ext);
    DLManagedTensorVersioned *versioned = td_to_dlpack_versioned(x, TD_DLPACK_READ_ONLY);
    y = td_from_dlpack_versioned(versioned, ext);
    CHECK_OK(td_mul_scalar_(y, 3));
    {
        TD_SCOPE;
        CHECK(td_item(td_sum(y)) == 90 && td_item(td_sum(x)) == 30);
    }
    td_tensor_release(y);
    td_tensor_release(x);

    static td_device_ops second;
    second = ops;
    second.kind = "ext2";
    CHECK_OK(td_register_device(&second, NULL));
    x = td_full(TD_SHAPE(2), 5, TD_F32, ext);
    managed = td_to_dlpack(x);
    CHECK(!td_from_dlpack(managed, NULL));
    CHECK_CONTAINS(td_last_error(), "ext and ext2 both have");
    y = td_from_dlpack(managed, ext);
    CHECK(y != NULL);
    td_tensor_release(y);
    td_tensor_release(x);
}

/* ---- PyTorch ------------------------------------------------------------------------------------- */

TEST(pytorch_on_the_other_side, .deadline_s = 60)
{
    if (td_test_slowness() > 1)
        td_test_skip("python3 cannot load a library with a sanitizer");
    struct td_test_child child = td_test_exec(
        (const char *const[]){"/usr/bin/python3", TD_DLPACK_SCRIPT, TD_DLPACK_LIBRARY, NULL});
    int code = WIFEXITED(child.status) ? WEXITSTATUS(child.status) : -1;
    if (code == 127 || code == 77)
        td_test_skip("there is no python3 with torch: %s", child.output);
    if (child.status)
        FAIL("%s", child.output);
    CHECK_CONTAINS(child.output, "all checks passed");
    free(child.output);
}
