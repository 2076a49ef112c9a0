"""The call path of `Library.gemm`, from a caller's tensors to a launch.

Four ways, the fastest first: the native table; a plan, or torch's call where torch is faster, that is found by the key
of a call of torch tensors; one grown from that for other rows; and a first call, which finds out what is asked for,
chooses, loads and plans. Each leaves to the next what it cannot vouch for. Knows nothing of files and reloads.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...device.driver import Driver
from ...errors import KernelMiss, LayoutError
from ...gemm.call import (
    GemmOptions,
    check_memory,
    matrices,
    refuse_unknown,
)
from ...gemm.fallback import TorchCall, lie_for_torch, rows_matter, torch_gemm, torch_runs
from ...gemm.signature import Signature
from ...gemm.universal import AnyEntry
from ...numbers.dtypes import DTYPES
from ...program.outputs import on_stream
from ...program.record import TensorView
from ..counters import Counters
from ..generation import Generation
from ..native_plans import Kept
from ..options import Options
from ..plan import remember
from ..serving import Serving
from .keys import Call, key_of_plain, rows_of, shape_key, steps_of
from .plan import GemmPlan
from .plans import Plans
from .request import Request, request_of, residual_beside
from .row_plans import Known, KnownOfTorch, RowPlans

if TYPE_CHECKING:
    from typing import Unpack

_log = logging.getLogger(__name__)


class GemmCalls(Serving):
    """What a library is to those who call `gemm`. A reload changes the attributes that begin with `_now`, together."""

    def __init__(self, driver: Driver, options: Options, counters: Counters, lock: threading.RLock) -> None:
        super().__init__(driver, options, counters, lock)
        self._tags: dict[Any, int] = {}  # what native tables know words by; kept over reloads, so that none changes

    def _serve(self, now: Generation) -> None:
        self._now_native: Any = None  # the call of its native table, once that has a plan
        self._now_by_call, self._now_torch_calls = now.plans.by_call, now.plans.torch_calls
        super()._serve(now)

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
        stream where no torch tensor is involved. No gradient is recorded. That a view at an offset lost its storage, or
        has torch's negative bit, is noticed in the first call of a shape only: keep what you pass. By keyword also:

        - scale_a, scale_b: factors of the products, in f32: one element each; or (...) or (..., 1) and (N), (1, N) or
          (N, 1); or (..., ceil(K/128)) and (ceil(N/128), ceil(K/128)), for blocks of 1 x 128 and 128 x 128; or, of any
          shape without gaps, in the tiles of `runtime.numbers.scaling.TILES`: in ue8m0 for blocks of 1 x 32, or, where
          a and b are e2m1, in e4m3 for blocks of 1 x 16 (NVFP4); scale_b alone where b has 4 bits and a is bf16, both
          as `runtime.torch.prepare_weight` gives them, or where b is e4m3 and a is bf16, which the kernel quantises by
          1 x 128: (N), (N, 1) or (ceil(N/128), ceil(K/128));
        - scale_ab, one f32 element, with the latter: the factor of all of A times that of all of B;
        - bias (N), added to every row; then `epilogue`, "none" or an activation of `runtime.numbers.epilogue`, of which
          the gated ones ("swiglu", "swiglu_interleaved" ...) halve the columns: D is (..., N/2);
        - residual, of D's shape, added next; it may be `out` itself, and then a copy of it is made. bias and residual
          have D's element type, or bf16 where that has 8 bits;
        - scale_d, one f32 element, multiplied in before D is converted; conversion to 8 bits saturates;
        - overlap, what the caller promises about the kernels before this one (`runtime.program.operation.OVERLAPS`).

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
        native = self._now_native  # once: a reload takes it away
        if native is not None:
            result = native(0, stream, a, b, out)
            if result is not None:
                return result
        try:
            key = key_of_plain(a, b, out)
            found = self._now_by_call.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not torch's, or not strided
            key, found = (), None
        if found is not None:
            result = self._launch(found, a, b, out, stream)
            if result is not None:
                return result
        return self._unplanned(Call(a, b, out, stream), key, found)

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
        scale_ab: Any = None,
        scale_d: Any = None,
        epilogue: str = "none",
        overlap: str = "serial",
        dtype: Any = None,
    ) -> Any:
        """`gemm` with more than a and b."""
        operands = (scale_a, scale_b, scale_ab, bias, residual, scale_d)
        native = self._now_native  # once: a reload takes it away
        if native is not None:
            try:
                tag = self._tags.get((epilogue, overlap, dtype))
            except TypeError:  # not hashable, so no plan has it
                tag = None
            result = None if tag is None else native(tag, stream, a, b, out, *operands)
            if result is not None:
                return result
        call = Call(a, b, out, stream, operands, epilogue, overlap, dtype, False)
        try:
            key = call.key()
            found = self._now_by_call.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not torch's, or not strided, or no words
            key, found = (), None
        if found is not None:
            result = self._launch(found, a, b, out, stream, operands)
            if result is not None:
                return result
        return self._unplanned(call, key, found)

    def _launch(self, found: GemmPlan, a: Any, b: Any, out: Any, stream: Any, operands: Sequence[Any] = ()) -> Any:
        """Launch a call of torch tensors by its plan, and return D; None where its pointers do not fit that, or it
        would be allocated on another stream than torch's."""
        handle = found.streams.handle(stream)  # type: ignore[union-attr]
        result = out
        if result is None:
            if stream is not None:
                return None
            result = a.new_empty(found.shape, dtype=found.dtype)
        pointers = a.data_ptr(), b.data_ptr(), result.data_ptr()
        if operands:
            pointers += tuple([x.data_ptr() for x in operands if x is not None])
        if handle is None or not found.checks.fit(pointers):
            return None
        found.launch(pointers, handle)
        return result

    def _unplanned(self, call: Call, key: tuple[Any, ...], found: GemmPlan | None) -> Any:
        """A call that has no plan by its key, empty where it has none, or that does not fit what was `found`."""
        self._refuse_if_closed()
        if found is None and key:
            of_torch = self._now_torch_calls.get(key)
            if of_torch is not None:
                result = of_torch(call.a, call.b, call.out, call.stream, call.operands)
            else:
                plans = self._now.plans  # before: should a reload come between, it is not the new ones that keep it
                grown = self._grow(call, key)
                if isinstance(grown, TorchCall):
                    result = self._by_torch(grown, call, key, plans)
                elif grown is not None:
                    result = self._launch(grown, call.a, call.b, call.out, call.stream, call.operands)
                else:
                    result = None
            if result is not None:
                return result
        return self._first(call)

    def _first(self, call: Call) -> Any:
        """The first call of a shape, calls from other frameworks, and calls that the other ways cannot vouch for."""
        self._refuse_if_closed()
        request = request_of(call, self._driver)
        signature, out = request.signature, request.out
        if 0 in request.views["d"].shape:
            return out
        views, unfit = tuple(request.views.values()), None
        try:
            views = matrices(signature, request.views)
        except LayoutError as error:
            unfit = error
        check_memory(dict(zip(request.views, views, strict=True)))
        if self._options.on_slower == "torch" and request.of_torch and unfit is None and torch_runs(signature):
            named = dict(zip((operand.name for operand in signature.operands()), views, strict=True))
            if lie_for_torch(signature, request.views) and self._give(request, named):
                return out
        key = shape_key(request.of_torch, signature, tuple(request.views.values()))
        with self._driver.current():
            try:
                if unfit is not None:
                    raise unfit
                found = self._plan(key, request, views)
            except (KernelMiss, LayoutError) as reason:
                self._fall_back(request, views, reason)
                return out
            if request.of_torch:
                self._remember(key, request, found, views)
            by_name = {name: v.pointer for name, v in zip(request.views, views, strict=True)}
            copy = residual_beside(request) if by_name.get("residual") == by_name["d"] else None
            if copy is not None:
                by_name["residual"] = copy.data_ptr()
            found.launch(tuple(by_name.values()), request.handle)
        return out

    def _plan(self, key: Any, request: Request, views: tuple[TensorView, ...]) -> GemmPlan:
        """The plan for a call, whose operands are `views` as kernels take them.

        Raises:
            KernelMiss: no kernel serves it.
            LayoutError: a tensor is misaligned for the kernel that does.
        """
        found = self._now.plans.of_shape(key)
        if found is None:
            with self._lock:
                self._refuse_if_closed()
                dtype = request.out.dtype if request.of_torch else None
                found = self._now.plans.plan(key, request.signature, views, request.views["d"].shape, dtype)
        if any(v.pointer & mask for v, mask in zip(views, found.checks.misaligned, strict=True)):
            found.function.check(views)
        return found

    def _fall_back(self, request: Request, views: tuple[TensorView, ...], reason: KernelMiss | LayoutError) -> None:
        """Count a call that no kernel serves, and let torch compute it where the options say so; else raise it. `views`
        are all operands as kernels would take them."""
        signature = request.signature
        damaged = reason.reason == "damaged"  # which is so with on_damage="torch" alone
        falls_back = (damaged or self._options.on_miss == "torch") and request.of_torch and _torch_can(signature)
        is_done = damaged and request.of_torch and not falls_back and self._by_one_call(request, views)
        count = self._counters.refused(signature.key(), reason.reason, falls_back or is_done)
        if not falls_back and not is_done:
            raise reason
        if count == 1:
            _log.warning("torch computes this from now on: %s", reason)
        if is_done:
            return
        torch = sys.modules["torch"]
        with torch.no_grad(), on_stream(None if request.call.stream is None else request.handle, request.call.a):
            torch_gemm(torch, signature.parts, request.given, request.out)

    def _by_one_call(self, request: Request, views: tuple[TensorView, ...]) -> bool:
        """Let torch compute what it has one call for, such as 8-bit floats with scales; whether it did."""
        signature, call = request.signature, request.call
        if not torch_runs(signature) or not lie_for_torch(signature, request.views):
            return False
        named = dict(zip((operand.name for operand in signature.operands()), views, strict=True))
        given = TorchCall(signature, named, tuple(request.out.shape), lambda: None)
        try:
            return given(call.a, call.b, request.out, call.stream, call.operands) is not None
        except (RuntimeError, TypeError, ValueError):  # this torch does not take it on this GPU
            return False

    def _remember(self, key: Any, request: Request, found: GemmPlan, views: tuple[TensorView, ...]) -> None:
        """Keep a plan where the faster ways find it, for calls like this one of torch tensors."""
        call, out = request.call, request.out
        fast_key = call._replace(out=None if request.allocated and call.stream is None else out).key()
        if self._now_by_call.get(fast_key) is found:
            return
        with self._lock:
            if self._now.plans.of_shape(key) is found:  # else a reload came between: this was its last call
                self._put(call, found, request.allocated)
                remember(self._now_by_call, fast_key, found)
                self._keep_rows(call._replace(out=None if request.allocated else out), found, views)

    def _give(self, request: Request, views: Mapping[str, TensorView]) -> bool:
        """Let torch compute a call, and those like it from now on, if it was measured to be faster; whether it did.

        `views` are all operands as kernels would take them.
        """
        now, call, signature, out = self._now, request.call, request.signature, request.out
        try:
            entry = now.entries.entry(signature)
            if not entry.torch_is_faster(views["a"].shape[-2]):
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
        call = call._replace(out=None if request.allocated and call.stream is None else out)
        with self._lock:
            if self._now is now and not self._closed:
                remember(now.plans.torch_calls, call.key(), given)
                like = call._replace(out=None) if request.allocated else call
                of_rows = None if rows_matter(signature) else self._of_rows(like, entry)
                if of_rows is not None:
                    rows, alike = of_rows
                    alike.of_torch = KnownOfTorch(given, rows, steps_of(call, tuple(views.values()), rows))
        return True

    def _by_torch(self, grown: TorchCall, call: Call, key: tuple[Any, ...], plans: Plans) -> Any:
        """Let torch compute a call as it did calls with other rows, and those like it from now on; None, and nothing
        was done, where it does not take this one."""
        try:
            result = grown(call.a, call.b, call.out, call.stream, call.operands)
        except (RuntimeError, TypeError, ValueError):  # `_give` asks it again, and tells
            return None
        if result is not None:
            with self._lock:
                remember(plans.torch_calls, key, grown)
        return result

    def _keep_rows(self, call: Call, found: GemmPlan, views: tuple[TensorView, ...]) -> None:
        """Remember a plan of torch tensors for calls with other numbers of rows. The caller holds the lock."""
        of_rows = self._of_rows(call, found.entry)
        if of_rows is not None:
            rows, alike = of_rows
            alike.keep(Known(found, rows, steps_of(call, views, rows)))

    def _of_rows(self, call: Call, entry: AnyEntry) -> tuple[int, RowPlans] | None:
        """The rows of a call of torch tensors that `entry` serves, and where calls like it but for these are kept; None
        where more of such calls differs. The caller holds the lock."""
        asked = rows_of(call, call.key()) if entry.signature.rows_alone else None
        if asked is None:
            return None
        rows, alike = asked
        known = self._now.plans.by_rows
        if alike not in known:
            remember(known, alike, RowPlans(entry))
        return rows, known[alike]

    def _grow(self, call: Call, key: tuple[Any, ...]) -> GemmPlan | TorchCall | None:
        """Make a plan for a call of torch tensors that is like one before but for its rows, or find torch's call where
        torch serves so many; None where none was like it.

        A fraction of the work of the first call of a shape. Pointers are for `_launch`, or torch's call, to check.
        """
        if call.out is None and call.stream is not None:
            return None  # every such call is a first one
        try:
            asked = rows_of(call, key)
            if asked is None or asked[1] not in self._now.plans.by_rows:
                return None
        except (AttributeError, TypeError, RuntimeError):  # sparse tensors, or no words
            return None
        rows, alike = asked
        with self._lock:
            plans = self._now.plans
            like = None if plans.preloaded and rows in plans.preloaded.tokens else plans.by_rows.get(alike)
            if like is None:
                return None
            if self._options.on_slower == "torch" and like.entry.torch_is_faster(rows):
                return None if like.of_torch is None else like.of_torch.with_rows(rows)
            known = like.find(rows)
            plan = None if known is None else known.gemm.function.plan_rows(known.gemm.plan, rows)
            if known is None or plan is None:
                return None
            grown = known.gemm.with_rows(plan, rows - known.rows, known.steps)
            self._counters.planned()
            self._put(call, grown, call.out is None)
            remember(plans.by_call, key, grown)
        return grown

    def _put(self, call: Call, found: GemmPlan, allocated: bool) -> None:
        """Give the native table what it needs to serve calls like this one, of torch tensors, from now on.

        It leaves to Python what it cannot serve. The caller holds the lock.
        """
        if allocated and call.stream is not None:
            return
        tag = 0 if call.plain else self._tags.setdefault((call.epilogue, call.overlap, call.dtype), len(self._tags) + 1)
        tensors = (call.a, call.b, None if allocated else call.out, *(() if call.plain else call.operands))
        kept, plans = Kept(found.plan, found.checks, found.function.counter), self._now.plans
        if plans.native.is_full():  # which then forgets all, and nothing that Python still knew would be put back
            plans.native.clear()
            plans.by_call.clear()
        launch = plans.native.put(tag, tensors, kept, found.shape if allocated else None, found.dtype)
        if launch is not None:
            self._now_native = launch


def _torch_can(signature: Signature) -> bool:
    """Whether torch computes this where no kernel does: one element type of 16 bits or more, and no scales."""
    return DTYPES[signature.a].bits >= 16 and signature.a == signature.b == signature.d and signature.scaling == "none"
