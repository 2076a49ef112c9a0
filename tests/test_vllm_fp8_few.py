"""Layers in fp8 in vLLM whose archive quantises few tokens itself; on the CPU."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from aot.tune.quantise.measures import quantised
from runtime.container.archive import Archive
from runtime.gemm.universal import ExtendedEntry
from runtime.plugin.log import warn_once
from runtime.plugin.scaled import QUANTISING
from runtime.quantise import Signature as Quantise

from . import vllm_stand_in
from .moe.test_operation import tensors_of
from .recording_driver import RecordingDriver, entry, operands_record, signature, tensors_record, write_archive
from .test_vllm_fp8 import SERVED, made, scaled, worker_of
from .torch_stand_in import Graphs, OnCpu
from .vllm_stand_in import E4M3, K, N, Start, fp8_layer, quant_key

start = vllm_stand_in.start  # a fixture

MOST, MOST_BEHIND = 4, 24  # tokens that kernels quantise, and that the GEMM behind what quantises was tuned for
SCALINGS = {"block": "block_weight", "row_column": "column_weight"}
FEW = [signature(N, K, b="e4m3", scaling=scaling, overlap="weights") for scaling in SCALINGS.values()]


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server whose library computes both products, and notes which and for how many tokens."""

    def gemm(self: Any, a: Any, b: Any, *, scale_b: Any, scale_a: Any = None, **more: Any) -> Any:
        self.calls.append((a.shape[0], a.dtype == E4M3, more.get("overlap", "serial")))
        d = (a.float() if scale_a is None else scaled(a, scale_a)) @ scaled(b, scale_b).T
        return more["out"].copy_(d) if "out" in more else d.to(more["dtype"])

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    return lambda signatures=(*SERVED, *FEW), **more: start(list(signatures), tuned_to=MOST, **more)


class QuantisingOnCpu(OnCpu):
    """Quantises rows as well, unless it is `lacking` what does."""

    lacking = False

    def call(self, operation: str, *tensors: Any, **more: Any) -> Any:
        assert operation == "quantise"
        if self.lacking:
            raise runtime.KernelMiss("none", "no kernel runs")
        self.calls.append((len(tensors[0]), 0, more["scaling"]))
        y, scale = quantised(tensors[0], "e4m3", more["scaling"])
        for to, found in zip(more["out"], (y.to(E4M3), scale), strict=True):
            to.copy_(found)
        return more["out"]


@pytest.fixture
def quantising(begin: Any, tmp_path: Path) -> Any:
    """Starts a server whose archive quantises more tokens too, and overlaps the GEMM of up to `MOST_BEHIND` with it."""

    def make() -> Any:
        server = begin()
        behind = [signature(N, K, dtype="e4m3", d="bf16", scaling=s, overlap="weights") for s in SCALINGS]
        gemms = {f"gemm{i}": s for i, s in enumerate([*SERVED, *FEW, *behind])}
        rows = {f"rows{i}": Quantise("bf16", "e4m3", K, s) for i, s in enumerate(SCALINGS)}
        records = [[operands_record(*item) for item in gemms.items()]]
        records.append([tensors_record(name, *tensors_of(of)) for name, of in rows.items()])
        most = {name: MOST if s["b"] != s["a"] else MOST_BEHIND for name, s in gemms.items()}
        entries = [[entry(s, [(None, name)], tuned_to=most[name]) for name, s in gemms.items()]]
        entries.append([entry(s.to_json(), [(None, name)]) for name, s in rows.items()])
        kernels: dict[Any, Any] = {}
        archives: list[Path] = []
        for operation, given, of in zip(("gemm", "quantise"), records, entries, strict=True):
            archives.append(tmp_path / f"{operation}.aot")
            kernels |= write_archive(archives[-1], given, of, operation)
        server.lib = QuantisingOnCpu([Archive.open(path) for path in archives], RecordingDriver(kernels=kernels))
        return server

    return make


