"""An archive's kernels as choices of Inductor's own autotuning, with the real torch on the CPU.

On the CPU autotuning goes through the same code as on a GPU, with ATen and C++ in the place of ATen and Triton. Times
are those of `torch_stand_in.OnCpu`, so a test that needs a winner sets the time that Inductor sees.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime.torch as aot
from runtime import ArgumentError, KernelMiss
from runtime.torch import extern_kernel

from .recording_driver import signature
from .torch_stand_in import HIDDEN, KV, ONE, PLAIN, OnCpu, library, linear, near, tensors

BIAS, N_MAJOR, BATCH = (
    signature(HIDDEN, HIDDEN, **more) for more in ({"epilogue": "bias"}, {"b_major": "n"}, {"batch": 3})
)
KEY = "bf16_bf16_bf16_f32_none_n64_k64"
SLOW, FAST = 1e3, 1e-6  # milliseconds


@pytest.fixture(autouse=True)
def fresh_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Times that Inductor measured are kept on disk: each test has a folder of its own for them."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._inductor.utils.clear_caches()
    yield
    torch._inductor.utils.clear_caches()


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[OnCpu]:
    with library(tmp_path, PLAIN) as lib:
        yield lib


def set_time(monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> None:
    """What Inductor sees the archive's kernels take; they are run all the same."""
    real = extern_kernel._Caller.benchmark

    def benchmark(self: Any, *args: Any, out: Any) -> float:
        return milliseconds if real(self, *args, out=out) < float("inf") else float("inf")

    monkeypatch.setattr(extern_kernel._Caller, "benchmark", benchmark)


def compiled_with(lib: OnCpu, function: Any, more: Any = None, **choices: Any) -> tuple[Any, Any]:
    options = aot.autotune_choices(lib, **choices)
    settings = {"fx_graph_cache": False, **options, "max_autotune_gemm_backends": "ATEN", **(more or {})}
    return torch.compile(function, fullgraph=True, options=settings), options["post_grad_custom_post_pass"]


def check(compiled: Any, function: Any, *inputs: Any) -> None:
    with torch.no_grad():
        found, wanted = compiled(*inputs), function(*inputs)
    for x, y in zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]:
        assert near(x, y)
        assert x.stride() == y.stride()


def test_faster_kernels_are_chosen_for_any_m(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, FAST)
    w, bias, batched = tensors((HIDDEN, HIDDEN), (HIDDEN,), (3, HIDDEN, HIDDEN))

    def step(x: Any) -> Any:
        y = nn.functional.linear(x, w, bias).relu() @ w
        z = torch.bmm(y.expand(3, -1, -1).contiguous() * 2, batched.transpose(1, 2))
        return y.t(), z.sum(0), nn.functional.linear(y * 2, w)

    compiled, choices = compiled_with(lib, step)
    for m in (7, 9, 33):
        (x,) = tensors((m, HIDDEN))
        torch._dynamo.mark_dynamic(x, 0)
        check(compiled, step, x)  # compiles at the first M
        lib.calls.clear()
        check(compiled, step, x)
        assert sorted(lib.calls) == sorted([(HIDDEN, HIDDEN, "bias+none")] + [(HIDDEN, HIDDEN, "none")] * 3)
    keys = {KEY: 1, f"{KEY}_n-major": 1, f"{KEY}_b3": 1, "bf16_bf16_bf16_f32_bias_n64_k64": 1}
    assert choices.offered == choices.chosen == keys, str(choices)
    assert choices.left == choices.failed == {}
    assert "4 of 4 products that the archive was measured for are its" in str(choices)


def test_slower_kernels_are_offered_and_not_chosen(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, SLOW)
    layer = linear()
    compiled, choices = compiled_with(lib, layer)
    check(compiled, layer, *tensors((7, HIDDEN)))
    assert choices.offered == {KEY: 1}
    assert choices.chosen == {}
    assert f"0 of 1 x {KEY}" in str(choices)
    lib.calls.clear()
    check(compiled, layer, *tensors((7, HIDDEN)))
    assert lib.calls == []


