"""Calls of operations by their names: by the plan of a call like it, or by asking the operation what is meant.

GEMM has a path of its own (`runtime.serve.gemm`). Knows nothing of files and reloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from ..container.errors import ArchiveClosed
from ..errors import ArgumentError, KernelMiss
from ..program.outputs import on_stream
from ..program.record import TensorView
from ..program.tensor import is_torch
from .generation import Generation
from .operands import device_view, resolve_stream
from .planned_call import Call, PlannedCall, Seen, call_of
from .serving import Serving


class OperationCalls(Serving):
    """What a library is to those who call operations."""

    def call(self, operation: str, *tensors: Any, stream: Any = None, **words: Any) -> Any:
        """Launch the function that the archive's table of an operation has for these arguments, and return the result.

        Which arguments there are the operation says; `rmsnorm` takes x (..., N), weight (N), `out` and `eps`. `stream`
        is as `gemm` takes it. GEMM has a method of its own, which takes a fraction of this one's time.

        Raises:
            KernelMiss: the archive has no function for this; the message names the nearest entries.
            ArgumentError: there is no such operation, or an argument does not fit.
            DeviceError: the driver refused, or the archive has nothing for this GPU.
        """
        now, call = self._now, call_of(operation, tensors, words)
        direct = now.calls.native.by_words.get(call.form)
        if direct is not None:
            launch, tag, order = direct
            if launch(tag, stream, *[call.tensors[place] for place in order]) is not None:
                return words["out"]
        key = call.key()
        if key is not None:
            planned = now.calls.planned.get(key)
            if planned is not None and (found := planned.launch(call, stream, words.get("out"))) is not None:
                return found
        while True:
            self._refuse_if_closed()
            now = self._now
            try:
                return self._first_call(now, call, stream, operation, tensors, words)
            except ArchiveClosed:  # a reload replaced it meanwhile, and `drop_old` unloaded it
                if self._now is now:
                    raise

    def _first_call(
        self,
        now: Generation,
        call: Call,
        stream: Any,
        operation: str,
        tensors: Sequence[Any],
        words: Mapping[str, Any],
    ) -> Any:
        """A `call` of these that has no plan in a generation, or none that fits; it is given one where it has a key."""
        key = call.key()
        entries, driver = now.entries_of(operation), self._driver
        seen: dict[int, Seen] = {}
        handle = resolve_stream(stream, [x for x in (*tensors, *words.values()) if hasattr(x, "data_ptr")], driver)

        def view(x: Any, name: str, writable: bool) -> TensorView:
            found = device_view(x, name, handle, driver, writable=writable)
            seen[id(x)] = Seen(found, writable or (id(x) in seen and seen[id(x)].written))
            return found

        # What is made comes from the memory of the stream that writes it.
        makes = stream is not None and words.get("out") is None and bool(tensors) and is_torch(tensors[0])
        try:
            with on_stream(handle, tensors[0]) if makes else nullcontext():
                asked = entries.of.ask(view, *tensors, **words)
        except TypeError:
            from inspect import signature

            try:
                signature(entries.of.ask).bind(view, *tensors, **words)
            except TypeError as error:
                raise ArgumentError(f"{operation}: {error}") from None
            raise
        if asked.m == 0:
            return asked.result
        try:
            function, plan = entries.launch(asked, handle)
        except KernelMiss as miss:
            self._counters.refused(asked.signature.key(), miss.reason, False)
            raise
        if key is not None:
            like = PlannedCall.of(call, seen, asked, words.get("out"), function, plan, driver.device_count)
            with self._lock:
                if like is not None and self._now is now and not self._closed:
                    now.calls.keep(call, key, like)
        return asked.result

    def grouped_gemm(self, a: Any, b: Any, ends: Any, *, out: Any = None, stream: Any = None, **more: Any) -> Any:
        """D[r] = act(A[r] @ B[e]^T) for rows r of group e, as experts have them: what `call` of "grouped_gemm" does.

        a (..., K) with rows of a group together, b (groups, N, K), ends (groups), i32 on the device, the row that each
        group ends before. Gives D (..., N), or (..., N/2) where the epilogue is gated. Only the device reads `ends`, so
        a captured call serves whatever they are when its graph is replayed. Rows behind the last group's end stay as
        they are. `out`, `stream` and errors are as `gemm` has them; by keyword also what
        `runtime.grouped_gemm.GroupedGemm.ask` takes, as `epilogue` and `overlap`.
        """
        return self.call("grouped_gemm", a, b, ends, out=out, stream=stream, **more)