def layer_of(scaling: str, scale_ub: Any = None, n: int = N, k: int = K) -> Any:
    torch.manual_seed(1)
    weight = torch.randn(n, k).to(E4M3)
    scale = torch.rand((n // 128, k // 128) if scaling == "block" else (n, 1)) + 0.5
    stored = weight if scaling == "block" else weight.t()
    return types.SimpleNamespace(weight=stored, weight_scale=scale, scale_ub=scale_ub, exact=scaled(weight, scale))


def taken(server: Any, scaling: str, **more: Any) -> tuple[Any, Any]:
    """The GEMM that vLLM makes of a layer that it loads, and the layer."""
    worker = worker_of(server)
    gemm = made(server, fp8_layer(scaling), scaling)
    worker.load_model()
    return gemm, layer_of(scaling, **more)


def close(found: Any, layer: Any, x: Any) -> bool:
    """As near as activations in e4m3 allow."""
    wanted = x.float() @ layer.exact.T
    return found.shape == wanted.shape and bool((found.float() - wanted).norm() <= 0.05 * wanted.norm())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_few_tokens_come_to_kernels_as_they_are(begin: Any, scaling: str) -> None:
    server = begin()
    gemm, layer = taken(server, scaling)
    for m in (1, MOST, MOST + 1, 40):
        x = torch.randn(1, m, K).bfloat16()
        assert close(gemm.apply_weights(layer, x), layer, x)
    quantised = [(m, m > MOST, "serial" if m > MOST else "weights") for m in (1, MOST, MOST + 1, 40)]
    assert server.lib.calls == quantised
    assert "serves 1 of 1 fp8 layers (2 signatures preloaded" in server.lines[0]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_archives_without_such_kernels_have_all_tokens_quantised(begin: Any, scaling: str) -> None:
    server = begin(SERVED)
    gemm, layer = taken(server, scaling)
    x = torch.randn(2, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(2, True, "serial")]
    assert gemm.quant_fp8.calls == 1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_more_tokens_are_quantised_by_the_archive_and_its_gemm_overlaps(quantising: Any, scaling: str) -> None:
    server = quantising()
    gemm, layer = taken(server, scaling)
    for m in (MOST, MOST + 1, MOST_BEHIND + 1):
        x = torch.randn(m, K).bfloat16()
        assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [
        (MOST, False, "weights"),
        *((MOST + 1, 0, scaling), (MOST + 1, True, "weights")),
        *((MOST_BEHIND + 1, 0, scaling), (MOST_BEHIND + 1, True, "serial")),
    ]
    assert "serves 1 of 1 fp8 layers (4 signatures preloaded" in server.lines[0]


def test_entries_that_a_form_extends_count_as_they_were_tuned(quantising: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = quantising()
    entry_of: Any = OnCpu.entry

    def extended(self: Any, wanted: Any) -> Any:
        found = entry_of(self, wanted)
        return ExtendedEntry(found, found, 2 * found.tuned_to) if getattr(found, "tuned_to", None) else found

    monkeypatch.setattr(OnCpu, "entry", extended)
    worker_of(server)
    assert made(server, fp8_layer("block"), "block").way[:5] == ("block", MOST, "weights", True, MOST_BEHIND)


def test_tokens_that_the_archive_cannot_quantise_are_vllms_to_quantise(quantising: Any) -> None:
    warn_once.cache_clear()
    server = quantising()
    worker_of(server)
    gemm, layer = made(server, fp8_layer("block"), "block"), layer_of("block")
    server.lib.lacking = True
    x = torch.randn(MOST + 1, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(MOST + 1, True, "weights")]
    assert f"what quantises for an fp8 GEMM of N {N} and K {K} was left to the server: KernelMiss" in server.lines[0]


def test_kernels_of_few_tokens_that_cannot_be_loaded_leave_tokens_to_vllm(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = begin()
    worker_of(server)
    preload = OnCpu.preload

    def fail(self: Any, tokens: Any = (), *, only: Any = None) -> Any:
        if any("weight" in key for key in only):
            raise runtime.DeviceError("the driver\nrefused")
        return preload(self, tokens, only=only)

    monkeypatch.setattr(OnCpu, "preload", fail)
    gemm, layer = made(server, fp8_layer("block"), "block"), layer_of("block")
    x = torch.randn(2, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(2, True, "serial")]
    assert "has vLLM quantise tokens: the driver refused" in server.lines[0]


@pytest.mark.parametrize("change", [{"out_dtype": torch.float16}, {"input_dtype": torch.float16}])
def test_only_activations_of_the_results_type_are_taken_as_they_are(begin: Any, change: Any) -> None:
    server = begin([*SERVED, *FEW, signature(N, K, dtype="e4m3", d="f16", scaling="block")])
    worker_of(server)
    assert made(server, fp8_layer("block", **change), "block").way is None


def test_activations_with_a_bound_or_static_scales_are_quantised_by_vllm(begin: Any) -> None:
    server = begin()
    worker_of(server)
    gemm, layer = made(server, fp8_layer("row_column"), "row_column"), layer_of("row_column", torch.ones(1))
    x = torch.randn(2, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(2, True, "serial")]
    for scaling, group in (("tensor", (-1, -1)), ("row_column", (1, -1))):
        static = fp8_layer(scaling, activation_quant_key=quant_key(group, static=True))
        assert made(server, static, scaling).way is None


def test_few_tokens_that_no_kernel_takes_are_quantised(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warn_once.cache_clear()
    server = begin()
    worker_of(server)
    gemm, layer, computed = made(server, fp8_layer("block"), "block"), layer_of("block"), OnCpu.gemm

    def fail(self: Any, a: Any, b: Any, **more: Any) -> Any:
        if "scale_a" not in more:
            raise runtime.KernelMiss("none", "no kernel runs")
        return computed(self, a, b, **more)

    monkeypatch.setattr(OnCpu, "gemm", fail)
    x = torch.randn(2, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(2, True, "serial")]
    said = f"an fp8 GEMM of few tokens of N {N} and K {K} was computed of quantised tokens: KernelMiss, no kernel"
    assert said in server.lines[0]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_code_calls_one_operator_with_any_m(begin: Any, scaling: str) -> None:
    server = begin()
    gemm, layer = taken(server, scaling)
    graphs = Graphs()
    compiled = torch.compile(lambda x: gemm.apply_weights(layer, x) + 1, fullgraph=True, backend=graphs)
    for m in (3, 7):
        x = torch.randn(m, K).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert close(compiled(x) - 1, layer, x)
    assert len(graphs) == 1
    assert [m for m, *_ in server.lib.calls] == [3, 7]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_code_of_inductors_calls_it_without_the_dispatcher(
    begin: Any, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, given = begin(), []
    gemm, layer = taken(server, scaling)
    computed = OnCpu.gemm

    def noted(self: Any, a: Any, b: Any, **more: Any) -> Any:
        given.append("out" in more)
        return computed(self, a, b, **more)

    monkeypatch.setattr(OnCpu, "gemm", noted)
    compiled = torch.compile(lambda x: gemm.apply_weights(layer, x) + 1, fullgraph=True, dynamic=True)
    for m in (3, 7):
        x = torch.randn(m, K).bfloat16()
        assert close(compiled(x) - 1, layer, x)
    assert given == [True, True]
    assert [m for m, *_ in server.lib.calls] == [3, 7]


def test_operator_passes_torchs_own_checks(begin: Any) -> None:
    server = begin()
    worker_of(server)
    gemm, layer = made(server, fp8_layer("row_column"), "row_column"), layer_of("row_column")
    x, b = torch.randn(3, K).bfloat16(), layer.exact.bfloat16()  # torch compares copies, and copies no e4m3 on the CPU
    given = (gemm.number, x, b, torch.ones(N, 1), torch.bfloat16, *gemm.way)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(QUANTISING, given, test_utils=tests)
