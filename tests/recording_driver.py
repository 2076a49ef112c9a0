"""Stand-ins for tests without a GPU: a driver that keeps a log, tensors that look like torch's, small records."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aot.pack.write import Package
from aot.providers.gemm_arguments import gemm_tensors
from aot.search.variants import Variant
from runtime import native
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.device.gpus import Gpu
from runtime.device.launch import ATTRIBUTE_WORDS, Launch
from runtime.device.libcuda import FUNCTIONS
from runtime.device.prepared_launch import PreparedLaunch
from runtime.errors import DeviceError
from runtime.gemm.signature import Signature
from runtime.program.arguments import Argument, StreamArgument, Symbol, TensorArgument
from runtime.program.geometry import contiguous_strides
from runtime.program.program import LaunchSource, ParameterSource, ProgramSource
from runtime.program.record import Kernel, RecordSource

from .native_stand_in import read_config, write
from .parameters import with_pointers

H200 = Gpu("NVIDIA H200", 132, 4_800)


@dataclass(frozen=True)
class Launched:
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    attributes: tuple[tuple[int, tuple[int, ...]], ...]
    parameters: tuple[bytes, ...]
    stream: int


@dataclass(eq=False)
class RecordingDriver(Driver):
    """A device that loads any cubin and launches nothing; `kernels` says what a cubin holds, `log` what was asked."""

    kernels: dict[bytes, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    ordinal: int = 0
    capability: tuple[int, int] = (9, 0)
    shared_bytes: int = 227 << 10
    devices: int = 1
    kind: Gpu = H200
    active_clusters: int = 66
    failing: str = ""
    captures: dict[int, int] = field(default_factory=dict)  # by stream, the id of the capture that it is in
    allocated: dict[int, tuple[int, bool]] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    quiet: bool = False

    @property
    def device(self) -> int:
        return self.ordinal

    @property
    def known_device(self) -> int | None:
        return self.ordinal

    @property
    def device_count(self) -> int:
        return self.devices

    @property
    def compute_capability(self) -> tuple[int, int]:
        self.log.append(("compute_capability",))
        return self.capability

    @property
    def multiprocessors(self) -> int:
        return self.kind.multiprocessors

    @property
    def gpu(self) -> Gpu:
        self.log.append(("gpu",))
        return self.kind

    @property
    def max_shared_bytes(self) -> int:
        return self.shared_bytes

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.log.append(("push",))
        yield
        self.log.append(("pop",))

    def synchronize(self) -> None:
        self._maybe_fail("cuCtxSynchronize")
        self.log.append(("synchronize",))

    def pointer_device(self, pointer: int) -> int:
        return self.ordinal

    def order(self, earlier: int, later: int) -> None:
        self.log.append(("order", earlier, later))

    def stream_key(self, stream: int) -> tuple[int, int]:
        self.log.append(("stream_key", stream))
        return self.captures.get(stream, -1), stream

    def allocate(self, size: int, zeroed: bool) -> int:
        self._maybe_fail("cuMemAlloc")
        pointer = (1 << 45) + (len(self.allocated) << 30)
        self.allocated[pointer] = size, zeroed
        return pointer

    def free(self, pointer: int) -> None:
        self.log.append(("free", pointer))

    def load(self, cubin: bytes) -> Any:
        self._maybe_fail("cuLibraryLoadData")
        self.log.append(("load", cubin))
        return cubin

    def unload(self, library: Any) -> None:
        self.log.append(("unload", library))

    def kernel_count(self, library: Any) -> int:
        return len(self.kernels[library])

    def kernel(self, library: Any, symbol: str) -> Any:
        if symbol not in self.kernels[library]:
            raise DeviceError("cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND (500)")
        return library, symbol

    def parameter_sizes(self, kernel: Any) -> tuple[int, ...]:
        library, symbol = kernel
        return self.kernels[library][symbol]

    def set_attributes(self, kernel: Any) -> None:
        self.log.append(("set_attributes", kernel[1]))

    def max_active_clusters(
        self, kernel: Any, cluster: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> int:
        self.log.append(("max_active_clusters", kernel[1], cluster, block, shared_bytes))
        return self.active_clusters

    def prepare(self, kernel: Any, launch: Launch, pointers: int, like: PreparedLaunch | None = None) -> PreparedLaunch:
        self.log.append(("prepare", kernel[1]))
        if native._native is None or not hasattr(FakeTensor, "__dlpack_c_exchange_api__"):
            return _Recorded(self, kernel[1], launch)
        if isinstance(like, native._native.Launch):
            return like.again(launch.grid, launch.parameters)
        self._shapes.append((kernel[1], launch))
        shape = (*launch.grid, *launch.block, launch.shared_bytes)
        attributes = [(identity, *words) for identity, words in launch.attributes]
        slots = [(slot.offset, slot.pointer, slot.addend, slot.mask) for slot in launch.slots]
        address, function = ctypes.cast(self._entry, ctypes.c_void_p).value, len(self._shapes)
        parts = (address, function, shape, attributes, launch.parameters, launch.offsets, slots, pointers, self._failed)
        ready: PreparedLaunch = native._native.Launch(*parts)
        return ready

    def __post_init__(self) -> None:
        self._shapes: list[tuple[str, Launch]] = []  # of native launches, by their function less 1
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int, *FUNCTIONS["cuLaunchKernelEx"][1])(self._launched)
        self._question = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._answer_current_context)

    def _launched(self, config: int, function: int, parameters: int, _extra: int) -> int:
        if self.quiet:
            return 0
        if self.failing == "cuLaunchKernelEx":
            return 719
        symbol, launch = self._shapes[function - 1]
        pointers = (ctypes.c_void_p * len(launch.sizes)).from_address(parameters)
        values = tuple(ctypes.string_at(p or 0, s) for p, s in zip(pointers, launch.sizes, strict=True))
        grid, block, shared_bytes, stream, attributes = read_config(config)
        words = tuple((identity, words[: ATTRIBUTE_WORDS[identity]]) for identity, *words in attributes)
        attributes = tuple((identity, tuple(found)) for identity, found in words)
        self.launches.append(Launched(symbol, grid, block, shared_bytes, attributes, values, stream))
        return 0

    def _failed(self, *_: Any) -> None:
        self._maybe_fail("cuLaunchKernelEx")

    def context_question(self) -> tuple[int, int]:
        return ctypes.cast(self._question, ctypes.c_void_p).value or 0, 0xC0 + self.ordinal

    def _answer_current_context(self, out: int) -> int:
        write(out, ctypes.c_void_p(0xC0 + sys.modules["torch"].device))
        return 0

    def count(self, what: str) -> int:
        return sum(entry[0] == what for entry in self.log)

    def _maybe_fail(self, call: str) -> None:
        if self.failing == call:
            raise DeviceError(f"{call} failed: CUDA_ERROR_LAUNCH_FAILED (719), unspecified launch failure")


class _Recorded:
    def __init__(self, driver: RecordingDriver, symbol: str, shape: Launch) -> None:
        self._driver, self._symbol, self._shape = driver, symbol, shape

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        if self._driver.quiet:
            return
        self._driver._maybe_fail("cuLaunchKernelEx")
        shape, buffer = self._shape, with_pointers(self._shape, pointers)
        parameters = tuple(bytes(buffer[o : o + s]) for o, s in zip(shape.offsets, shape.sizes, strict=True))
        self._driver.launches.append(
            Launched(
                self._symbol,
                shape.grid,
                shape.block,
                shape.shared_bytes,
                shape.attributes,
                parameters,
                stream,
            )
        )


# --- tensors ---


class TorchDType:
    """Compared and printed as a torch.dtype is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


_FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2")
_NAMES = (*_FLOATS, "int8", "int32", "int64", "uint4", "int4")
DTYPES = {name: TorchDType(name) for name in _NAMES}
_addresses = itertools.count(1 << 40, 1 << 30)


class FakeTensor:
    """What the runtime reads of a torch.Tensor, at an address that nobody owns."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str = "bfloat16",
        strides: tuple[int, ...] | None = None,
        pointer: int | None = None,
        device: int = 0,
        device_type: str = "cuda",
    ) -> None:
        self.shape = shape
        self.dtype = DTYPES[dtype]
        self._strides = contiguous_strides(shape) if strides is None else strides
        self.pointer = next(_addresses) if pointer is None else pointer
        self.device = types.SimpleNamespace(type=device_type, index=device)
        self.layout = "torch.strided"
        self.offset = 0
        self.storage_bytes = 1 << 30

    def dim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self.pointer

    def is_neg(self) -> bool:
        return False

    def storage_offset(self) -> int:
        return self.offset

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(nbytes=lambda: self.storage_bytes)

    def get_device(self) -> int:
        return int(self.device.index)

    def new_empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> FakeTensor:
        return FakeTensor(tuple(shape), self.dtype.name, strides, device=self.device.index)

    def copy_(self, other: FakeTensor) -> FakeTensor:
        return self

    def new_empty(self, shape: tuple[int, ...], dtype: TorchDType) -> FakeTensor:
        return FakeTensor(tuple(shape), dtype.name, device=self.device.index)

    def transpose(self, _i: int, _j: int) -> FakeTensor:
        return self

    def t(self) -> FakeTensor:
        rows, columns = self.shape
        return FakeTensor((columns, rows), self.dtype.name, self._strides[::-1], self.pointer, self.device.index)

    def view(self, *shape: Any) -> FakeTensor:
        wanted = list(shape[0] if shape and isinstance(shape[0], tuple) else shape)
        if -1 in wanted:
            place = wanted.index(-1)
            wanted[place] = math.prod(self.shape) // math.prod(wanted[:place] + wanted[place + 1 :])
        assert math.prod(wanted) == math.prod(self.shape)
        return FakeTensor(tuple(wanted), self.dtype.name, pointer=self.pointer, device=self.device.index)


FakeTensor.__module__ = "torch.fake"


class FakeParameter(FakeTensor):
    pass


FakeParameter.__module__ = "torch.fake"


class FakeTorch(types.ModuleType):
    """The few names that the runtime uses of an imported torch."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.stream = 0
        self.device = 0
        self.matmuls = 0
        self.products: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # mm and its like: name, arguments
        self.refuses = ""  # of these, what raises
        self.grad = self.autocasts = False
        self.entered: list[Any] = []
        self._C = types.SimpleNamespace(
            _cuda_getCurrentRawStream=lambda device: self.stream, _cuda_getDevice=lambda: self.device
        )
        self.cuda = types.SimpleNamespace(
            stream=self._enter, ExternalStream=lambda handle, device: ("external", handle)
        )
        self.no_grad = lambda: self._enter("no_grad")
        self.is_grad_enabled, self.is_autocast_enabled = lambda: self.grad, lambda: self.autocasts
        self.autocast = lambda kind, enabled: self._enter(("autocast", kind, enabled))
        for name in ("mm", "bmm", "addmm", "_scaled_mm"):
            setattr(self, name, functools.partial(self._product, name))
        self.Tensor, self.nn = FakeTensor, types.SimpleNamespace(Parameter=FakeParameter)
        for name, dtype in DTYPES.items():
            setattr(self, name, dtype)

    @contextlib.contextmanager
    def _enter(self, stream: Any) -> Iterator[None]:
        self.entered.append(stream)
        yield

    def _product(self, name: str, *arguments: Any, out: Any = None, **more: Any) -> Any:
        if self.refuses == name:
            raise RuntimeError(f"{name} is not for this GPU\nand more")
        self.products.append((name, arguments, more | {"out": out}))
        a, b = arguments[1:3] if name == "addmm" else arguments[:2]
        n = b.shape[-2 if name == "bmm" else -1]  # `transpose` gives the tensor itself
        return FakeTensor((*a.shape[:-1], n), more.get("out_dtype", a.dtype).name) if out is None else out

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        self.matmuls += 1


