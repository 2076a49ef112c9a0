"""The Python examples of docs/serving.md and docs/torch.md run in order, with torch on the CPU and a made-up GPU.

The library looks a signature up as it does on a GPU, and then computes with torch.
"""

from __future__ import annotations

import contextlib
import re
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from runtime.gemm.signature import Signature
from runtime.serve.layers import open_archives
from runtime.serve.options import Options

from .recording_driver import RecordingDriver, entry, operands_record, signature, write_archive
from .torch_stand_in import OnCpu

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = "serving.md", "torch.md"
NEXT = re.compile(r"^(#+ [^\n]*)$|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALLER = {'device="cuda"': 'device="cpu"', "6144": "192", "4096": "128"}  # so that it takes no time
FILES = "model.aot", "base.aot", "patch.aot", "last-week.aot", "universal.aot"
WORDS: tuple[dict[str, Any], ...] = ({}, {"epilogue": "residual"}, {"epilogue": "swiglu"}, {"overlap": "weights"})
SIGNATURES = [signature(192, 128, **words) for words in WORDS]


class Served(OnCpu):
    """Computes only what the archive has."""

    def gemm(self, a: Any, b: Any, *, out: Any = None, stream: Any = None, **more: Any) -> Any:
        if "scale_ab" in more:  # of 4 bits, which no archive here has and no CPU multiplies
            return torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
        if self._options.on_miss == "error":
            words = {name: more[name] for name in ("epilogue", "overlap") if name in more}
            if more.get("residual") is not None:
                words["epilogue"] = "residual"
            self.entry(Signature.from_json(signature(*b.shape, **words)))
        return super().gemm(a, b, out=out, stream=stream, **more)


def examples() -> list[tuple[str, str]]:
    """The examples in order, each with the page and the heading that it stands under."""
    found, heading = [], ""
    for page in PAGES:
        for title, code in NEXT.findall((DOCS / page).read_text()):
            heading = f"{page}, {title}" if title else heading
            if code:
                found.append((heading, code))
    return found


def test_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [operands_record(f"f{i}", s) for i, s in enumerate(SIGNATURES)]
    rows = [entry(s, [(None, f"f{i}")], invariant=[(None, f"f{i}")]) for i, s in enumerate(SIGNATURES)]
    kernels: dict[bytes, Any] = {}
    for name in FILES:
        kernels |= write_archive(tmp_path / name, records, rows[:1] if name == "last-week.aot" else rows)

    def load(path: Any, device: Any = None, on_miss: str = "error", **options: Any) -> Served:
        paths = [path] if isinstance(path, str | Path) else path
        return Served(open_archives(paths), RecordingDriver(kernels=kernels), Options(on_miss, **options))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "load", load)
    monkeypatch.setattr(runtime, "universal", lambda: tmp_path / "universal.aot")
    monkeypatch.setattr(torch, "compile", lambda model=None, **_: model or (lambda function: function))
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    names: dict[str, Any] = {"load_weights": lambda: torch.nn.Linear(8, 8)}
    for heading, code in examples():
        for given, taken in SMALLER.items():
            code = code.replace(given, taken)
        with torch.inference_mode():
            exec(compile(code, heading, "exec"), names)
    assert names["y"].shape == (16, 192)
    assert names["h"].shape == (16, 96)
    assert names["report"].signatures == {"bf16_bf16_bf16_f32_none_n192_k128"}
