/* Dtypes and devices of DLPack: the two tables, and what they do not say. */
#include "base/fail.h"
#include "tensor/dlpack_abi.h"

#include <stdio.h>
#include <string.h>

/* ---- Dtypes -------------------------------------------------------------------------------------- */

static const struct {
    uint8_t code, bits;
} dtypes[] = {
    [TD_F32] = {2, 32},       [TD_F64] = {2, 64},         [TD_F16] = {2, 16}, [TD_BF16] = {4, 16},
    [TD_I8] = {0, 8},         [TD_U8] = {1, 8},           [TD_I16] = {0, 16}, [TD_I32] = {0, 32},
    [TD_I64] = {0, 64},       [TD_U32] = {1, 32},         [TD_U64] = {1, 64}, [TD_BOOL] = {6, 8},
    [TD_COMPLEX64] = {5, 64}, [TD_COMPLEX128] = {5, 128},
};

enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

td_status td__dlpack_dtype(const char *call, struct td__dl_dtype from, td_dtype *dtype)
{
    static const char *const codes[] = {"int",    "uint",    "float", "opaque handle",
                                        "bfloat", "complex", "bool"};
    if (from.lanes != 1)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s: each element is a vector of %d lanes; only 1 lane is supported, with a "
                       "dimension more in the producer",
                       call, from.lanes);
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].code == from.code && dtypes[i].bits == from.bits) {
            *dtype = (td_dtype)i;
            return TD_OK;
        }
    return td_fail(TD_ERR_UNSUPPORTED,
                   "%s: there is no dtype for DLPack's type code %d (%s) of %d bits; convert the "
                   "tensor in the producer",
                   call, from.code,
                   from.code < sizeof codes / sizeof codes[0] ? codes[from.code] : "a later one",
                   from.bits);
}

struct td__dl_dtype td__dlpack_dtype_of(td_dtype dtype)
{
    return (struct td__dl_dtype){
        .code = dtypes[dtype].code, .bits = dtypes[dtype].bits, .lanes = 1};
}

/* ---- Devices ------------------------------------------------------------------------------------- */

/* DLPack's types of devices. `kind` is ours of that name, for kinds whose table says nothing. */
static const struct device_type {
    int type;
    const char *name, *kind;
    bool is_host;
} device_types[] = {
    {1, "kDLCPU", "cpu", true},      {2, "kDLCUDA", "cuda", false},
    {3, "kDLCUDAHost", NULL, true}, /* pinned */
    {4, "kDLOpenCL", NULL, false},   {7, "kDLVulkan", NULL, false},
    {8, "kDLMetal", NULL, false},    {9, "kDLVPI", NULL, false},
    {10, "kDLROCM", "rocm", false},  {11, "kDLROCMHost", NULL, true}, /* pinned */
    {12, "kDLExtDev", NULL, false},  {13, "kDLCUDAManaged", NULL, false},
    {14, "kDLOneAPI", NULL, false},  {15, "kDLWebGPU", NULL, false},
    {16, "kDLHexagon", NULL, false}, {17, "kDLMAIA", NULL, false},
};

static const struct device_type *find_type(int type)
{
    static const struct device_type none = {0, "none", NULL, false};
    static const struct device_type unknown = {0, "a later one", NULL, false};
    for (size_t i = 0; i < sizeof device_types / sizeof device_types[0]; i++)
        if (device_types[i].type == type)
            return &device_types[i];
    return type > 0 ? &unknown : &none;
}

/* DLPack's type of a kind; 0: none. */
static int type_of(const struct td__device_kind *kind)
{
    if (kind->ops.dlpack_type)
        return kind->ops.dlpack_type;
    for (size_t i = 0; i < sizeof device_types / sizeof device_types[0]; i++)
        if (device_types[i].kind && !strcmp(device_types[i].kind, kind->name))
            return device_types[i].type;
    return 0;
}

/* The name of the kind of a type: what is registered with it, or that of the table, which may be a plug-in that is not
 * loaded yet. NULL: none, or several, with the last error set. */
static const char *kind_of(const char *call, const struct device_type *type, int number)
{
    const struct td__device_kind *kind, *found = NULL;
    for (int i = 0; (kind = td__kind_number(i)); i++) {
        if (!number || type_of(kind) != number) /* 0 is a kind without a type */
            continue;
        if (found) {
            td_fail(TD_ERR_INVALID,
                    "%s: the memory has the device type %d (%s), which %s and %s both have; pass "
                    "the device",
                    call, number, type->name, found->name, kind->name);
            return NULL;
        }
        found = kind;
    }
    if (!found && !type->kind)
        td_fail(
            TD_ERR_UNSUPPORTED,
            "%s: the memory has the device type %d (%s), and no kind of device says it has that "
            "in td_device_ops.dlpack_type; copy the tensor to the host in the producer",
            call, number, type->name);
    return found ? found->name : type->kind;
}

static td_device *fail_other(const char *call, struct td__dl_device from, const td_device *wanted)
{
    td_fail(
        TD_ERR_INVALID,
        "%s: the memory is of device %d of the type %d (%s), which is not %s; import it without "
        "a device, and copy it by td_tensor_to()",
        call, from.id, from.type, find_type(from.type)->name, wanted->name);
    return NULL;
}

td_device *td__dlpack_device(const char *call, struct td__dl_device from, td_device *wanted)
{
    const struct device_type *type = find_type(from.type);
    if (type->is_host && wanted)
        return wanted->is_host ? wanted : fail_other(call, from, wanted);
    if (type->is_host)
        return td__host_device();
    if (wanted) {
        wanted = td__use_device(call, wanted);
        bool fits = wanted && !wanted->is_host && from.type && type_of(wanted->kind) == from.type &&
                    wanted->index == from.id;
        return !wanted || fits ? wanted : fail_other(call, from, wanted);
    }
    const char *kind = kind_of(call, type, from.type);
    if (!kind)
        return NULL;
    char name[TD__KIND_NAME + 16];
    snprintf(name, sizeof name, "%s:%d", kind, from.id);
    return td__use_device(call, td_device_get(name));
}

td_status td__dlpack_device_of(const char *call, const td_device *device,
                               struct td__dl_device *type)
{
    *type = (struct td__dl_device){.type = type_of(device->kind),
                                   .id = device->is_host ? 0 : device->index};
    if (type->type)
        return TD_OK;
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "%s: the tensor is on %s, which has no type in DLPack (td_device_ops.dlpack_type); "
        "export a copy on the host",
        call, device->name);
}
