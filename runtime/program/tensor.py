"""Tensors of any framework, as plain numbers: the `TensorView`s that everything under a call works on.

A torch tensor is read through its own methods, anything else through DLPack or `__cuda_array_interface__`; no
framework is imported for it. Knows nothing of kernels, archives or GEMMs.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from ..errors import ArgumentError, LayoutError
from ..numbers.dtypes import DTYPES, TORCH_NAMES
from .geometry import contiguous_strides
from .record import TensorView
from .streams import LEGACY_STREAM

_TORCH_DTYPES = {f"torch.{name}": short for short, name in TORCH_NAMES.items()}
_TENSOR_DTYPES = [d for d in DTYPES.values() if not d.stored]
_TYPESTR_DTYPES = {d.typestr: d.name for d in _TENSOR_DTYPES if d.typestr}
_DESCR_DTYPES = {d.torch: d.name for d in _TENSOR_DTYPES if not d.typestr and d.unit == 1}  # a byte or more an element
_DLPACK_DTYPES = {(d.dlpack, d.bits): d.name for d in _TENSOR_DTYPES if d.dlpack >= 0}
_DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 2, 13
_DLPACK_DEVICES = {1: "host memory", 3: "pinned host memory", 10: "the memory of a ROCm device"}
_DLPACK_VERSION = (1, 1)
_DLPACK_READ_ONLY = 1
_MAX_RANK = 64
UNKNOWN_DEVICE = -1


class Streams(Protocol):
    """What `view` needs of a driver for arrays that name neither their device nor wait for their own stream."""

    def pointer_device(self, pointer: int) -> int:
        """The ordinal of the device that owns `pointer`."""

    def order(self, earlier: int, later: int) -> None:
        """Make stream `later` wait for stream `earlier`."""


def is_torch(x: Any) -> bool:
    """Whether `x` is a torch tensor, of a subclass or not."""
    return hasattr(x, "data_ptr") and any(t.__module__.split(".", 1)[0] == "torch" for t in type(x).__mro__)


def dtype_name(dtype: Any) -> str:
    """The short name of an element type that is given by that, or as a torch dtype.

    Raises:
        ArgumentError: it is neither.
    """
    found = dtype if isinstance(dtype, str) and dtype in TORCH_NAMES else _TORCH_DTYPES.get(str(dtype))
    if found is None:
        raise ArgumentError(f"dtype must be a torch dtype or one of {', '.join(TORCH_NAMES)}, found {dtype!r:.50}")
    return found


def view(
    x: Any, name: str = "tensor", *, stream: int = 0, driver: Streams | None = None, writable: bool = False
) -> TensorView:
    """The address, element type, extents and strides of `x`, which must be in CUDA memory and stays its owner.

    Work that a protocol says is still pending on `x` is ordered before `stream`, and with `driver` also where only
    the consumer can do it. Without `driver` the device of a `__cuda_array_interface__` array is `UNKNOWN_DEVICE`.

    Raises:
        ArgumentError: not a tensor, not in CUDA memory, or of an element type that kernels here do not take.
    """
    if is_torch(x):
        return _from_torch(x, name)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, name, stream, writable)
    interface = getattr(x, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        return _from_cuda_array_interface(interface, name, stream, driver, writable)
    if hasattr(x, "__array_interface__"):
        raise ArgumentError(f"{name} is a {type(x).__name__} in host memory; copy it to the GPU first")
    raise ArgumentError(
        f"{name} must be a torch tensor, or have __dlpack__ or __cuda_array_interface__; found {type(x).__name__}"
    )


def _from_torch(x: Any, name: str) -> TensorView:
    if x.device.type != "cuda":
        raise ArgumentError(f"{name} is on {x.device}; move it to the GPU with .cuda()")
    if str(x.layout) != "torch.strided":
        raise ArgumentError(f"{name} has layout {x.layout}; make it dense with .to_dense()")
    dtype = _TORCH_DTYPES.get(str(x.dtype))
    if dtype is None:
        raise ArgumentError(f"{name} has element type {x.dtype}; it must be one of {sorted(_TORCH_DTYPES)}")
    if x.is_neg():
        raise ArgumentError(f"{name} stands for the negative of what is in its memory; pass {name}.resolve_neg()")
    pointer = x.data_ptr()
    if pointer and x.storage_offset() and not x.untyped_storage().nbytes():
        pointer = 0  # its storage was freed: what data_ptr gave is its offset from nothing
    shape, strides = in_elements(dtype, tuple(x.shape), tuple(x.stride()), name)
    return TensorView(pointer, dtype, shape, strides, x.device.index)


def in_elements(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents and strides in elements, of those in units of a packed type, as torch has them; of others the same.

    Raises:
        LayoutError: no dimension has neighbours in memory, so units cannot be taken apart.
    """
    unit = DTYPES[dtype].unit
    if unit == 1:
        return shape, strides
    inner = next((i for i in reversed(range(len(shape))) if strides[i] == 1), None)
    if inner is None:
        raise LayoutError(
            f"{name} holds {unit} elements of {dtype} in a unit of its type, and must have units that are neighbours, "
            f"found strides {strides}; make it contiguous",
            f"strides of {name}",
        )
    return (
        tuple([extent * unit if i == inner else extent for i, extent in enumerate(shape)]),
        tuple([step if i == inner else step * unit for i, step in enumerate(strides)]),
    )


# --- __cuda_array_interface__, version 3 ---


