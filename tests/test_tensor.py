"""Callers' tensors and streams as numbers: torch, DLPack, `__cuda_array_interface__`."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ArgumentError
from runtime.program.geometry import contiguous_strides, flatten_rows, overlaps_itself, share_memory, span_bytes
from runtime.program.record import TensorView
from runtime.program.streams import stream_handle
from runtime.program.tensor import UNKNOWN_DEVICE, is_torch, view

from .recording_driver import DTYPES, FakeTensor, RecordingDriver, TorchDType

ADDRESS = 0x7F00_0000_0000


# --- torch ---


def test_torch_tensor_is_read_through_its_methods() -> None:
    t = FakeTensor((4, 8), strides=(16, 1), pointer=ADDRESS, device=3)
    assert view(t) == TensorView(ADDRESS, "bf16", (4, 8), (16, 1), 3)


def test_torch_tensor_whose_storage_was_freed_has_no_address() -> None:
    t = FakeTensor((4, 8), pointer=64)  # what data_ptr gives is the offset from address 0
    t.offset = 32
    assert view(t).pointer == 64
    t.storage_bytes = 0
    assert view(t).pointer == 0


def test_real_torch_tensor_whose_storage_was_freed_is_as_expected() -> None:
    torch = pytest.importorskip("torch")
    t = torch.zeros(8, 8)
    rows = t[2:]
    t.untyped_storage().resize_(0)
    assert (t.data_ptr(), rows.data_ptr()) == (0, 64)
    assert (rows.storage_offset(), rows.untyped_storage().nbytes()) == (16, 0)


def test_torch_subclasses_elsewhere_are_torch_tensors() -> None:
    class Mine(FakeTensor):
        pass

    Mine.__module__ = "model"
    assert is_torch(Mine((1,)))
    assert not is_torch(SimpleNamespace(data_ptr=lambda: 0))


def test_torch_tensor_on_the_cpu_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"w is on .*move it to the GPU with \.cuda\(\)"):
        view(FakeTensor((4, 8), device_type="cpu"), "w")


def test_torch_element_type_without_kernels_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"element type torch\.float64"):
        view(FakeTensor((4, 8), "float64"))


def test_sparse_torch_tensor_is_refused() -> None:
    t = FakeTensor((4, 8))
    t.layout = "torch.sparse_csr"
    with pytest.raises(ArgumentError, match=r"\.to_dense\(\)"):
        view(t)


def test_real_torch_names_its_types_as_expected() -> None:
    torch = pytest.importorskip("torch")
    for name in set(DTYPES):
        assert str(getattr(torch, name)) == str(TorchDType(name))
    assert str(torch.empty(1).layout) == "torch.strided"
    assert is_torch(torch.empty(1))
    assert is_torch(torch.nn.Parameter(torch.empty(1)))
    with pytest.raises(ArgumentError, match="is on cpu"):
        view(torch.empty(2, 2))


def test_what_is_no_tensor_is_refused_by_name() -> None:
    for x in ([1.0], None, 3):
        with pytest.raises(ArgumentError, match=f"found {type(x).__name__}"):
            view(x)


# --- __cuda_array_interface__ ---


def array(**fields: Any) -> SimpleNamespace:
    interface = {"shape": (4, 8), "typestr": "<f2", "data": (ADDRESS, False), "version": 3} | fields
    return SimpleNamespace(__cuda_array_interface__=interface)


def test_cuda_array_without_strides_is_row_major() -> None:
    assert view(array()) == TensorView(ADDRESS, "f16", (4, 8), (8, 1), UNKNOWN_DEVICE)
    assert view(array(strides=None)).strides == (8, 1)


def test_cuda_array_strides_are_bytes() -> None:
    assert view(array(strides=(32, 2))).strides == (16, 1)
    with pytest.raises(ArgumentError, match="strides of"):
        view(array(strides=(33, 2)))
    with pytest.raises(ArgumentError, match="strides of"):
        view(array(strides=(32,)))


@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [("<f4", "f32"), ("<f2", "f16"), ("|i1", "i8"), ("|u1", "u8"), ("<i4", "i32"), ("<i8", "i64")],
)
def test_cuda_array_types(typestr: str, dtype: str) -> None:
    assert view(array(typestr=typestr)).dtype == dtype


@pytest.mark.parametrize(
    ("typestr", "descr", "dtype"),
    [
        ("<V2", [("bfloat16", "<V2")], "bf16"),
        ("|V1", [("float8_e4m3fn", "|V1")], "e4m3"),
        ("|V1", [("float8_e5m2", "|V1")], "e5m2"),
    ],
)
def test_cuda_array_of_raw_bytes_needs_a_named_type(typestr: str, descr: Any, dtype: str) -> None:
    assert view(array(typestr=typestr, descr=descr)).dtype == dtype
    for vague in (None, [("", typestr)], [("bfloat16", "<V4"), ("x", "<f4")]):
        with pytest.raises(ArgumentError, match="does not say what its elements are"):
            view(array(typestr=typestr, descr=vague))


@pytest.mark.parametrize("typestr", [">f2", "<f8", "<c8", "|b1", "", "<V4"])
def test_cuda_array_of_other_types_is_refused_by_name(typestr: str) -> None:
    with pytest.raises(ArgumentError, match=f"type '{typestr[:1].replace('|', '.')}"):
        view(array(typestr=typestr, descr=[("bfloat16", typestr)]))


def test_cuda_array_with_a_mask_is_refused() -> None:
    with pytest.raises(ArgumentError, match="masked"):
        view(array(mask=object()))


def test_cuda_array_that_is_read_only_is_no_output() -> None:
    read_only = array(data=(ADDRESS, True))
    assert view(read_only).pointer == ADDRESS
    with pytest.raises(ArgumentError, match="read-only"):
        view(read_only, writable=True)


def test_cuda_array_that_is_malformed_is_refused() -> None:
    for broken in ({"data": None}, {"shape": 3}, {"strides": "ab"}):
        with pytest.raises(ArgumentError, match="malformed"):
            view(array(**broken))


def test_cuda_array_gets_its_device_from_the_driver() -> None:
    assert view(array(), driver=RecordingDriver(ordinal=2)).device == 2


@pytest.mark.parametrize(
    ("producer", "stream", "ordered"),
    [(None, 5, []), (5, 5, []), (1, 0, []), (9, 5, [("order", 9, 5)]), (9, 0, [("order", 9, 0)])],
)
def test_cuda_array_stream_is_waited_for(producer: int | None, stream: int, ordered: list[Any]) -> None:
    driver = RecordingDriver()
    view(array(stream=producer), stream=stream, driver=driver)
    assert driver.log == ordered


def test_host_array_is_refused() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(ArgumentError, match="is in host memory; copy it to the GPU"):
        view(numpy.zeros(3, dtype=numpy.float32))
    with pytest.raises(ArgumentError, match="in host memory"):
        view(SimpleNamespace(__array_interface__={}))


# --- DLPack ---


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Unversioned(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype = ctypes.c_char_p
capsule_name.argtypes = (ctypes.py_object,)


class Producer:
    """Exports made-up CUDA memory, and counts what comes back."""

    def __init__(
        self,
        *,
        versioned: bool = True,
        version: tuple[int, int] = (1, 1),
        flags: int = 0,
        device: tuple[int, int] = (2, 1),
        code: int = 4,
        bits: int = 16,
        lanes: int = 1,
        strides: tuple[int, ...] | None = (16, 1),
        byte_offset: int = 0,
        ndim: int = 2,
    ) -> None:
        self.deleted: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self.versioned = versioned
        self.device = device
        self.shape = (ctypes.c_int64 * 2)(4, 8)
        self.strides = (ctypes.c_int64 * 2)(*strides) if strides else None
        self.managed: Any = Versioned() if versioned else Unversioned()
        if versioned:
            self.managed.version[:] = version
            self.managed.flags = flags
        self.deleter = DELETER(self.deleted.append)
        self.managed.deleter = self.deleter
        tensor = self.managed.tensor
        tensor.data, tensor.ndim, tensor.lanes, tensor.byte_offset = ADDRESS, ndim, lanes, byte_offset
        tensor.device[:], tensor.dtype[:] = device, (code, bits)
        tensor.shape = ctypes.addressof(self.shape)
        tensor.strides = ctypes.addressof(self.strides) if self.strides is not None else None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int, **new: Any) -> Any:
        if not self.versioned and new:
            raise TypeError("unexpected keyword argument")
        self.asked.append({"stream": stream, **new})
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        self.capsule = new_capsule(ctypes.addressof(self.managed), name, None)
        return self.capsule


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_tensor_is_read_and_given_back_once(versioned: bool) -> None:
    producer = Producer(versioned=versioned, byte_offset=32)
    assert view(producer, stream=5) == TensorView(ADDRESS + 32, "bf16", (4, 8), (16, 1), 1)
    assert producer.deleted == [ctypes.addressof(producer.managed)]
    assert capsule_name(producer.capsule) == (b"used_dltensor_versioned" if versioned else b"used_dltensor")
    assert producer.asked[0]["stream"] == 5
    if versioned:
        assert producer.asked[0] == {"stream": 5, "max_version": (1, 1), "copy": False}


def test_dlpack_default_stream_is_named_as_the_protocol_wants() -> None:
    producer = Producer()
    view(producer, stream=0)
    assert producer.asked[0]["stream"] == 1


def test_dlpack_tensor_without_strides_is_row_major() -> None:
    assert view(Producer(strides=None)).strides == (8, 1)


@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [
        (2, 32, "f32"),
        (2, 16, "f16"),
        (4, 16, "bf16"),
        (10, 8, "e4m3"),
        (12, 8, "e5m2"),
        (0, 32, "i32"),
        (0, 64, "i64"),
        (0, 8, "i8"),
        (1, 8, "u8"),
    ],
)
def test_dlpack_types(code: int, bits: int, dtype: str) -> None:
    assert view(Producer(code=code, bits=bits)).dtype == dtype


@pytest.mark.parametrize(
    ("code", "bits", "lanes"), [(2, 64, 1), (8, 8, 1), (11, 8, 1), (5, 64, 1), (2, 16, 2), (6, 8, 1)]
)
def test_dlpack_of_other_types_is_refused_and_given_back(code: int, bits: int, lanes: int) -> None:
    producer = Producer(code=code, bits=bits, lanes=lanes)
    with pytest.raises(ArgumentError, match=rf"DLPack type \(code {code}, {bits} bits, {lanes} lanes\)"):
        view(producer)
    assert len(producer.deleted) == 1


def test_dlpack_of_another_major_version_is_refused_and_given_back() -> None:
    producer = Producer(version=(2, 0))
    with pytest.raises(ArgumentError, match=r"DLPack 2\.0"):
        view(producer)
    assert len(producer.deleted) == 1


def test_dlpack_that_is_read_only_is_no_output() -> None:
    assert view(Producer(flags=1)).dtype == "bf16"
    with pytest.raises(ArgumentError, match="read-only"):
        view(Producer(flags=1), writable=True)


def test_dlpack_of_absurd_rank_is_refused() -> None:
    with pytest.raises(ArgumentError, match="1000000 dimensions"):
        view(Producer(ndim=1_000_000))


@pytest.mark.parametrize(("device", "place"), [((1, 0), "in host memory"), ((3, 0), "pinned host"), ((10, 0), "ROCm")])
def test_dlpack_elsewhere_is_refused_before_export(device: tuple[int, int], place: str) -> None:
    producer = Producer(device=device)
    with pytest.raises(ArgumentError, match=place):
        view(producer)
    assert producer.asked == []


def test_dlpack_producer_that_refuses_is_quoted() -> None:
    class Refusing(Producer):
        def __dlpack__(self, *, stream: int, **new: Any) -> Any:
            raise BufferError("it would need a copy")

    with pytest.raises(ArgumentError, match="without a copy: it would need a copy"):
        view(Refusing())


def test_dlpack_capsule_is_used_once() -> None:
    producer = Producer()
    view(producer)

    class Again(Producer):
        def __dlpack__(self, *, stream: int, **new: Any) -> Any:
            return producer.capsule

    with pytest.raises(ArgumentError, match="did not return an unused DLPack capsule"):
        view(Again())


# --- geometry ---


def matrix(
    shape: tuple[int, ...], strides: tuple[int, ...] | None = None, pointer: int = ADDRESS, dtype: str = "bf16"
) -> TensorView:
    return TensorView(pointer, dtype, shape, contiguous_strides(shape) if strides is None else strides, 0)


def addresses(t: TensorView) -> list[int]:
    """The address of every element, by brute force."""
    found = [t.pointer]
    for extent, stride in zip(t.shape, t.strides, strict=True):
        found = [p + 2 * i * stride for p in found for i in range(extent)]
    return found


extents = st.integers(1, 4)
strides = st.integers(0, 9)


@given(st.lists(st.tuples(extents, strides), min_size=1, max_size=4))
def test_flattened_rows_name_the_same_elements_in_order(dims: list[tuple[int, int]]) -> None:
    t = matrix(tuple(n for n, _ in dims), tuple(s for _, s in dims))
    try:
        flat = flatten_rows(t, "t")
    except ArgumentError:
        return
    assert len(flat.shape) == 2
    assert addresses(flat) == addresses(t)


@given(st.lists(extents, min_size=1, max_size=4))
def test_contiguous_tensors_flatten(shape: list[int]) -> None:
    flat = flatten_rows(matrix(tuple(shape)), "t")
    assert flat.strides[-1] == 1
    assert len(addresses(flat)) == len(addresses(matrix(tuple(shape))))


@given(st.tuples(extents, extents), st.tuples(strides, strides))
def test_tensors_said_to_be_free_of_overlap_are(shape: tuple[int, int], steps: tuple[int, int]) -> None:
    t = matrix(shape, steps)
    if not overlaps_itself(t):
        assert len(set(addresses(t))) == len(addresses(t))


@given(
    st.tuples(extents, extents),
    st.tuples(extents, extents),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(-20, 20),
)
def test_matrices_said_to_be_apart_are(
    x_shape: tuple[int, int], y_shape: tuple[int, int], x_pitch: int, y_pitch: int, shift: int
) -> None:
    x = matrix(x_shape, (x_pitch, 1))
    y = matrix(y_shape, (y_pitch, 1), pointer=ADDRESS + 2 * shift)
    if not share_memory(x, y):
        assert not set(addresses(x)) & set(addresses(y))


@given(st.tuples(extents, extents))
def test_span_reaches_the_end_of_the_last_element(shape: tuple[int, int]) -> None:
    t = matrix(shape, (shape[1] + 3, 1))
    assert span_bytes(t) == max(addresses(t)) + 2 - ADDRESS
    assert span_bytes(t._replace(shape=(0, 4))) == 0


# --- streams ---


@pytest.mark.parametrize(
    "stream",
    [
        11,
        SimpleNamespace(cuda_stream=11),
        SimpleNamespace(__cuda_stream__=lambda: (0, 11)),
    ],
)
def test_stream_handles(stream: Any) -> None:
    assert stream_handle(stream) == 11


def test_cuda_bindings_stream_is_a_stream() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert stream_handle(driver.CUstream(11)) == 11


@pytest.mark.parametrize("stream", ["11", 1.5, True, object()])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(ArgumentError, match="stream must be an integer handle"):
        stream_handle(stream)


@pytest.mark.parametrize("handle", [-1, 1 << 64])
def test_handles_that_are_no_pointers_are_refused(handle: int) -> None:
    for stream in (handle, SimpleNamespace(cuda_stream=handle), SimpleNamespace(__cuda_stream__=lambda: (0, handle))):
        with pytest.raises(ArgumentError, match="a handle from 0 to 2\\^64 - 1"):
            stream_handle(stream)
    assert stream_handle((1 << 64) - 1) == (1 << 64) - 1


def test_stream_protocol_of_another_version_is_refused() -> None:
    with pytest.raises(ArgumentError, match="version 1 of __cuda_stream__"):
        stream_handle(SimpleNamespace(__cuda_stream__=lambda: (1, 11)))