# --- archives ---


def _gemm_tensors(dtype: str, batched: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The nodes of A, B and D, and the symbols in them."""
    batch = ["l"] if batched else []

    def tensor(which: str, rows: str, columns: str) -> dict[str, Any]:
        batch_stride = [f"batch_stride_{which}"] if batched else []
        return {
            "kind": "tensor",
            "name": which,
            "dtype": dtype,
            "shape": [*batch, rows, columns],
            "strides": [*batch_stride, f"ld{which}", 1],
            "alignment": 16,
        }

    symbols: dict[str, Any] = {"m": {"width": 32, "divisibility": 1}}
    symbols |= {s: {"width": 32, "divisibility": 8} for s in ("n", "k")}
    symbols |= {f"ld{which}": {"width": 64, "divisibility": 8} for which in "abd"}
    if batched:
        symbols["l"] = {"width": 32, "divisibility": 1}
        symbols |= {f"batch_stride_{which}": {"width": 64, "divisibility": 8} for which in "abd"}
    return [tensor("a", "m", "k"), tensor("b", "n", "k"), tensor("d", "m", "n")], symbols


def gemm_record(
    name: str,
    *,
    target: str = "sm_90a",
    tile_m: int = 64,
    dtype: str = "bf16",
    batched: bool = False,
    shared_bytes: int = 98_304,
    max_m: int | None = None,
    workspaces: tuple[tuple[int, str | None, bool], ...] = (),
) -> dict[str, Any]:
    """A made-up GEMM: A through a TMA descriptor, B as a pointer, and D, M, lda and the cluster count in a struct.

    Then a pointer for each of `workspaces`, which are (bytes, each, zeroed).

    It divides by max_m - M + 1 where `max_m` is given, so that its program cannot serve M = max_m + 1.
    """
    values = ["m", "n", "k", "lda", "max_active_clusters"]
    m, lda, clusters = 0, 3, 4
    nodes: list[list[Any]] = []

    def node(*fields: Any) -> int:
        nodes.append(list(fields))
        return len(values) + len(nodes) - 1

    one, threads, cluster = node("const", 32, 1), node("const", 32, 384), node("const", 32, 2)
    shared = node("const", 64, shared_bytes)
    rounded = node("add", 32, m, node("const", 32, tile_m - 1))
    tiles = node("udiv", 32, rounded, node("const", 32, tile_m))
    grid = node("umin", 32, tiles, clusters)
    if max_m is not None:
        left = node("sub", 32, node("const", 32, max_m + 1), m)
        grid = node("umin", 32, grid, node("udiv", 32, node("const", 32, 1 << 20), left))
    tensors, symbols = _gemm_tensors(dtype, batched)
    spaces: list[dict[str, Any]] = [
        {"kind": "workspace", "name": f"space{i}", "bytes": size, "each": each, "zeroed": zeroed}
        for i, (size, each, zeroed) in enumerate(workspaces)
    ]
    return {
        "schema": 1,
        "name": name,
        "target": target,
        "family": "test",
        "arguments": [
            *tensors,
            {"kind": "device", "name": values[clusters], "property": "max_active_clusters", "cluster_size": 2},
            *spaces,
            {"kind": "stream", "name": "stream"},
        ],
        "symbols": symbols,
        "kernels": [{"symbol": f"kernel_{name}", "registers": 168, "shared_bytes": 1024, "local_bytes": 0}],
        "program": {
            "values": [[v, 64 if v == "lda" else 32] for v in values],
            "pointers": ["a", "b", "d", *(space["name"] for space in spaces)],
            "nodes": nodes,
            "launches": [
                {
                    "kernel": 0,
                    "grid": [grid, cluster, one],
                    "block": [threads, one, one],
                    "shared_bytes": shared,
                    "attributes": [[4, [one, cluster, one]]],
                    "parameters": [
                        {"size": 128, "words": [[16, 4, m]], "slots": [[0, "tma", 0, None]]},
                        {"size": 8, "words": [], "slots": [[0, "raw", 1, None]]},
                        {
                            "size": 24,
                            "words": [[8, 4, m], [12, 4, clusters], [16, 8, lda]],
                            "slots": [[0, "raw", 2, None]],
                        },
                        *({"size": 8, "words": [], "slots": [[0, "raw", 3 + i, None]]} for i in range(len(spaces))),
                    ],
                }
            ],
        },
        "cubin": hashlib.sha256(cubin(name)).hexdigest(),
    }


def operands_record(name: str, of: dict[str, Any], target: str = "sm_90a") -> dict[str, Any]:
    """A made-up GEMM with all operands of the signature `of`, as providers describe them, of any extents.

    Its kernel takes a pointer for each operand, in their order, and then M.
    """
    signature = Signature.from_json(of)
    fields = ("accumulator", "epilogue", "scaling", "b_major")
    elements = of["a"], of["b"], of["d"]
    variant = Variant(
        "test",
        "test",
        target,
        (),
        elements,
        batched=signature.batch > 1,
        operation="gemm",
        **{f: of[f] for f in fields},
    )
    return tensors_record(name, *gemm_tensors(variant), target)


def tensors_record(
    name: str, symbols: dict[str, Symbol], tree: list[Argument], target: str = "sm_90a"
) -> dict[str, Any]:
    """A made-up function of tensors, of any extents, that `m` is one of. Its kernel takes a pointer for each tensor, in
    their order, and then M."""
    pointers = [argument.name for argument in tree if isinstance(argument, TensorArgument)]
    parameters = [ParameterSource(8, [], [(0, "raw", i, None)]) for i in range(len(pointers))]
    launch = LaunchSource(0, [1, 1, 1], [1, 1, 1], 2, [], [*parameters, ParameterSource(4, [(0, 4, 0)], [])])
    return RecordSource(
        name,
        target,
        "test",
        hashlib.sha256(cubin(name)).hexdigest(),
        [*tree, StreamArgument("stream")],
        symbols,
        [Kernel(f"kernel_{name}", registers=168, shared_bytes=1024, local_bytes=0)],
        ProgramSource([("m", 32)], pointers, [["const", 32, 1], ["const", 64, 0]], [launch]),
    ).to_json()


def cubin(name: str) -> bytes:
    return b"\x7fELF " + name.encode()


def signature(
    n: int = 6144, k: int = 4096, batch: int = 1, dtype: str = "bf16", d: str = "", **more: str
) -> dict[str, Any]:
    """A signature's JSON; `more` has epilogue, scaling, b_major and overlap."""
    return {
        "a": dtype,
        "b": dtype,
        "d": d or dtype,
        "accumulator": "f32",
        "epilogue": "none",
        "n": n,
        "k": k,
        "batch": batch,
        "scaling": "none",
        "b_major": "k",
        "overlap": "serial",
        **more,
    }


def entry(
    of: dict[str, Any],
    ranges: list[tuple[int | None, str]],
    candidates: list[Any] | None = None,
    target: str = "sm_90a",
    state: str = "tuned",
    *,
    gpu: Gpu | None = None,
    tuned_to: int | None = None,
    invariant: Sequence[tuple[int | None, str]] | None = None,
    torch_faster: Sequence[tuple[int, int | None]] = (),
    apart: Sequence[tuple[int, int | None]] = (),
) -> dict[str, Any]:
    """A row of the gemm table, but for `gpu`, which `table` makes an index of."""
    every = [name for _, name in ranges] + [name for _, names in candidates or [] for name in names]
    places: dict[str, int] = {}
    for name in [*every, *(name for _, name in invariant or [])]:
        places.setdefault(name, len(places))
    return {
        "signature": of,
        "target": target,
        "gpu": gpu,
        "state": state,
        "tuned_to": tuned_to,
        "functions": list(places),
        "ranges": [[m, places[name]] for m, name in ranges],
        "invariant": None if invariant is None else [[m, places[name]] for m, name in invariant],
        "torch_faster": [list(pair) for pair in torch_faster],
        "apart": [list(pair) for pair in apart],
        "candidates": [[m, [places[name] for name in ranked]] for m, ranked in candidates or []],
        "timings": [],
    }


def table(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The gemm table of such rows."""
    places: dict[Gpu, int] = {}
    for row in entries:
        if row.get("gpu") is not None:
            places.setdefault(row["gpu"], len(places))
    rows = [row if row.get("gpu") is None else row | {"gpu": places[row["gpu"]]} for row in entries]
    return {"schema": 1, "gpus": [gpu._asdict() for gpu in places], "entries": rows}


def kernels_of(archive: Archive) -> dict[bytes, dict[str, tuple[int, ...]]]:
    """What a driver finds in an archive's cubins: kernels by symbol, and the sizes of their parameters."""
    return {archive.cubin(name): sizes_of(archive.record(name)) for name in archive.functions}


def sizes_of(record: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The sizes of each kernel's parameters, by its symbol."""
    return {
        record["kernels"][launch["kernel"]]["symbol"]: tuple(p["size"] for p in launch["parameters"])
        for launch in record["program"]["launches"]
    }


def write_archive(
    path: Path, records: list[dict[str, Any]], entries: list[dict[str, Any]], operation: str = "gemm"
) -> dict[bytes, dict[str, tuple[int, ...]]]:
    """Write an archive of `records` with made-up cubins and `entries` of an operation; what a driver would find."""
    package = Package()
    for record in records:
        package.add_function(record, cubin(record["name"]))
    package.set_table(operation, table(entries))
    package.write(path)
    return {
        cubin(r["name"]): {f"kernel_{r['name']}": tuple(p["size"] for p in r["program"]["launches"][0]["parameters"])}
        for r in records
    }
