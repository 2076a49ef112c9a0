"""What native code sees of others, made up: structures of cuda.h as ctypes has them, and a framework's exchange API."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from runtime.program.tensor import _DLTensor


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is aligned to 8 bytes."""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


def read_config(address: int) -> tuple[Any, ...]:
    config = Config.from_address(address)
    attributes = (Attribute * config.count).from_address(config.attributes) if config.count else ()
    return (
        tuple(config.grid),
        tuple(config.block),
        config.shared_bytes,
        config.stream or 0,
        [(a.id, *a.value[:3]) for a in attributes],
    )


def write(address: int, value: Any) -> None:
    ctypes.memmove(address, ctypes.byref(value), ctypes.sizeof(value))


_VIEW = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))
_CURRENT_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
_TYPES = {
    **{"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "float64": (2, 64)},
    **{
        "float8_e4m3fn": (10, 8),
        "float8_e8m0fnu": (14, 8),
        "uint4": (1, 8),
        "int8": (0, 8),
        "int32": (0, 32),
        "int4": (0, 8),
        "float4_e2m1fn_x2": (17, 4, 2),
    },  # as torch exports them
}


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h 1.3."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("view", _VIEW),
        ("current_stream", _CURRENT_STREAM),
    )


_kept: list[Any] = []  # a capsule owns nothing


def exchange_capsule(stream: Callable[[int], int], major: int = 1) -> Any:
    """A `__dlpack_c_exchange_api__` for `FakeTensor`s, where the current stream of a device is `stream(device)`."""

    def view(x: Any, out: Any) -> int:
        code, bits, *lanes = _TYPES[x.dtype.name]
        rank = len(x.shape)
        x.extents = (ctypes.c_int64 * rank)(*x.shape), (ctypes.c_int64 * rank)(*x.stride())
        shape, strides = (ctypes.cast(e, ctypes.POINTER(ctypes.c_int64)) for e in x.extents)
        device = 2 if x.device.type == "cuda" else 1
        out[0] = _DLTensor(
            x.data_ptr() or None, device, x.get_device(), rank, code, bits, *(lanes or [1]), shape, strides, 0
        )
        return 0

    def current_stream(_type: int, device: int, out: int) -> int:
        write(out, ctypes.c_uint64(stream(device)))
        return 0

    api = _ExchangeApi(major, 3, None, None, None, None, _VIEW(view), _CURRENT_STREAM(current_stream))
    _kept.append((api, name := ctypes.c_char_p(b"dlpack_exchange_api")))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(api), name, None)
