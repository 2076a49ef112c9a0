"""Norms of vLLM's that an archive computes, in modules shaped like vLLM's; on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from runtime.container.archive import Archive
from runtime.errors import DeviceError
from runtime.plugin.linears import FP8, INT4, Besides, Decision
from runtime.plugin.served import RequiredError
from runtime.vllm.norms import quantises_apart

from .. import vllm_stand_in
from ..recording_driver import RecordingDriver, kernels_of
from ..shared import built_once
from ..torch_stand_in import HIDDEN, Graphs, OnCpu, near, tensors
from ..vllm_stand_in import MINE, Server, Start
from .archives import tuned

start = vllm_stand_in.start  # a fixture

EPS = 1e-5
MANIFEST = f"""
format: 1
model: norms-of-servers
source: made up
tokens: [1, 64]
targets: [sm_90a]
operations:
  rmsnorm:
    - {{name: norm, x: bf16, weight: bf16, y: bf16, n: {HIDDEN}, residual: bf16}}
    - {{name: first_norm, x: bf16, weight: bf16, y: bf16, n: {HIDDEN}}}
"""


class Norms(OnCpu):
    """Computes norms in float32, and records whether each had a residual."""

    @property
    def normed(self) -> list[bool]:
        return vars(self).setdefault("_normed", [])

    def call(self, operation: str, *operands: Any, stream: Any = None, **words: Any) -> Any:
        (x, weight), residual = operands, words.get("residual")
        self.normed.append(residual is not None)
        total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
        wide = total.float()
        y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + words["eps"]) * weight.float()).to(x.dtype)
        found, out = (y,) if residual is None else (y, total), words.get("out")
        if out is not None:
            for to, of in zip(out if residual is not None else (out,), found, strict=True):
                to.copy_(of)
            return out
        return y if residual is None else found


@pytest.fixture
def serve(request: pytest.FixtureRequest, tmp_path: Path, start: Start) -> Callable[..., Server]:
    """A server that opens an archive of norms of HIDDEN, tuned or not."""

    def made(is_tuned: bool = True) -> Server:
        path = built_once(request, "norms_of_servers", MANIFEST) / "norms_of_servers.aot"
        if is_tuned:
            tuned(path, tmp_path / "norms.aot")
            path = tmp_path / "norms.aot"
        archive = Archive.open(path)
        lib = Norms(archive, RecordingDriver(kernels=kernels_of(archive)))
        server = start(load=lambda paths, **options: lib)
        server.lib = lib
        return server

    return made


def norm_of(server: Server, n: int = HIDDEN, name: str = "RMSNorm", **more: Any) -> Any:
    return getattr(server.modules["vllm.model_executor.layers.layernorm"], name)(n, EPS, **more)


def expected(norm: Any, x: Any, residual: Any = None) -> Any:
    total = x if residual is None else x + residual
    return nn.functional.rms_norm(total.float(), norm.weight.shape, norm.weight.float(), EPS)


def test_norms_with_a_residual_and_without_are_the_archives(serve: Callable[..., Server]) -> None:
    server = serve()
    norm = norm_of(server)
    server.serve(norm)
    x, residual = tensors((5, HIDDEN), (5, HIDDEN))
    y, total = norm(x, residual)
    assert near(y, expected(norm, x, residual))
    assert torch.equal(total, x + residual)
    assert near(norm(x), expected(norm, x))
    assert server.lib.normed == [True, False]
    assert "serves 1 of 1 norms (2 signatures preloaded" in server.lines[-1]


def test_a_model_that_inductor_compiled_calls_the_library(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    """Without the dispatcher, of which a log would tell."""
    server = serve()
    norm = norm_of(server)
    server.serve(norm)
    step = torch.compile(lambda x, r: norm(*norm(norm(x), r)), fullgraph=True, dynamic=True)
    for rows in (5, 7):
        x, residual = tensors((rows, HIDDEN), (rows, HIDDEN))
        y, total = step(x, residual)
        first = expected(norm, x)
        middle = first + residual.float()
        again = expected(norm, first, residual.float())
        assert near(y, expected(norm, again, middle))
        assert near(total, again + middle)
    assert "through torch's dispatcher" not in caplog.text
    assert server.lib.normed == [False, True, True] * 2


def test_a_compiled_model_calls_operators(serve: Callable[..., Server]) -> None:
    server = serve()
    norm, graphs = norm_of(server), Graphs()
    server.serve(norm)
    step = torch.compile(lambda x, r: norm(*norm(norm(x), r)), backend=graphs, fullgraph=True)
    x, residual = tensors((5, HIDDEN), (5, HIDDEN))
    y, _ = step(x, residual)
    assert near(y, expected(norm, *norm(norm(x), residual)))
    called = [name for name in graphs.called() if name.startswith("cute_aot")]
    assert called == ["cute_aot.rmsnorm.default", *["cute_aot.add_rmsnorm.default"] * 2]


@pytest.mark.parametrize(
    ("is_tuned", "of"),
    [
        (False, {}),
        (True, {"n": 2 * HIDDEN}),
        (True, {"name": "GemmaRMSNorm"}),
        (True, {"dtype": torch.float32}),
    ],
    ids=["only-ranked", "another-extent", "another-class", "another-type"],
)
def test_other_norms_are_left(serve: Callable[..., Server], is_tuned: bool, of: dict[str, Any]) -> None:
    server = serve(is_tuned)
    norm = norm_of(server, **of)
    server.serve(norm)
    x, residual = (t.to(norm.weight.dtype) for t in tensors((5, norm.weight.numel()), (5, norm.weight.numel())))
    assert near(norm(x, residual)[0], expected(norm, x, residual))
    assert server.lib.normed == []


def test_norms_of_a_class_that_is_not_as_it_is_known_are_left(serve: Callable[..., Server]) -> None:
    server = serve()
    norm = norm_of(server)
    del type(norm).has_weight
    server.serve(norm)
    norm(*tensors((5, HIDDEN), (5, HIDDEN)))
    assert server.lib.normed == []
    assert not any("serves nothing, vLLM's kernels do" in line for line in server.lines)


def test_a_norm_of_a_slice_is_left_where_nothing_is_added(serve: Callable[..., Server]) -> None:
    server = serve()
    norm = norm_of(server)
    server.serve(norm)
    (x,) = tensors((5, 2 * HIDDEN))
    norm(x[:, :HIDDEN])
    assert server.lib.normed == []


def test_norms_alone_are_not_what_is_required(serve: Callable[..., Server]) -> None:
    server = serve()
    with pytest.raises(RequiredError, match="'required' is 'archive', so vLLM does not start"):
        server.serve(norm_of(server), config={"cute_aot": {"archive": "norms.aot", "required": "archive"}})


@pytest.mark.parametrize(
    ("ranks", "passes", "taken"),
    [
        (2, {}, True),
        (2, {"fuse_allreduce_rms": True}, False),
        (2, {"enable_sp": True}, False),
        (1, {"fuse_allreduce_rms": True}, True),
    ],
)
def test_norms_are_vllms_where_it_fuses_them_with_sums_over_ranks(
    serve: Callable[..., Server], ranks: int, passes: dict[str, bool], taken: bool
) -> None:
    server = serve()
    norm, config = norm_of(server), server.config(MINE)
    config.parallel_config.tensor_parallel_size = ranks
    vars(config.compilation_config.pass_config).update(passes)
    server.serve(norm, config=config)
    norm(*tensors((5, HIDDEN), (5, HIDDEN)))
    assert server.lib.normed == ([True] if taken else [])


def test_tokens_of_another_type_are_vllms(serve: Callable[..., Server]) -> None:
    server = serve()
    norm = norm_of(server)
    server.serve(norm)
    (x,) = tensors((5, HIDDEN))
    norm(x.float(), x.float())
    assert server.lib.normed == []


def test_norms_are_vllms_again_where_kernels_cannot_be_loaded(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()

    def fail(*_: Any, **__: Any) -> None:
        raise DeviceError("no memory")

    monkeypatch.setattr(Norms, "preload", fail)
    norm = norm_of(server)
    server.serve(norm)
    norm(*tensors((5, HIDDEN), (5, HIDDEN)))
    assert server.lib.normed == []
    assert server.lines[-1].endswith("serves nothing, vLLM's kernels do: no memory")


@pytest.mark.parametrize(
    ("decisions", "left", "apart"),
    [
        ([Decision("linear layer", "key")], [], True),
        ([Decision(FP8, "key", besides=(Besides("few", 1, 16),))], [(INT4, "a reason")], True),
        ([Decision(FP8, "key", besides=(Besides("few", 1, 16),)), Decision(FP8, "key")], [], False),
        ([Decision("linear layer", "key")], [(FP8, "a reason")], False),
    ],
    ids=["16-bits", "few", "some-without", "left"],
)
def test_norms_that_quantise_stay_where_the_server_quantises(
    decisions: list[Decision], left: list[tuple[str, str]], apart: bool
) -> None:
    assert quantises_apart(decisions, left) is apart
