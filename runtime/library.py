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
from typing import TYPE_CHECKING, Any, NamedTuple

from .archive import Archive, ArchiveClosed
from .call import (
    EXTRAS,
    Call,
    GemmOptions,
    check_memory,
    check_shapes,
    epilogue_of,
    matrices,
    result_shape,
    same_elements,
    signature_of,
)
from .dispatch import Dispatch, Entry, gemm_mismatch, serves
from .driver import LAST_DEFAULT_STREAM, Driver
from .dtypes import DTYPES
from .errors import ArgumentError, DeviceError, KernelMiss, LayoutError, ProgramError, RecordError
from .fallback import allocate, on_stream, result_dtype, torch_gemm
from .function import Function, Unfit, device_view, remember, resolve_stream
from .native import native_table
from .record import TensorArgument, TensorView
from .signature import Signature
from .tensor import (
    LAST_STREAM,
    dtype_name,
    is_torch,
    span_bytes,
    stream_handle,
    torch_current_device,
    torch_current_stream,
)
from .workspace import Workspaces

if TYPE_CHECKING:
    from typing import Unpack

ON_MISS = ("error", "torch")
REQUIRE = (None, "tuned")
_log = logging.getLogger(__name__)


class _GemmPlan(NamedTuple):
    """A plan with what the fast path of `gemm` needs to prove that it fits the call at hand."""

    launch: Callable[[tuple[int, ...], int], None]
    device: int
    misaligned: int  # address bits that must be clear in the pointers of A, B and D
    a_bytes: int
    b_bytes: int
    d_bytes: int
    current_stream: Callable[[int], int] | None  # torch's, where the tensors are torch's
    current_device: Callable[[], int] | None  # torch's, where a default stream may belong to another device
    shape: tuple[int, ...]  # of `out`, as is the element type
    dtype: Any
    function: Function
    extras: tuple[tuple[int, int, bool], ...]  # of each operand after D: such bits, bytes, whether it may be D itself
    launches: tuple[Any, ...]  # what `launch` does, if that depends on nothing but pointers; else none


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
        self._workspaces = Workspaces(driver)
        self._plans: dict[Any, _GemmPlan] = {}
        self._table: Any = None  # `native_table`, once torch's tensors were seen; False if there is none
        self._call: Any = None  # its method, once it has a plan
        self._tags: dict[Any, int] = {}  # what it knows words by
        self._dispatch: Dispatch | None = None
        self._matched: set[tuple[Signature, str]] = set()  # functions held against the entries that name them
        self._warned = False
        self._closed = False
        self.misses: dict[str, int] = {}
        self.functions: Mapping[str, Function] = _Functions(
            archive,
            {n: Function(archive, driver, self._lock, e, self._workspaces) for n, e in archive.functions.items()},
        )

    @property
    def digest(self) -> str:
        """The SHA-256 that names the archive."""
        return self._archive.digest

    @property
    def device(self) -> str:
        """The device it is for, as torch writes it: "cuda:0". Finds out which one is current where none was named."""
        return f"cuda:{self._driver.device}"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def identity(self) -> str:
        """A word for archive, device and options, the same in every process, by which compiled graphs may be kept."""
        return f"{self.digest} {self.device} {self._on_miss} {self._require}"

    def entry(self, signature: Signature) -> Entry:
        """What the gemm table has for `signature` on this GPU; nothing is loaded.

        Raises:
            KernelMiss: nothing, or nothing that `require` accepts; the message names the nearest entries.
            ArchiveClosed: the library was closed.
            DeviceError: the archive has nothing for this GPU.
        """
        self._check_open()
        entry = self._gemm_table().lookup(signature, self._driver.compute_capability)
        if self._require is not None:
            self._accept(entry)
        return entry

    def _check_open(self) -> None:
        if self._closed:
            raise ArchiveClosed(f"{self._archive.path}: this library was closed; load the archive again")

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the kernels, free their workspaces and close the archive.

        No kernel may be running or in a CUDA graph that is still used.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._plans.clear()
            if self._table:
                self._table.clear()
            try:
                for function in self.functions.values():
                    function.unload()
                self._workspaces.close()
            finally:
                self._archive.close()

    def forget_captures(self) -> None:
        """Free the workspaces that CUDA graphs were captured with, of which each capture has its own.

        Those graphs may not be replayed again, and no capture may be under way. Only kernels that share tiles through
        memory (`stream_k`) have any.
        """
        self._workspaces.forget_captures()

    def preload(self) -> tuple[str, ...]:
        """Load every kernel that the gemm table uses on this device, and return their functions' names.

        Entries that `require` refuses are left out.
        After this a first call of a shape does no more than arithmetic before it launches, under stream capture too;
        but a kernel that needs a workspace still allocates that at its first launch on a stream, or in a capture.
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

    def gemm(
        self,
        a: Any,
        b: Any,
        *,
        out: Any = None,
        stream: Any = None,
        **more: Unpack[GemmOptions],
    ) -> Any:
        """D = epilogue(scale(A @ B^T)), for b (N, K) as `torch.nn.Linear` stores its weight, and a (..., K).

        Gives D (..., N). With b (L, N, K) and a (L, M, K) it is batched. b may also be N-major, that is, the transpose
        of a row-major (K, N). Tensors are torch's or any with DLPack or `__cuda_array_interface__`. `out` is written
        and returned; without it a torch `a` gives a new torch tensor of `dtype`, by default a's element type (bf16 for
        8-bit floats). `stream` is a handle or a stream object; None is torch's current stream, or the legacy default
        stream where no torch tensor is involved. No gradient is recorded. That a view at an offset lost its storage is
        noticed in the first call of a shape only: keep what you pass. By keyword also:

        - scale_a, scale_b: f32 factors of the products: one element each; or (...) or (..., 1) and (N), (1, N) or
          (N, 1); or (..., ceil(K/128)) and (ceil(N/128), ceil(K/128)), for blocks of 1 x 128 and 128 x 128;
        - bias (N), added to every row; then `epilogue`, "none" or an activation of `runtime.signature`, of which the
          gated ones ("swiglu", "swiglu_interleaved" ...) halve the columns: D is (..., N/2);
        - residual, of D's shape, added next; it may be `out` itself. bias and residual have D's element type, or bf16
          where that has 8 bits;
        - scale_d, one f32 element, multiplied in before D is converted; conversion to 8 bits saturates;
        - overlap, what the caller promises about the kernels before this one (`runtime.signature.Signature`).

        Raises:
            KernelMiss: the archive has no kernel for this; the message names the nearest entries.
            LayoutError: an ArgumentError: a tensor is misaligned, or has strides that kernels do not take.
            ArgumentError: a tensor is malformed, on another device, without memory, or shares memory with `out`.
            DeviceError: the driver refused, or the archive has nothing for this GPU.
        """
        if more:
            return self._gemm_more(a, b, out, stream, **more)
        if self._call is not None:
            result = self._call(0, stream, a, b, out)
            if result is not None:
                return result
        # Each attribute of a torch tensor costs 40-90 ns and this is all of them: the key says everything about a call
        # but its pointers, and those are checked below by integer arithmetic.
        key: tuple[Any, ...]
        try:
            if out is None:
                key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, a.get_device(), b.get_device())
            else:
                # fmt: off
                key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, out.shape, out.stride(), out.dtype,
                       a.get_device(), b.get_device(), out.get_device())
                # fmt: on
            found = self._plans.get(key)
        except (AttributeError, TypeError):  # not torch's
            found = None
        if found is None:
            return self._gemm(Call(a, b, out, stream))
        launch, device, misaligned, a_bytes, b_bytes, d_bytes, current_stream, current_device, shape, dtype, *_ = found
        result = out
        if stream is None:
            handle = current_stream(device)  # type: ignore[misc]
            if out is None:
                result = a.new_empty(shape, dtype=dtype)
        elif out is None:
            return self._gemm(Call(a, b, out, stream))
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
            return self._gemm(Call(a, b, result, stream))
        launch((pa, pb, pd), handle)
        return result

    def _gemm_more(
        self,
        a: Any,
        b: Any,
        out: Any,
        stream: Any,
        *,
        bias: Any = None,
        residual: Any = None,
        scale_a: Any = None,
        scale_b: Any = None,
        scale_d: Any = None,
        epilogue: str = "none",
        overlap: str = "serial",
        dtype: Any = None,
    ) -> Any:
        """`gemm` with more than a and b; once a shape is planned, the same work for a few more tensors."""
        operands = (scale_a, scale_b, bias, residual, scale_d)
        call = Call(a, b, out, stream, operands, epilogue, overlap, dtype, False)
        if self._call is not None:
            try:
                tag = self._tags.get((epilogue, overlap, dtype))
            except TypeError:  # not hashable, so no plan has it
                tag = None
            result = None if tag is None else self._call(tag, stream, a, b, out, *operands)
            if result is not None:
                return result
        try:
            found = self._plans.get(call.key())
        except (AttributeError, TypeError):  # not torch's
            found = None
        if found is None or (out is None and stream is not None):
            return self._gemm(call)
        result = out
        if stream is None:
            handle = found.current_stream(found.device)  # type: ignore[misc]
            if out is None:
                result = a.new_empty(found.shape, dtype=found.dtype)
        else:
            handle = stream if type(stream) is int and 0 <= stream <= LAST_STREAM else stream_handle(stream)
        pa, pb, pd = a.data_ptr(), b.data_ptr(), result.data_ptr()
        end = pd + found.d_bytes
        bad = (
            (pa | pb | pd) & found.misaligned
            or not (pa and pb and pd)
            or (pd < pa + found.a_bytes and pa < end)
            or (pd < pb + found.b_bytes and pb < end)
        )
        if found.current_device is not None and handle <= LAST_DEFAULT_STREAM:
            bad = bad or found.current_device() != found.device
        pointers = [pa, pb, pd]
        given = [x for x in operands if x is not None]
        for (misaligned, size, may_be_d), operand in zip(found.extras, given, strict=True):
            pointer = operand.data_ptr()
            pointers.append(pointer)
            overlaps = pd < pointer + size and pointer < end and not (may_be_d and pointer == pd)
            bad = bad or overlaps or not pointer or pointer & misaligned
        if bad:
            return self._gemm(call._replace(out=result))
        found.launch(tuple(pointers), handle)
        return result

    def _gemm(self, call: Call) -> Any:
        """The first call of a shape, calls from other frameworks, and calls that the fast paths cannot vouch for."""
        self._check_open()
        driver = self._driver
        a, b, out, stream = call.a, call.b, call.out, call.stream
        given = {"a": a, "b": b} | {n: x for n, x in zip(EXTRAS, call.operands, strict=True) if x is not None}
        handle = resolve_stream(stream, tuple(given.values()), driver)
        seen = {name: device_view(x, name, handle, driver) for name, x in given.items()}
        check_shapes(seen["a"], seen["b"])
        epilogue = epilogue_of(call.epilogue, seen)
        shape = result_shape(seen["a"], seen["b"], epilogue)
        wanted = None if call.dtype is None else dtype_name(call.dtype)
        allocated = out is None
        if allocated:
            out = allocate(a, shape, wanted or result_dtype(seen["a"].dtype), None if stream is None else handle)
        dv = device_view(out, "out", handle, driver, writable=True)
        if dv.shape != shape:
            raise ArgumentError(
                f"out must have shape {shape} for a {seen['a'].shape} and b {seen['b'].shape}, found {dv.shape}"
            )
        if wanted not in (None, dv.dtype):
            raise ArgumentError(f"out has element type {dv.dtype}, dtype says {wanted}; pass one of them")
        seen = {"a": seen.pop("a"), "b": seen.pop("b"), "d": dv} | seen
        signature = signature_of(seen, epilogue, call.overlap)
        if 0 in shape:
            return out
        torch_calls = all(is_torch(x) for x in (*given.values(), out))
        unfit = None
        try:
            views = matrices(signature, seen)
        except LayoutError as error:
            views, unfit = tuple(seen.values()), error
        check_memory(dict(zip(seen, views, strict=True)))
        key = (torch_calls, signature.epilogue, signature.overlap, *(v[1:] for v in seen.values()))
        with driver.current():
            try:
                if unfit is not None:
                    raise unfit
                found = self._plans.get(key)
                if found is None:
                    with self._lock:
                        found = self._plan_gemm(signature, views, shape, out.dtype if torch_calls else None)
                        remember(self._plans, key, found)
                masks = (*[found.misaligned] * 3, *(mask for mask, _, _ in found.extras))
                if any(v.pointer & mask for v, mask in zip(views, masks, strict=True)):
                    found.function.check(views)
            except (KernelMiss, LayoutError) as reason:
                if self._on_miss != "torch" or not torch_calls:
                    raise
                return self._fall_back(reason, signature, given, out, None if stream is None else handle)
            if torch_calls:
                fast_key = call._replace(out=None if allocated and stream is None else out).key()
                if fast_key not in self._plans:
                    with self._lock:
                        self._put(call, found, allocated)
                        remember(self._plans, fast_key, found)
            found.launch(tuple(v.pointer for v in views), handle)
        return out

    def _put(self, call: Call, found: _GemmPlan, allocated: bool) -> None:
        """Give the native table what it needs to serve calls like this one, of torch tensors, from now on.

        It leaves to Python what it cannot serve. The caller holds the lock.
        """
        if self._table is None:
            self._table = native_table(self._driver)
        if not self._table or (allocated and call.stream is not None):
            return
        tag = 0 if call.plain else self._tags.setdefault((call.epilogue, call.overlap, call.dtype), len(self._tags) + 1)
        misaligned = (*[found.misaligned] * 3, *(mask for mask, _, _ in found.extras))
        sizes = (found.a_bytes, found.b_bytes, found.d_bytes, *(size for _, size, _ in found.extras))
        may_be_d = (False, False, False, *(may for _, _, may in found.extras))
        tensors = (call.a, call.b, None if allocated else call.out, *(() if call.plain else call.operands))
        shape, options = (found.shape, {"dtype": found.dtype}) if allocated else (None, None)
        self._table.put(tag, tensors, found.launches, misaligned, sizes, may_be_d, found.device, shape, options)
        self._call = self._table.call

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
        d = views[2]
        for name in entry.functions(m):
            function = self._function(entry, name)
            function.load()
            try:
                plan = function.plan(views)
            except (Unfit, ProgramError) as error:
                reasons.append(f"  {name}: {error}")
                continue
            masks = [a.alignment - 1 for a in function.record.arguments if isinstance(a, TensorArgument)]
            names = [operand.name for operand in signature.operands()]
            return _GemmPlan(
                launch=plan.launch,
                launches=() if function.record.workspace_arguments() else plan.launches,
                function=function,
                device=driver.device,
                misaligned=max(masks[:3]),
                a_bytes=span_bytes(views[0]),
                b_bytes=span_bytes(views[1]),
                d_bytes=span_bytes(views[2]),
                shape=shape,
                dtype=torch_dtype,
                current_stream=torch_current_stream() if torch_dtype else None,
                current_device=torch_current_device() if torch_dtype and driver.device_count > 1 else None,
                extras=tuple(
                    (mask, span_bytes(view), name == "residual" and same_elements(view, d))
                    for name, mask, view in list(zip(names, masks, views, strict=True))[3:]
                ),
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
        self,
        miss: KernelMiss | LayoutError,
        signature: Signature,
        given: Mapping[str, Any],
        out: Any,
        stream: int | None,
    ) -> Any:
        if (
            DTYPES[signature.a].bits < 16
            or not signature.a == signature.b == signature.d
            or signature.scaling != "none"
        ):
            raise miss
        key = signature.key() if isinstance(miss, KernelMiss) else f"{signature.key()}, {miss.reason}"
        with self._lock:
            count = self.misses[key] = self.misses.get(key, 0) + 1
        if count == 1:
            _log.warning("torch computes this from now on: %s", miss)
        torch = sys.modules["torch"]
        with torch.no_grad(), on_stream(stream, given["a"]):
            torch_gemm(torch, signature.parts, given, out)
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
