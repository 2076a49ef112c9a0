"""An opened archive on one device: look a GEMM up, plan it for its shape once, and from then on only launch.

The steady state of `Library.gemm` is one dictionary lookup, the pointers written into a prepared launch, and
cuLaunchKernelEx. Everything else happens at the first call of a shape, or in `Library.preload`: nothing is ever
compiled here. Knows nothing of how kernels were made, ranked or tuned.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .archive import Archive, ArchiveClosed
from .dispatch import Dispatch, Entry, gemm_mismatch, serves
from .driver import LAST_DEFAULT_STREAM, Driver
from .dtypes import DTYPES
from .errors import ArgumentError, DeviceError, KernelMiss, LayoutError, ProgramError, RecordError
from .function import Function, Unfit, device_view, remember, resolve_stream
from .record import TensorArgument, TensorView, check_address
from .signature import Signature
from .tensor import (
    LAST_STREAM,
    TORCH_NAMES,
    flatten_rows,
    is_torch,
    overlaps_itself,
    share_memory,
    span_bytes,
    stream_handle,
    torch_current_device,
    torch_current_stream,
)

ON_MISS = ("error", "torch")
REQUIRE = (None, "tuned")
_log = logging.getLogger(__name__)


class _GemmPlan(NamedTuple):
    """A plan with what the fast path of `gemm` needs to prove that it fits the call at hand."""

    launch: Callable[[tuple[int, ...], int], None]
    device: int
    misaligned: int  # address bits that must be clear in every pointer
    a_bytes: int
    b_bytes: int
    d_bytes: int
    current_stream: Callable[[int], int] | None  # torch's, where the tensors are torch's
    current_device: Callable[[], int] | None  # torch's, where a default stream may belong to another device
    shape: tuple[int, ...]  # of `out`, as is the element type
    dtype: Any
    function: Function


class _Functions(dict[str, Function]):
    """Functions by name; an unknown name is an `UnknownEntry`, which says what to run."""

    def __init__(self, archive: Archive, functions: dict[str, Function]) -> None:
        super().__init__(functions)
        self._archive = archive

    def __missing__(self, name: str) -> Function:
        self._archive.entry(name)
        raise KeyError(name)


class Library:
    """An open archive on one device. All methods may be called from any thread.

    `functions` has every function of the archive by name. `misses` counts the calls that fell back, by the key of their
    signature, with what was wrong (", strides of a") where that was how a tensor lies in memory.
    """

    def __init__(self, archive: Archive, driver: Driver, on_miss: str = "error", *, require: str | None = None) -> None:
        _check_options(on_miss, require)
        self._archive, self._driver, self._on_miss, self._require = archive, driver, on_miss, require
        self._lock = threading.RLock()
        self._plans: dict[Any, _GemmPlan] = {}
        self._dispatch: Dispatch | None = None
        self._matched: set[tuple[Signature, str]] = set()  # functions held against the entries that name them
        self._warned = False
        self._closed = False
        self.misses: dict[str, int] = {}
        self.functions: Mapping[str, Function] = _Functions(
            archive, {n: Function(archive, driver, self._lock, e) for n, e in archive.functions.items()}
        )

    @property
    def digest(self) -> str:
        """The SHA-256 that names the archive."""
        return self._archive.digest

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the kernels and close the archive; no kernel may be running or in a CUDA graph that is still used."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._plans.clear()
            for function in self.functions.values():
                function.unload()
            self._archive.close()

    def preload(self) -> tuple[str, ...]:
        """Load every kernel that the gemm table uses on this device, and return their functions' names.

        Entries that `require` refuses are left out.
        After this a first call of a shape does no more than arithmetic before it launches, under stream capture too.
        """
        entries = self._gemm_table().entries_for(self._driver.compute_capability)
        entries = tuple(e for e in entries if self._require in (None, e.state))
        loaded = {}
        for entry in entries:
            self._accept(entry)
            for _, name in entry.ranges:
                loaded[name] = self._function(entry, name)
        for function in loaded.values():
            function.load()
        return tuple(loaded)

    def gemm(self, a: Any, b: Any, *, out: Any = None, stream: Any = None) -> Any:
        """D = A @ B^T, for b (N, K) as `torch.nn.Linear` stores its weight, and a (..., K); gives D (..., N).

        With b (L, N, K) and a (L, M, K) it is batched. Tensors are torch's or any with DLPack or
        `__cuda_array_interface__`. `out` is written and returned; without it a torch `a` gives a new torch tensor, of
        a's element type (bf16 for 8-bit floats). `stream` is a handle or a stream object; None is torch's current
        stream, or the legacy default stream where no torch tensor is involved. No gradient is recorded.

        Raises:
            KernelMiss: the archive has no kernel for this; the message names the nearest entries.
            LayoutError: an ArgumentError: a tensor is misaligned, or has strides that kernels do not take.
            ArgumentError: a tensor is malformed, on another device, without memory, or shares memory with `out`.
            DeviceError: the driver refused, or the archive has nothing for this GPU.
        """
        # Each attribute of a torch tensor costs 40-90 ns and this is all of them: the key says everything about a call
        # but its pointers, and those are checked below by integer arithmetic.
        key: tuple[Any, ...]
        try:
            if out is None:
                key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, a.get_device(), b.get_device())
            else:
                key = (
                    a.shape,
                    a.stride(),
                    a.dtype,
                    b.shape,
                    b.stride(),
                    b.dtype,
                    out.shape,
                    out.stride(),
                    out.dtype,
                    a.get_device(),
                    b.get_device(),
                    out.get_device(),
                )
            found = self._plans.get(key)
        except (AttributeError, TypeError):  # not torch's
            found = None
        if found is None:
            return self._gemm(a, b, out, stream)
        launch, device, misaligned, a_bytes, b_bytes, d_bytes, current_stream, current_device, shape, dtype, _ = found
        result = out
        if stream is None:
            handle = current_stream(device)  # type: ignore[misc]
            if out is None:
                result = a.new_empty(shape, dtype=dtype)
        elif out is None:
            return self._gemm(a, b, out, stream)
        else:
            handle = stream if type(stream) is int and 0 <= stream <= LAST_STREAM else stream_handle(stream)
        pa, pb, pd = a.data_ptr(), b.data_ptr(), result.data_ptr()
        if (
            (pa | pb | pd) & misaligned
            or not (pa and pb and pd)
            or (pd < pa + a_bytes and pa < pd + d_bytes)
            or (pd < pb + b_bytes and pb < pd + d_bytes)
            or (current_device is not None and handle <= LAST_DEFAULT_STREAM and current_device() != device)
        ):
            return self._gemm(a, b, result, stream)
        launch((pa, pb, pd), handle)
        return result

    def _gemm(self, a: Any, b: Any, out: Any, stream: Any) -> Any:
        """The first call of a shape, calls from other frameworks, and calls that the fast path cannot vouch for."""
        if self._closed:
            raise ArchiveClosed(f"{self._archive.path}: this library was closed; load the archive again")
        driver = self._driver
        handle = resolve_stream(stream, (a, b), driver)
        av, bv = device_view(a, "a", handle, driver), device_view(b, "b", handle, driver)
        _check_shapes(av, bv)
        allocated = out is None
        shape = (*av.shape[:-1], bv.shape[-2])
        if allocated:
            out = _allocate(a, shape, _result_dtype(av.dtype), None if stream is None else handle)
        dv = device_view(out, "out", handle, driver, writable=True)
        if dv.shape != shape:
            raise ArgumentError(f"out must have shape {shape} for a {av.shape} and b {bv.shape}, found {dv.shape}")
        if 0 in shape:
            return out
        torch_calls = is_torch(a) and is_torch(b) and is_torch(out)
        batch = bv.shape[0] if len(bv.shape) == 3 else 1
        signature = Signature(av.dtype, bv.dtype, dv.dtype, "f32", "none", bv.shape[-2], bv.shape[-1], batch)
        try:
            views, unfit = _matrices(av, bv, dv), None
        except LayoutError as error:
            views, unfit = (av, bv, dv), error
        _check_memory(*views)
        key = (torch_calls, av[1:], bv[1:], dv[1:])
        with driver.current():
            try:
                if unfit is not None:
                    raise unfit
                found = self._plans.get(key)
                if found is None:
                    with self._lock:
                        found = self._plan_gemm(signature, views, shape, out.dtype if torch_calls else None)
                        remember(self._plans, key, found)
                pointers = (views[0].pointer, views[1].pointer, views[2].pointer)
                if (pointers[0] | pointers[1] | pointers[2]) & found.misaligned:
                    found.function.check(views)
            except (KernelMiss, LayoutError) as reason:
                if self._on_miss != "torch" or not torch_calls:
                    raise
                return self._fall_back(reason, signature, a, b, out, None if stream is None else handle)
            if torch_calls:
                fast_key = _torch_key(a, b, None if allocated and stream is None else out)
                if fast_key not in self._plans:
                    with self._lock:
                        remember(self._plans, fast_key, found)
            found.launch(pointers, handle)
        return out

    def _plan_gemm(
        self, signature: Signature, views: tuple[TensorView, ...], shape: tuple[int, ...], torch_dtype: Any
    ) -> _GemmPlan:
        """Choose the function for this shape, load it and plan it; runners-up serve where the best cannot run.

        `shape` is that of the caller's output, `torch_dtype` its element type where all tensors are torch's.
        """
        driver = self._driver
        m = views[0].shape[-2]
        entry = self._gemm_table().lookup(signature, driver.compute_capability)
        self._accept(entry)
        reasons = []
        for name in entry.functions(m):
            function = self._function(entry, name)
            function.load()
            try:
                plan = function.plan(views)
            except (Unfit, ProgramError) as error:
                reasons.append(f"  {name}: {error}")
                continue
            return _GemmPlan(
                launch=plan.launch,
                function=function,
                device=driver.device,
                misaligned=max(a.alignment for a in function.record.arguments if isinstance(a, TensorArgument)) - 1,
                a_bytes=span_bytes(views[0]),
                b_bytes=span_bytes(views[1]),
                d_bytes=span_bytes(views[2]),
                shape=shape,
                dtype=torch_dtype,
                current_stream=torch_current_stream() if torch_dtype else None,
                current_device=torch_current_device() if torch_dtype and driver.device_count > 1 else None,
            )
        raise KernelMiss("\n".join([f"no kernel for {signature.key()} at M = {m} can run on this GPU:", *reasons]))

    def _accept(self, entry: Entry) -> None:
        """Refuse an entry that was never tuned, or warn of the first."""
        if entry.state == "tuned":
            return
        what = (
            f"{self._archive.path}: {entry.signature.key()} on {entry.target} is {entry.state}: its kernels were "
            "chosen by estimate and were never run or checked on a GPU; run: aot tune"
        )
        if self._require is not None:
            raise KernelMiss(f"{what} (this library was loaded with require={self._require!r})")
        with self._lock:
            if not self._warned:
                self._warned = True
                _log.warning("%s (said once for this archive)", what)

    def _function(self, entry: Entry, name: str) -> Function:
        """The function `name`, which `entry` names, if its record can be what the entry says."""
        function = self.functions[name]
        if (entry.signature, name) not in self._matched:
            mismatch = gemm_mismatch(entry.signature, function.record)
            if mismatch is not None:
                raise RecordError(
                    f"{self._archive.path}: the gemm table has {name} for {entry.signature.key()}, but it {mismatch}; "
                    "build the archive again"
                )
            self._matched.add((entry.signature, name))
        return function

    def _gemm_table(self) -> Dispatch:
        if self._dispatch is None:
            capability = self._driver.compute_capability
            if not any(serves(target, capability) for target in self._archive.targets):
                raise DeviceError(
                    f"{self._archive.path} has kernels for {', '.join(self._archive.targets) or 'no target'}; this GPU "
                    f"has compute capability {capability[0]}.{capability[1]}; build the archive for it too"
                )
            targets = {name: entry.target for name, entry in self._archive.functions.items()}
            self._dispatch = Dispatch.from_json(self._archive.table("gemm"), targets)
        return self._dispatch

    def _fall_back(
        self, miss: KernelMiss | LayoutError, signature: Signature, a: Any, b: Any, out: Any, stream: int | None
    ) -> Any:
        if DTYPES[signature.a].bits < 16 or not signature.a == signature.b == signature.d:
            raise miss
        key = signature.key() if isinstance(miss, KernelMiss) else f"{signature.key()}, {miss.reason}"
        with self._lock:
            count = self.misses[key] = self.misses.get(key, 0) + 1
        if count == 1:
            _log.warning("torch computes this from now on: %s", miss)
        torch = sys.modules["torch"]
        with torch.no_grad(), _torch_stream(stream, a):
            torch.matmul(a, b.transpose(-1, -2), out=out)
        return out


def load(
    path: str | os.PathLike[str], device: int | None = None, on_miss: str = "error", *, require: str | None = None
) -> Library:
    """Open the archive at `path` for one device; nothing but the archive is touched before the first use.

    `device` is an ordinal; None is the device that is current at the first use. `on_miss` says what happens when the
    archive cannot serve a GEMM of torch tensors, because it has no kernel or because of how a tensor lies in memory
    (alignment, strides): "error" raises `KernelMiss` or `LayoutError`, "torch" lets torch compute it, counted in
    `Library.misses` and logged once for each signature. Calls that are wrong (shapes that do not fit, another device,
    shared or missing memory) raise `ArgumentError` in any case, and 8-bit floats, which torch.matmul
    does not take, never fall back.

    `require="tuned"` treats entries of the archive that were never tuned on a GPU as missing; by default the first that
    is used is logged as a warning.

    A library may be opened before a fork and used after it by every child, but its first use (any call that needs the
    device) must come after the fork, as with CUDA itself.

    Raises:
        ArchiveError: the file is not an archive that can be trusted.
    """
    _check_options(on_miss, require)
    return Library(Archive.open(path), Driver(device), on_miss, require=require)


def _check_options(on_miss: str, require: str | None) -> None:
    if on_miss not in ON_MISS:
        raise ArgumentError(f"on_miss must be one of {ON_MISS}, found {on_miss!r}")
    if require not in REQUIRE:
        raise ArgumentError(f"require must be one of {REQUIRE}, found {require!r}")


def _torch_key(a: Any, b: Any, out: Any) -> tuple[Any, ...]:
    """What `Library.gemm` looks up: everything a plan depends on but the pointers."""
    inputs = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype)
    devices = (a.get_device(), b.get_device())
    if out is None:
        return (*inputs, *devices)
    return (*inputs, out.shape, out.stride(), out.dtype, *devices, out.get_device())


def _check_shapes(a: TensorView, b: TensorView) -> None:
    """Whether a @ b.T is meant by these shapes: b is 2-D, or both are 3-D with one batch extent."""
    batched = len(b.shape) == 3
    if batched and (len(a.shape) != 3 or a.shape[0] != b.shape[0]):
        raise ArgumentError(f"b of shape {b.shape} needs a of shape ({b.shape[0]}, M, {b.shape[2]}), found {a.shape}")
    if not batched and (len(b.shape) != 2 or not a.shape):
        raise ArgumentError(f"gemm takes a (..., K) and b (N, K), or both batched; found {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[-1] or a.shape[-1] == 0:
        raise ArgumentError(
            f"a {a.shape} and b {b.shape} must end in the same K, not 0: gemm computes a @ b.T, with b stored (N, K)"
        )


def _matrices(a: TensorView, b: TensorView, d: TensorView) -> tuple[TensorView, TensorView, TensorView]:
    """A, B and D as a kernel takes them, row-major: 2-D, or all 3-D with a batch extent above 1.

    Raises:
        LayoutError: a tensor cannot be seen so without a copy.
    """
    for name, t in (("a", a), ("b", b), ("out", d)):
        if t.strides[-1] != 1 < t.shape[-1]:
            raise LayoutError(
                f"{name} must be row-major, found strides {t.strides}; make it contiguous", f"strides of {name}"
            )
    if len(b.shape) == 3 and b.shape[0] != 1:
        return a, b, d
    return flatten_rows(a, "a"), flatten_rows(b, "b"), flatten_rows(d, "out")


def _check_memory(a: TensorView, b: TensorView, d: TensorView) -> None:
    for name, t in (("a", a), ("b", b), ("out", d)):
        check_address(name, t)
    if overlaps_itself(d):
        raise ArgumentError(f"out of shape {d.shape} and strides {d.strides} names elements twice; pass a dense tensor")
    for name, t in (("a", a), ("b", b)):
        if share_memory(t, d):
            raise ArgumentError(f"out shares memory with {name}; write to another tensor")


def _result_dtype(dtype: str) -> str:
    return "bf16" if dtype in ("e4m3", "e5m2") else dtype


def _allocate(a: Any, shape: tuple[int, ...], dtype: str, stream: int | None) -> Any:
    """A torch tensor, from the memory pool of `stream` if that is given, so that it is not reused too early."""
    if not is_torch(a):
        raise ArgumentError(f"out is needed: there is no allocating for a {type(a).__name__}")
    torch = sys.modules["torch"]
    with _torch_stream(stream, a):
        return a.new_empty(shape, dtype=getattr(torch, TORCH_NAMES[dtype]))


def _torch_stream(stream: int | None, a: Any) -> Any:
    """A context in which `stream` is torch's current stream; None changes nothing."""
    torch = sys.modules["torch"]
    return torch.cuda.stream(None if stream is None else torch.cuda.ExternalStream(stream, device=a.device))
