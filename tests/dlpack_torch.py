"""Exchanges tensors with PyTorch by DLPack: dlpack_torch.py LIBTANDEM

Exit code 77: torch cannot be imported."""

import ctypes
import gc
import sys

try:
    import torch
    from torch.utils.dlpack import from_dlpack, to_dlpack
except ImportError as error:
    print(error)
    sys.exit(77)

td = ctypes.CDLL(sys.argv[1])
P, I64 = ctypes.c_void_p, ctypes.c_int64


def declare(name, result, *arguments):
    function = getattr(td, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


from_array = declare("td_from_array", P, P, ctypes.POINTER(I64), ctypes.c_int, ctypes.c_int, P)
transpose = declare("td_transpose", P, P, ctypes.c_int, ctypes.c_int)
narrow = declare("td_narrow", P, P, ctypes.c_int, I64, I64)
release = declare("td_tensor_release", None, P)
data_of = declare("td_tensor_data", P, P)
stride_of = declare("td_tensor_stride", I64, P, ctypes.c_int)
size_of = declare("td_tensor_size", I64, P, ctypes.c_int)
dtype_of = declare("td_tensor_dtype", ctypes.c_int, P)
double_ = declare("td_mul_scalar_", ctypes.c_int, P, ctypes.c_double)
export = declare("td_to_dlpack", P, P)
take = declare("td_from_dlpack", P, P, P)
last_error = declare("td_last_error", ctypes.c_char_p)

api = ctypes.pythonapi
api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = ctypes.py_object, [P, ctypes.c_char_p, P]
api.PyCapsule_GetPointer.restype = P
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
NAME, USED = b"dltensor", b"used_dltensor"

# The numbers of td_dtype.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int8: 4, torch.uint8: 5,
          torch.int16: 6, torch.int32: 7, torch.int64: 8, torch.complex64: 12, torch.complex128: 13}


def ours(tensor):
    """A tensor of the library with a copy of the elements."""
    shape = (I64 * tensor.dim())(*tensor.shape)
    number = DTYPES.get(tensor.dtype, 11)
    made = from_array(tensor.contiguous().data_ptr(), shape, tensor.dim(), number, None)
    assert made, last_error()
    return made


def give(handle):
    """A tensor of the library for torch."""
    managed = export(handle)
    assert managed, last_error()
    return from_dlpack(api.PyCapsule_New(managed, NAME, None))


def get(tensor):
    """A tensor of torch for the library."""
    capsule = to_dlpack(tensor)
    handle = take(api.PyCapsule_GetPointer(capsule, NAME), None)
    assert handle, last_error()
    api.PyCapsule_SetName(capsule, USED)
    return handle


def check_dtype(dtype):
    source = torch.arange(12).reshape(3, 4).to(dtype)
    handle = ours(source)
    there = give(handle)
    assert there.dtype == dtype and torch.equal(there, source), (dtype, there)
    assert there.data_ptr() == data_of(handle)
    release(handle)  # torch has the memory
    assert torch.equal(there, source)
    del there

    handle = get(source)
    assert dtype_of(handle) == DTYPES[dtype] and data_of(handle) == source.data_ptr()
    release(handle)


def check_views():
    source = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    handle = ours(source)
    rows = narrow(handle, 0, 1, 2)
    view = transpose(rows, 0, 1)
    there = give(view)
    assert torch.equal(there, source[1:3].t()) and there.stride() == (1, 4)
    there[0, 0] = 100  # shared
    assert ctypes.cast(data_of(view), ctypes.POINTER(ctypes.c_float))[0] == 100
    for each in (view, rows, handle):
        release(each)

    handle = get(source[:, ::2].t())
    assert [stride_of(handle, 0), stride_of(handle, 1)] == [2, 4] and size_of(handle, 0) == 2
    assert double_(handle, 2.0) == 0, last_error()
    assert source[1].tolist() == [8.0, 5.0, 12.0, 7.0]
    release(handle)


def check_lifetime():
    source = torch.full((1000,), 7, dtype=torch.int64)
    handle = get(source)
    del source
    gc.collect()
    torch.zeros(1000, dtype=torch.int64)
    assert ctypes.cast(data_of(handle), ctypes.POINTER(I64))[999] == 7
    release(handle)


def check_bool():
    source = torch.tensor([True, False, True])
    handle = ours(source)
    managed = export(handle)
    assert managed
    try:
        there = from_dlpack(api.PyCapsule_New(managed, NAME, None))
    except RuntimeError as error:
        print(f"torch {torch.__version__} takes no bool: {error}")
        back = take(managed, None)  # the export is still ours
        assert back and dtype_of(back) == 11
        release(back)
    else:
        assert there.dtype == torch.bool and torch.equal(there, source)
        handle_back = get(source)
        assert dtype_of(handle_back) == 11
        release(handle_back)
    release(handle)


for each in DTYPES:
    check_dtype(each)
check_views()
check_lifetime()
check_bool()
print("all checks passed")
