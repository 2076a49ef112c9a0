"""An opened archive on one device: look a GEMM up, plan it for its shape once, and from then on only launch.

The steady state of `Library.gemm` is one dictionary lookup, the pointers written into a prepared launch, and
cuLaunchKernelEx. Everything else happens at the first call of a shape, or in `Library.preload`: nothing is ever
compiled here. Knows nothing of how kernels were made, ranked or tuned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..container.archive import Archive, ArchiveClosed
from ..device.driver import LAST_DEFAULT_STREAM, Driver
from ..device.ordinal import Device, ordinal_of
from ..device.workspace import Workspaces
from ..dtypes import DTYPES
from ..errors import ArgumentError, DeviceError, KernelMiss, LayoutError
from ..gemm.call import (
    EXTRAS,
    Call,
    GemmOptions,
    check_memory,
    check_shapes,
    epilogue_of,
    matrices,
    refuse_unknown,
    result_shape,
    signature_of,
)
from ..gemm.fallback import TorchCall, allocate, lie_for_torch, on_stream, result_dtype, torch_gemm, torch_runs
from ..gemm.signature import Signature
from ..gemm.universal import AnyEntry
from ..native import loaded as native_loaded
from ..native import native_table
from ..program.record import TensorView
from ..program.tensor import LAST_STREAM, dtype_name, is_torch, stream_handle
from .contents import Contents, GemmPlan, Preloaded, gemm_key, open_archives
from .counters import Counters
from .function import Function, device_view, remember, resolve_stream
from .rows import Known, Rows, rows_of, steps_of
from .stats import ArchiveInfo, Refusal, Stats, prometheus_text

if TYPE_CHECKING:
    from typing import Unpack

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
ON_MISS = ("error", "torch")
REQUIRE = (None, "tuned")
ON_SLOWER = ("never", "torch")
MISS_REASONS = ("no entry", "not tuned", "not batch-invariant", "no kernel runs")  # those of a `KernelMiss`
_log = logging.getLogger(__name__)


# Every library by its `id`: torch.compile can carry that through a trace, but no object.
alive: weakref.WeakValueDictionary[int, Library] = weakref.WeakValueDictionary()


class Library:
    """Open archives on one device, the base first. All methods may be called from any thread.

    A gemm that several archives have is served by the last, whose functions are taken from the same file. `stats` and
    `prometheus` say what was done so far; `misses` counts the calls that fell back, by the key of their signature, with
    what was wrong (", strides of a") where that was how a tensor lies in memory.
    """

    def __init__(
        self,
        archives: Archive | Sequence[Archive],
        driver: Driver,
        on_miss: str = "error",
        *,
        require: str | None = None,
        on_slower: str = "never",
        batch_invariant: bool = False,
    ) -> None:
        _check_options(on_miss, require, on_slower, batch_invariant)
        self._driver, self._on_miss, self._require = driver, on_miss, require
        self._on_slower, self._batch_invariant = on_slower, batch_invariant
        self._lock = threading.RLock()  # held for moments: while a shape is planned, a kernel loaded, contents swapped
        self._changing = threading.Lock()  # held by what works for longer: preload, reload, drop_old, close
        self._workspaces = Workspaces(driver)
        self._counters = Counters()
        self._tags: dict[Any, int] = {}  # what native tables know words by; kept over reloads, so that none changes
        self._call: Any = None  # of the native table in service, once it has a plan
        self._now = self._contents([archives] if isinstance(archives, Archive) else archives)
        self._plans, self._given = self._now.plans, self._now.given
        self._paths: tuple[str | os.PathLike[str], ...] = tuple(archive.path for archive in self._now.archives)
        self._replaced: list[Contents] = []
        self._closed = False
        alive[id(self)] = self

    def _contents(self, archives: Sequence[Archive]) -> Contents:
        return Contents(
            archives,
            self._driver,
            self._workspaces,
            self._counters,
            self._lock,
            self._require,
            self._batch_invariant,
        )

    @property
    def digest(self) -> str:
        """The SHA-256 that names the archive; of several, one that covers them all and their order."""
        return self._now.digest

    @property
    def functions(self) -> Mapping[str, Function]:
        """Every function by name, those of the last archive first, which also takes the place of others of its name."""
        return self._now.functions

    @property
    def misses(self) -> dict[str, int]:
        """How many calls fell back to torch, by the key of their signature and what was wrong with a layout."""
        found: dict[str, int] = {}
        for (signature, reason), refusals in list(self._counters.refusals.items()):
            key = signature if reason in MISS_REASONS else f"{signature}, {reason}"
            if refusals.fallbacks:
                found[key] = found.get(key, 0) + refusals.fallbacks
        return found

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
        return f"{self.digest} {self.device} {self._on_miss} {self._require} {self._on_slower} {self._batch_invariant}"

    def entry(self, signature: Signature | str) -> AnyEntry:
        """What serves `signature`, which may be given by its key, on this GPU; nothing is loaded.

        An entry of the gemm table, or a `runtime.gemm.universal.PredictedEntry` by a universal table.

        Raises:
            ArgumentError: it is neither a signature nor the key of one.
            KernelMiss: nothing, or nothing that `require` accepts; the message names the nearest entries.
            ArchiveClosed: the library was closed.
            DeviceError: the archive has nothing for this GPU.
        """
        self._refuse_if_closed()
        wanted = Signature.of_key(signature) if isinstance(signature, str) else signature
        if not isinstance(wanted, Signature):
            raise ArgumentError(f"signature must be one or its key, as `aot ls` lists them, found {signature!r:.200}")
        return self._now.entry(wanted)

    def checked(self, entry: AnyEntry) -> bool:
        """Whether the functions of an entry of this library were found right on a GPU: it is tuned, or predicted by a
        universal table whose functions were checked."""
        return entry.state == "tuned" or bool(self._now.checked_on(entry))

    def __repr__(self) -> str:
        """What it is of, in words; asks no driver, reads no file, and may be asked of a closed library."""
        now = self._now
        targets = dict.fromkeys(target for archive in now.archives for target in archive.targets)
        words = [f"{len(now.functions)} functions for {', '.join(targets) or 'no target'}"]
        if now.signatures is not None:
            words.append(f"{now.signatures} signatures" + (f" and {now.forms} forms" if now.forms else ""))
        device = self._driver.known_device
        words.append("closed" if self._closed else "no device yet" if device is None else f"cuda:{device}")
        return f"<Library of {now.path}: {', '.join(words)}>"

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the kernels, free their workspaces and close the archives.

        No call may be under way, and no kernel running or in a CUDA graph that is still used.
        """
        with self._changing, self._lock:
            if self._closed:
                return
            self._closed = True
            self._call = None
            contents, self._replaced = [*self._replaced, self._now], []
            with contextlib.ExitStack() as stack:  # all of it, whatever fails
                stack.callback(self._workspaces.close)
                for each in contents:
                    stack.callback(each.close)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ArchiveClosed(f"{self._now.path}: this library was closed; load the archive again")

    def forget_captures(self) -> None:
        """Free the workspaces that CUDA graphs were captured with, of which each capture has its own.

        Those graphs may not be replayed again, and no capture may be under way. Only kernels that share tiles through
        memory (`stream_k`) have any.
        """
        self._workspaces.forget_captures()

    def preload(self, tokens: Sequence[int] = (), *, only: Iterable[Signature | str] | None = None) -> tuple[str, ...]:
        """Load every kernel that the gemm table uses on this device, and return their functions' names.

        From then on `gemm` opens and reads no file, imports nothing and loads no kernel, whatever it is asked for: a
        first call of a shape does no more than arithmetic before it launches, under stream capture too. For the M
        values in `tokens` not even that, where the tensors are contiguous matrices, and torch's only if torch is
        imported before: an import that is under way is waited for. What fits is tried for each function of an entry at
        the least M that it serves, at the largest that ends a range of it, and at `tokens`; where it cannot run on this
        GPU there, runners-up are loaded until one can. Where that is so at another M only, another function of the
        entry that is loaded serves, the nearest range's first; where none of them can, the call is a miss. A later
        `preload` may add to this, and `reload` keeps to it. One that raises promises nothing more, and leaves on the
        device what it had loaded.

        `only` names the signatures that are meant, or their keys, as a model needs of an archive of many: all this then
        holds for them, and kernels for others go on being loaded at their first call.

        Not included are entries that `require` refuses, functions called by name (call their `load`), and workspaces:
        a kernel that needs one still allocates it at its first launch on a stream, or in a capture.

        Raises:
            ArgumentError: an M is not a positive integer, `only` holds what is no signature, or these are more plans
                than are kept.
            KernelMiss: the archive has nothing for a signature in `only`.
            DeviceError: the driver refused, or the archive has nothing for this GPU.
            ArchiveError: the archive is damaged, or the library was closed.
            RecordError: the gemm table or a record is malformed.
        """
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
            raise ArgumentError(f"tokens must be a sequence of M values, such as [1, 16], found {tokens!r:.50}")
        for m in tokens:
            if type(m) is not int or m < 1:
                raise ArgumentError(f"tokens must be positive integers, found {m!r:.50}")
        asked = Preloaded(tuple(sorted(set(tokens))), None if only is None else _keys(only))
        with self._changing:
            self._refuse_if_closed()
            return self._now.preload(asked)

    # --- other contents ---

    def reload(self, path: Paths | None = None) -> bool:
        """Serve what is in the files now, or in others; whether that changed anything.

        Everything that can go wrong goes wrong before the change, and then all stays as it was: the files are opened
        and read in full, and what the library had done is done for them, `preload` included. Calls that begin once this
        has returned get kernels of the new files; calls under way, and CUDA graphs, go on with the old ones, which stay
        loaded until `drop_old` or `close`. Every shape is planned again at its next call.

        `path` is as `load` takes it, and also what later calls without one take; None is the last one that was given.

        Raises:
            ArchiveError: a file is missing or damaged, or the library was closed.
            DeviceError: the files have nothing for this GPU, or the driver refused their kernels.
            RecordError: a gemm table or a record is malformed.
            ArgumentError: there is no path, or the M values that were preloaded are more plans than are kept.
        """
        with self._changing:
            self._refuse_if_closed()
            old, paths = self._now, self._paths if path is None else _paths(path)
            new = self._contents(open_archives(paths))
            try:
                changed = new.digest != old.digest
                if changed:
                    new.check_files()
                    if old.used:
                        new.check_device()
                    if old.preloaded is not None:
                        new.preload(old.preloaded, as_many_as_fit=True)
            except BaseException:
                try:
                    new.close()
                except DeviceError as error:
                    _log.warning("%s was not put in service, and not all of it was unloaded: %s", new.path, error)
                raise
            self._paths = paths
            if not changed:
                new.close()
                return False
            with self._lock:
                self._call, self._plans, self._given, self._now = None, new.plans, new.given, new
                self._replaced.append(old)
            self._counters.reloaded()
        return True

    def drop_old(self) -> int:
        """Unload the kernels of contents that `reload` replaced; how many contents have to wait for another time.

        CUDA graphs that were captured before the reload may not be replayed again: that is the caller's to know. Calls
        that are under way are not: contents that one of them may still launch from are left alone, and for what was
        launched this waits, until the device is idle.

        Raises:
            DeviceError: a stream is being captured, which allows no such wait and may be lost by the attempt, or the
                driver refused; where it was the wait, nothing was unloaded, else all that it did not refuse. A later
                call tries what is left.
            ArchiveError: the library was closed.
        """
        with self._changing:
            self._refuse_if_closed()
            with self._lock:
                busy = [each for each in self._replaced if each.retire()]
            idle = [each for each in self._replaced if each not in busy]
            if idle:
                self._driver.synchronize()
            left, failure = list(busy), None
            for each in idle:
                try:
                    each.close()
                except DeviceError as error:
                    left.append(each)
                    failure = failure or error
            with self._lock:
                self._replaced = left
            if failure is not None:
                raise failure
        return len(busy)

    # --- what was done ---

    def stats(self) -> Stats:
        """What the library has done so far, and what it holds; see `runtime.serve.stats.Stats`."""
        counters = self._counters
        with self._lock:
            now = self._now
            contents = [now, *self._replaced]
        functions = [function for each in contents for function in each.made() if function.loaded]
        refusals = [Refusal(*key, r.misses, r.fallbacks) for key, r in list(counters.refusals.items())]
        launches = {name: counter.read() for name, counter in sorted(counters.launches.items())}
        workspaces, workspace_bytes = self._workspaces.held()
        return Stats(
            archives=tuple(ArchiveInfo(archive.path, archive.digest) for archive in now.archives),
            digest=now.digest,
            reloads=counters.reloads,
            replaced=len(contents) - 1,
            launches=sum(launches.values()),
            launches_by_function={name: count for name, count in launches.items() if count},
            refusals=tuple(sorted(refusals, key=lambda r: (-r.misses, r.signature, r.reason))),
            given_to_torch=counters.given_to_torch.read(),
            kernels_loaded=len(functions),
            kernel_bytes=sum(function.loaded_bytes for function in functions),
            loads=counters.loads,
            load_seconds=counters.load_seconds,
            longest_load_seconds=counters.longest_load_seconds,
            plans_made=counters.plans,
            plans_held=len(set(map(id, list(now.plans.values())))),
            workspaces=workspaces,
            workspace_bytes=workspace_bytes,
            native=native_loaded,
            gpu=now.gpu,
            tuned_for=now.tuned_for,
        )

    def prometheus(self, name: str | None = None) -> str:
        """`stats` in Prometheus' text format; the label `library` is `name`, or the file name of the last archive.

        For several libraries in one answer: `runtime.serve.stats.prometheus_text`.
        """
        stats = self.stats()
        return prometheus_text({name or os.path.basename(stats.archives[-1].path): stats})

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
        - bias (N), added to every row; then `epilogue`, "none" or an activation of `runtime.gemm.signature`, of which
          the gated ones ("swiglu", "swiglu_interleaved" ...) halve the columns: D is (..., N/2);
        - residual, of D's shape, added next; it may be `out` itself. bias and residual have D's element type, or bf16
          where that has 8 bits;
        - scale_d, one f32 element, multiplied in before D is converted; conversion to 8 bits saturates;
        - overlap, what the caller promises about the kernels before this one (`runtime.gemm.signature.Signature`).

        Raises:
            KernelMiss: the archive has no kernel for this; the message names the nearest entries.
            LayoutError: an ArgumentError: a tensor is misaligned, or has strides that kernels do not take.
            ArgumentError: a tensor is malformed, on another device, without memory, or shares memory with `out`.
            DeviceError: the driver refused, or the archive has nothing for this GPU.
        """
        if more:
            try:
                return self._gemm_more(a, b, out, stream, **more)
            except TypeError:
                refuse_unknown(more)
                raise
        native = self._call  # once: a reload takes it away
        if native is not None:
            result = native(0, stream, a, b, out)
            if result is not None:
                return result
        # Each attribute of a torch tensor costs 40-90 ns and this is all of them: the key says everything about a call
        # but its pointers, and those are checked below by integer arithmetic.
        key: tuple[Any, ...] = ()
        of_torch = None
        try:
            if out is None:
                key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, a.get_device(), b.get_device())
            else:
                # fmt: off
                key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, out.shape, out.stride(), out.dtype,
                       a.get_device(), b.get_device(), out.get_device())
                # fmt: on
            found = self._plans.get(key)
            if found is None:
                of_torch = self._given.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not torch's, or not strided
            found = None
        if found is None:
            result = None if of_torch is None else of_torch(a, b, out, stream)
            if result is not None:
                return result
            return self._gemm(Call(a, b, out, stream), key)
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
        native = self._call  # once: a reload takes it away
        if native is not None:
            try:
                tag = self._tags.get((epilogue, overlap, dtype))
            except TypeError:  # not hashable, so no plan has it
                tag = None
            result = None if tag is None else native(tag, stream, a, b, out, *operands)
            if result is not None:
                return result
        of_torch = None
        try:
            key = call.key()
            found = self._plans.get(key)
            if found is None:
                of_torch = self._given.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not torch's, or not strided
            found = None
        result = None if of_torch is None else of_torch(a, b, out, stream, operands)
        if result is not None:
            return result
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

    def _gemm(self, call: Call, key: tuple[Any, ...] = ()) -> Any:
        """The first call of a shape, calls from other frameworks, and calls that the fast paths cannot vouch for.

        `key` is the call's, where that is known.
        """
        self._refuse_if_closed()
        if self._grow(call, key):
            more = {} if call.plain else _words(call)
            return self.gemm(call.a, call.b, out=call.out, stream=call.stream, **more)
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
        if self._on_slower == "torch" and torch_calls and unfit is None and torch_runs(signature):
            named = dict(zip((operand.name for operand in signature.operands()), views, strict=True))
            if lie_for_torch(signature, seen) and self._give(call, out, allocated, signature, named):
                return out
        key = gemm_key(torch_calls, signature, tuple(seen.values()))
        with driver.current():
            try:
                if unfit is not None:
                    raise unfit
                found = self._plans.get(key)
                if found is None:
                    with self._lock:
                        self._refuse_if_closed()
                        found = self._now.plan(key, signature, views, shape, out.dtype if torch_calls else None)
                masks = (*[found.misaligned] * 3, *(mask for mask, _, _ in found.extras))
                if any(v.pointer & mask for v, mask in zip(views, masks, strict=True)):
                    found.function.check(views)
            except (KernelMiss, LayoutError) as reason:
                fall_back = self._on_miss == "torch" and torch_calls and _torch_can(signature)
                count = self._counters.refused(signature.key(), reason.reason, fall_back)
                if not fall_back:
                    raise
                if count == 1:
                    _log.warning("torch computes this from now on: %s", reason)
                torch = sys.modules["torch"]
                with torch.no_grad(), on_stream(None if stream is None else handle, a):
                    torch_gemm(torch, signature.parts, given, out)
                return out
            if torch_calls:
                fast_key = call._replace(out=None if allocated and stream is None else out).key()
                if self._plans.get(fast_key) is not found:
                    with self._lock:
                        if self._plans.get(key) is found:  # else the contents changed meanwhile: this was its last call
                            self._put(call, found, allocated)
                            remember(self._plans, fast_key, found)
                            self._keep_rows(call._replace(out=None if allocated else out), found, views)
            found.launch(tuple(v.pointer for v in views), handle)
        return out

    def _give(
        self, call: Call, out: Any, allocated: bool, signature: Signature, views: Mapping[str, TensorView]
    ) -> bool:
        """Let torch compute a call, and those like it from now on, if it was measured to be faster; whether it did.

        `out` is the call's output, `allocated` or the caller's; `views` are all operands as kernels would take them.
        """
        now = self._now
        try:
            if not now.entry(signature).torch_is_faster(views["a"].shape[-2]):
                return False
        except KernelMiss:  # which is told of, or falls back, as any other
            return False
        given = TorchCall(signature, views, tuple(out.shape), self._counters.given_to_torch.add)
        try:
            if given(call.a, call.b, out, call.stream, call.operands) is None:
                return False  # which kernels would tell of
        except (RuntimeError, TypeError, ValueError) as error:
            if self._counters.torch_refused(signature.key()):
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                _log.warning("%s: torch was faster and does not take this here: %s", signature.key(), reason)
            return False
        key = call._replace(out=None if allocated and call.stream is None else out).key()
        with self._lock:
            if self._now is now and not self._closed:
                remember(now.given, key, given)
        return True

    def _keep_rows(self, call: Call, found: GemmPlan, views: tuple[TensorView, ...]) -> None:
        """Remember a plan of torch tensors for calls with other numbers of rows. The caller holds the lock."""
        asked = rows_of(call, call.key())
        if asked is None:
            return
        rows, alike = asked
        known = self._now.rows
        if alike not in known:
            remember(known, alike, Rows(found.entry))
        known[alike].keep(Known(found, rows, steps_of(call, views, rows)))

    def _grow(self, call: Call, key: tuple[Any, ...]) -> bool:
        """Make a plan for a call of torch tensors that is like one before but for its rows; whether there is a new one.

        A fraction of the work of the first call of a shape. Pointers are for the fast paths to check.
        """
        if call.out is None and call.stream is not None:
            return False  # every such call is a first one
        try:
            key = key or call.key()
            asked = rows_of(call, key)
            if asked is None or key in self._plans or asked[1] not in self._now.rows:
                return False
        except (AttributeError, TypeError, RuntimeError):  # no torch tensors, or sparse ones, or no words
            return False
        rows, alike = asked
        with self._lock:
            preloaded = self._now.preloaded
            like = None if preloaded and rows in preloaded.tokens else self._now.rows.get(alike)
            if like is not None and self._on_slower == "torch" and like.entry.torch_is_faster(rows):
                return False
            known = None if like is None else like.find(rows)
            plan = None if known is None else known.gemm.function.plan_rows(known.gemm.plan, rows)
            if known is None or plan is None:
                return False
            grown = known.gemm.with_rows(plan, rows - known.rows, known.steps)
            self._counters.planned()
            self._put(call, grown, call.out is None)
            remember(self._now.plans, key, grown)
        return True

    def _put(self, call: Call, found: GemmPlan, allocated: bool) -> None:
        """Give the native table what it needs to serve calls like this one, of torch tensors, from now on.

        It leaves to Python what it cannot serve. The caller holds the lock.
        """
        now = self._now
        if now.table is None:
            now.table = native_table(self._driver)
        if not now.table or (allocated and call.stream is not None):
            return
        tag = 0 if call.plain else self._tags.setdefault((call.epilogue, call.overlap, call.dtype), len(self._tags) + 1)
        masks, sizes, may_be_d = zip(*found.extras, strict=True) if found.extras else ((), (), ())
        misaligned = (found.misaligned, found.misaligned, found.misaligned, *masks)
        sizes = (found.a_bytes, found.b_bytes, found.d_bytes, *sizes)
        may_be_d = (False, False, False, *may_be_d)
        tensors = (call.a, call.b, None if allocated else call.out, *(() if call.plain else call.operands))
        shape, options = (found.shape, {"dtype": found.dtype}) if allocated else (None, None)
        counter = found.function.counter
        now.table.put(
            tag, tensors, found.plan.direct, misaligned, sizes, may_be_d, found.device, shape, options, counter
        )
        self._call = now.table.call


def _words(call: Call) -> GemmOptions:
    """What `gemm` took by keyword."""
    words = {"epilogue": call.epilogue, "overlap": call.overlap, "dtype": call.dtype}
    return cast("GemmOptions", dict(zip(EXTRAS, call.operands, strict=True)) | words)


def load(
    path: Paths,
    device: Device | None = None,
    on_miss: str = "error",
    *,
    require: str | None = None,
    on_slower: str = "never",
    batch_invariant: bool = False,
) -> Library:
    """Open the archive at `path` for one device; nothing but the archive is touched before the first use.

    Of several paths the first is the base, and each after it a layer: its gemm entries take the place of those of
    earlier files for the same signature and target, or are new. Entries keep to the functions of their own file.

    `device` is an ordinal, such as 1, or as torch has it, "cuda:1" or a `torch.device`; None and "cuda" are the device
    that is current at the first use. `on_miss` says what happens when the archive cannot serve a GEMM of torch tensors,
    because it has no kernel or because of how a tensor lies in memory (alignment, strides): "error" raises `KernelMiss`
    or `LayoutError`, "torch" lets torch compute it, counted in `Library.misses` and logged once for each signature.
    Calls that are wrong (shapes that do not fit, another device, shared or missing memory) raise `ArgumentError` in any
    case, and 8-bit floats, which torch.matmul does not take, never fall back.

    `require="tuned"` treats entries of the archive that were never tuned on a GPU as missing; by default the first that
    is used is logged as a warning.

    `on_slower="torch"` lets torch compute a GEMM of torch tensors where `aot tune` measured torch's own kernel to be
    faster at that number of rows, counted in `Stats.given_to_torch`: the very call that was measured, one of mm, bmm,
    addmm and _scaled_mm. By default, "never", the archive serves all that it can.

    `batch_invariant=True` serves each signature with functions that all give equal bits, so that a row's result has the
    same bits however many other rows there are; entries that name no such functions are missing. It leaves nothing to
    torch, so `on_miss` must be "error" and `on_slower` "never".

    A library may be opened before a fork and used after it by every child, but its first use (any call that needs the
    device) must come after the fork, as with CUDA itself.

    Raises:
        ArchiveError: a file is not an archive that can be trusted.
        ArgumentError: an option is unknown, two do not go together, there is no path, or `device` names no CUDA device.
    """
    _check_options(on_miss, require, on_slower, batch_invariant)
    driver = Driver(ordinal_of(device))
    archives = open_archives(_paths(path))
    return Library(archives, driver, on_miss, require=require, on_slower=on_slower, batch_invariant=batch_invariant)


def _paths(path: Paths) -> tuple[str | os.PathLike[str], ...]:
    if not isinstance(path, str | bytes | os.PathLike | Iterable):
        raise ArgumentError(f"a path must be given, or several, found {path!r:.80}")
    paths = (path,) if isinstance(path, str | bytes | os.PathLike) else tuple(path)
    if not paths:
        raise ArgumentError("no path was given; give that of an archive, or of a base and those layered on it")
    return paths


def _keys(signatures: Iterable[Signature | str]) -> frozenset[str]:
    """The keys of signatures, some of which may be given as such."""
    if isinstance(signatures, str | Signature) or not isinstance(signatures, Iterable):
        raise ArgumentError(f"only must be a sequence of signatures or their keys, found {signatures!r:.80}")
    keys = [s.key() if isinstance(s, Signature) else s for s in signatures]
    for key in keys:
        if not isinstance(key, str):
            raise ArgumentError(f"only must hold signatures or their keys, found {key!r:.80}")
    return frozenset(keys)


def _torch_can(signature: Signature) -> bool:
    """Whether torch computes this where no kernel does: one element type of 16 bits or more, and no scales."""
    return DTYPES[signature.a].bits >= 16 and signature.a == signature.b == signature.d and signature.scaling == "none"


def _check_options(on_miss: str, require: str | None, on_slower: str, batch_invariant: bool) -> None:
    if on_miss not in ON_MISS:
        raise ArgumentError(f"on_miss must be one of {ON_MISS}, found {on_miss!r}")
    if require not in REQUIRE:
        raise ArgumentError(f"require must be one of {REQUIRE}, found {require!r}")
    if on_slower not in ON_SLOWER:
        raise ArgumentError(f"on_slower must be one of {ON_SLOWER}, found {on_slower!r}")
    if type(batch_invariant) is not bool:
        raise ArgumentError(f"batch_invariant must be True or False, found {batch_invariant!r:.80}")
    for name, word in (("on_miss", on_miss), ("on_slower", on_slower)):
        if batch_invariant and word == "torch":
            raise ArgumentError(
                f"batch_invariant=True with {name}='torch' would promise equal bits at every M of kernels that torch "
                "chooses by M; give one of them"
            )