def test_choices_that_wait_for_fusion_are_chosen_too(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where Inductor chooses when it knows what could be fused into which."""
    set_time(monkeypatch, FAST)
    buffers = []
    real = torch._inductor.ir.MultiTemplateBuffer.__init__

    def init(self: Any, *args: Any) -> None:
        buffers.append(self)
        real(self, *args)

    monkeypatch.setattr(torch._inductor.ir.MultiTemplateBuffer, "__init__", init)
    (w,) = tensors((HIDDEN, HIDDEN))
    step = lambda x: (x @ w) @ w.t()  # noqa: E731
    compiled, choices = compiled_with(lib, step, {"cpu_backend": "triton"})  # nothing is left to generate
    check(compiled, step, *tensors((7, HIDDEN)))
    assert len(buffers) == 2
    assert choices.chosen == {KEY: 1, f"{KEY}_n-major": 1}


def test_results_are_written_where_inductor_wants_them(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, FAST)
    seen = []

    class Watched(OnCpu):
        def gemm(self, a: Any, b: Any, *, out: Any = None, **more: Any) -> Any:
            seen.append((b.shape, b.stride(), b.data_ptr(), None if out is None else out.stride()))
            return super().gemm(a, b, out=out, **more)

    monkeypatch.setattr(lib, "__class__", Watched)
    w, other = tensors((HIDDEN, HIDDEN), (HIDDEN, HIDDEN))
    compiled, _ = compiled_with(lib, lambda x, w, other: nn.functional.linear(x, w) @ other)
    (x,) = tensors((7, HIDDEN))
    compiled(x, w, other)
    seen.clear()
    compiled(x, w, other)
    shape, rows = (HIDDEN, HIDDEN), (HIDDEN, 1)
    assert seen == [(shape, (HIDDEN, 1), w.data_ptr(), rows), (shape, (1, HIDDEN), other.data_ptr(), rows)]


def test_operands_stay_laid_out_as_they_were_measured(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, FAST)
    strides = []

    class Watched(OnCpu):
        def gemm(self, a: Any, b: Any, **more: Any) -> Any:
            strides.append(a.stride())
            return super().gemm(a, b, **more)

    monkeypatch.setattr(lib, "__class__", Watched)
    (w,) = tensors((HIDDEN, HIDDEN))
    step = lambda x: (x.t() * 2) @ w  # noqa: E731  # what Inductor would lay out as x.t() is, were it free to
    compiled, choices = compiled_with(lib, step)
    check(compiled, step, *tensors((HIDDEN, HIDDEN)))
    assert choices.chosen == {f"{KEY}_n-major": 1}
    assert set(strides) == {(HIDDEN, 1)}


def test_it_is_offered_though_somebody_cleared_what_autotuning_calls(
    lib: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_time(monkeypatch, FAST)
    layer = linear()
    compiled, choices = compiled_with(lib, layer)
    torch._inductor.select_algorithm.clear_preprocessing_fns()
    check(compiled, layer, *tensors((7, HIDDEN)))
    assert choices.chosen == {KEY: 1}


def test_what_the_archive_lacks_is_not_offered(lib: OnCpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_time(monkeypatch, FAST)
    w, other, bias = tensors((HIDDEN, HIDDEN), (72, HIDDEN), (HIDDEN,))

    def step(x: Any) -> Any:
        scaled = torch.addmm(bias, x, w, alpha=2)
        return scaled, nn.functional.linear(x, other), x.float() @ w.float(), x[:, ::2] @ w[:32]

    compiled, choices = compiled_with(lib, step)
    check(compiled, step, *tensors((7, HIDDEN)))
    left = "\n".join(choices.left)
    assert "addmm: alpha or beta is not 1" in left
    assert "mm: no kernel for bf16_bf16_bf16_f32_none_n72_k64" in left
    assert "mm: no kernel for f32_f32_f32" in left
    assert choices.left.total() == 4
    assert choices.offered == choices.chosen == {}
    assert lib.calls == []
    (tmp_path / "ranked").mkdir()
    with library(tmp_path / "ranked", [ONE], state="ranked") as ranked:
        torch._dynamo.reset()
        compiled, choices = compiled_with(ranked, lambda x: nn.functional.linear(x, w))
        compiled(*tensors((7, HIDDEN)))
        assert "is ranked, never run on a GPU" in str(choices)


def test_a_miss_while_measuring_leaves_the_rest_to_be_chosen(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(*_: Any, **__: Any) -> Any:
        raise KernelMiss("no kernel runs\nand more")

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    layer = linear()
    compiled, choices = compiled_with(lib, layer)
    check(compiled, layer, *tensors((7, HIDDEN)))
    assert choices.failed == {f"{KEY}: no kernel runs": 1}
    assert choices.chosen == {}
    assert "1 x failed" in str(choices)


def test_other_compilations_are_not_offered_it(lib: OnCpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_time(monkeypatch, FAST)
    layer, narrow = linear(), linear(KV)
    (x,) = tensors((7, HIDDEN))
    compiled, choices = compiled_with(lib, layer)
    check(compiled, layer, x)
    lib.calls.clear()
    torch._dynamo.reset()
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN", "fx_graph_cache": False}
    check(torch.compile(layer, options=options), layer, x)
    assert lib.calls == []
    assert choices.offered == {KEY: 1}
    (tmp_path / "other").mkdir()
    with library(tmp_path / "other", [signature(KV, HIDDEN)]) as other:
        torch._dynamo.reset()
        both = nn.Sequential(layer, narrow)
        compiled, of_other = compiled_with(other, both)
        check(compiled, both, x)
        assert of_other.chosen == {"bf16_bf16_bf16_f32_none_n32_k64": 1}
        assert lib.calls == []
        assert (KV, HIDDEN, "none") in other.calls


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_autotune": False}, "max_autotune is off"),
        ({"pipeline_max_autotune_gemm": True}, "other processes measure"),
        ({"cpp_wrapper": True}, "the generated code is C++"),
    ],
)
def test_where_it_cannot_be_measured_it_is_not_offered(lib: OnCpu, more: Any, reason: str) -> None:
    if next(iter(more)) not in torch._inductor.config.get_config_copy():
        pytest.skip("this torch has no such option")
    layer = linear()
    compiled, choices = compiled_with(lib, layer, more)
    check(compiled, layer, *tensors((7, HIDDEN)))
    assert choices.offered == {}
    assert reason in str(choices)


def test_measuring_in_another_process_leaves_it_in_this_one(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, FAST)
    sent = []

    class Pool:
        def benchmark(self, choices: Any) -> Any:
            sent.extend(choices)
            return {}

    monkeypatch.setattr(torch._inductor.autotune_process, "get_tuning_process_pool", Pool)
    layer = linear()
    compiled, choices = compiled_with(lib, layer, {"autotune_in_subproc": True})
    check(compiled, layer, *tensors((7, HIDDEN)))
    assert choices.chosen == {KEY: 1}
    assert sent == []


def test_training_graphs_are_served(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(monkeypatch, FAST)
    layer = linear().train()
    compiled, choices = compiled_with(lib, layer)
    (x,) = tensors((16, HIDDEN))
    layer(x).sum().backward()
    wanted, layer.weight.grad = layer.weight.grad, None
    compiled(x).sum().backward()
    assert near(layer.weight.grad, wanted)
    assert choices.chosen[KEY] == 1


def test_arguments_are_checked(lib: OnCpu) -> None:
    with pytest.raises(ArgumentError, match="mode must be one of max-autotune, max-autotune-no-cudagraphs, found 'def"):
        aot.autotune_choices(lib, mode="default")
    with pytest.raises(ArgumentError, match="overlap must be one of serial, launch, found 'weights'"):
        aot.autotune_choices(lib, overlap="weights")
    assert aot.autotune_choices(lib)["triton.cudagraphs"]
    options = aot.autotune_choices(lib, mode="max-autotune-no-cudagraphs")
    assert options["max_autotune"]
    assert "triton.cudagraphs" not in options
    lib.close()
    with pytest.raises(ArgumentError, match="was closed"):
        aot.autotune_choices(lib)


def test_cached_graphs_are_told_apart_by_archive_and_options(lib: OnCpu, tmp_path: Path) -> None:
    def uuid(lib: OnCpu, **more: Any) -> Any:
        return aot.autotune_choices(lib, **more)["post_grad_custom_post_pass"].uuid()

    assert uuid(lib) == uuid(lib) != uuid(lib, overlap="launch")
    (tmp_path / "other").mkdir()
    with library(tmp_path / "other", [ONE]) as other:
        assert uuid(other) != uuid(lib)


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from tests.recording_driver import RecordingDriver
from tests.torch_stand_in import HIDDEN, OnCpu, near, tensors
from tests import test_torch_autotune as tests
import torch
from torch._dynamo.utils import counters
from runtime.container.archive import Archive
from runtime.torch import autotune_choices, extern_kernel

extern_kernel._Caller.benchmark = lambda *_, **__: tests.FAST
torch.manual_seed(0)
lib = OnCpu(Archive.open(sys.argv[1]), RecordingDriver())
options = autotune_choices(lib)
x, w = tensors((7, HIDDEN), (HIDDEN, HIDDEN))
step = torch.compile(lambda x, w: torch.nn.functional.linear(x, w), options=options)
assert near(step(x, w), x.float() @ w.float().T)
print(sum(options["post_grad_custom_post_pass"].chosen.values()), len(lib.calls))
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.long  # two processes that import Inductor and compile
def test_cached_code_calls_the_library_in_another_process(tmp_path: Path) -> None:
    library(tmp_path, [ONE]).close()
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "model.aot")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        assert done.returncode == 0, done.stderr
        found.append([int(word) for word in done.stdout.split()[-4:]])
    assert found[0] == [1, 1, 0, 0]
    assert found[1][:2] == [0, 1], "not compiled again, and yet computed by the archive"
    assert sum(found[1][2:]) > 0