def _from_cuda_array_interface(
    interface: dict[str, Any], name: str, stream: int, driver: Streams | None, writable: bool
) -> TensorView:
    try:
        shape = tuple(int(n) for n in interface["shape"])
        typestr = str(interface["typestr"])
        pointer, read_only = interface["data"]
        strides_bytes = interface.get("strides")
        strides_bytes = None if strides_bytes is None else tuple(int(s) for s in strides_bytes)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} has a malformed __cuda_array_interface__: {error!r}") from None
    if interface.get("mask") is not None:
        raise ArgumentError(f"{name} is a masked array; pass its data without a mask")
    if writable and read_only:
        raise ArgumentError(f"{name} is read-only; pass a writable array")
    dtype = _typestr_dtype(typestr, interface.get("descr"), name)
    width = DTYPES[dtype].bytes
    if strides_bytes is None:
        strides = contiguous_strides(shape)
    elif len(strides_bytes) != len(shape) or any(s % width for s in strides_bytes):
        raise ArgumentError(f"{name} has strides of {strides_bytes} bytes for shape {shape} and elements of {width}")
    else:
        strides = tuple(s // width for s in strides_bytes)
    pointer = int(pointer or 0)
    device = UNKNOWN_DEVICE
    if driver is not None and pointer:
        device = driver.pointer_device(pointer)
        producer = interface.get("stream")
        if producer is not None and producer != (stream or LEGACY_STREAM):
            driver.order(int(producer), stream)
    return TensorView(pointer, dtype, shape, strides, device)


def _typestr_dtype(typestr: str, descr: Any, name: str) -> str:
    """The element type of a typestr; where that says only raw bytes ("V"), the field name of an ml_dtypes `descr`."""
    order, code = typestr[:1], typestr[1:]
    found: str | None = None
    if order in "<|=":
        found = _TYPESTR_DTYPES.get(code)
    if code[:1] == "V" and isinstance(descr, list) and len(descr) == 1:
        found = _DESCR_DTYPES.get(str(descr[0][0]))
        if found is not None and code[1:] != str(DTYPES[found].bytes):
            found = None
    if found is None:
        raise ArgumentError(
            f"{name} has __cuda_array_interface__ type {typestr!r}, which does not say what its elements are or is "
            "none that kernels here take; pass a torch tensor or an array with __dlpack__"
        )
    return found


# --- DLPack ---


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# A capsule keeps a pointer to its name, so these must live as long as the process.
_UNVERSIONED, _USED_UNVERSIONED = b"dltensor", b"used_dltensor"
_VERSIONED, _USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


def _from_dlpack(x: Any, name: str, stream: int, writable: bool) -> TensorView:
    device_type = int(x.__dlpack_device__()[0])
    if device_type not in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
        place = _DLPACK_DEVICES.get(device_type, f"DLPack device type {device_type}")
        raise ArgumentError(f"{name} is in {place}; copy it to the GPU first")
    try:
        try:
            capsule = x.__dlpack__(stream=stream or LEGACY_STREAM, max_version=_DLPACK_VERSION, copy=False)
        except TypeError:  # a producer from before DLPack 1.0 takes the stream alone, and does not copy
            capsule = x.__dlpack__(stream=stream or LEGACY_STREAM)
    except (BufferError, RuntimeError, ValueError) as error:
        raise ArgumentError(f"{name} cannot be exported through DLPack without a copy: {error}") from None
    return _consume(capsule, name, writable)


def _consume(capsule: Any, name: str, writable: bool) -> TensorView:
    """Read a capsule and give it back at once: nothing was copied, so the exporting object still owns the memory."""
    managed: Any
    if _capsule_is_valid(capsule, _VERSIONED):
        address = _capsule_pointer(capsule, _VERSIONED)
        managed, used = _DLManagedTensorVersioned.from_address(address), _USED_VERSIONED
    elif _capsule_is_valid(capsule, _UNVERSIONED):
        address = _capsule_pointer(capsule, _UNVERSIONED)
        managed, used = _DLManagedTensor.from_address(address), _USED_UNVERSIONED
    else:
        raise ArgumentError(f"{name}: __dlpack__ did not return an unused DLPack capsule")
    # From here on the capsule's destructor leaves the tensor to us.
    _capsule_rename(capsule, used)
    try:
        if used is _USED_VERSIONED:
            # Only the fields up to the deleter are the same in every major version.
            if managed.major != _DLPACK_VERSION[0]:
                raise ArgumentError(f"{name} exports DLPack {managed.major}.{managed.minor}; this runtime reads 1.x")
            if writable and managed.flags & _DLPACK_READ_ONLY:
                raise ArgumentError(f"{name} is read-only; pass a writable array")
        return _read_dltensor(managed.tensor, name)
    finally:
        if managed.deleter:
            _Deleter(managed.deleter)(address)


def _read_dltensor(tensor: _DLTensor, name: str) -> TensorView:
    if tensor.device_type not in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
        raise ArgumentError(f"{name}: DLPack device type {tensor.device_type} is not CUDA")
    dtype = _DLPACK_DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes not in (1, DTYPES[dtype].unit):
        raise ArgumentError(
            f"{name} has DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes); "
            f"it must be one of {sorted(set(_DLPACK_DTYPES.values()))}"
        )
    if not 0 <= tensor.ndim <= _MAX_RANK:
        raise ArgumentError(f"{name} has {tensor.ndim} dimensions")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    if tensor.lanes > 1:
        shape, strides = in_elements(dtype, shape, strides, name)
    return TensorView((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, tensor.device_id)
