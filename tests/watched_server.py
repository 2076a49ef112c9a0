"""A process in which the plugin serves a stand-in for vLLM, watched from before all else for what is compiled.

    python -m tests.watched_server [start | load]

Prints as JSON how many products were computed, how many kernels were loaded and launched, and what was compiled. With
`start` a compiler is started, as by code of `runtime/`, when kernels are preloaded; with `load` at each product.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import compilations

TOKENS = 1, 2, 3, 16, 17, 200, 4096  # the stand-in has graphs of 1, 2 and 4


def main() -> None:
    compilations.watch()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([*_served(Path(folder), sys.argv[1:]), compilations.counted()]))


def _served(folder: Path, compiling: list[str]) -> tuple[int, int, int]:
    """Products, kernels loaded, and launches of a server from the plugin's registration on.

    Where no other compiler is to be started, torch compiles around one of the products.
    """
    import torch

    from runtime.vllm import register
    from runtime.vllm.plugin import Plugin

    from .torch_stand_in import HIDDEN, INNER, VOCAB, OnCpu, library
    from .vllm_stand_in import SERVED, Server, stand_in

    for name, when in (("preload", "start"), ("gemm", "load")):
        if when in compiling:
            setattr(OnCpu, name, _after_a_compiler(getattr(OnCpu, name)))
    sys.modules.update(modules := stand_in())
    lib = library(folder, SERVED)
    server = Server(modules, lib, None)  # type: ignore[arg-type]  # which keeps what is logged
    Plugin.__init__.__defaults__ = (server.load,)  # instead of `runtime.load`, whose driver needs a GPU
    register()
    layers = server.linear(HIDDEN, HIDDEN), server.linear(INNER, HIDDEN), server.head(VOCAB, HIDDEN)
    server.serve(*layers).compile_or_warm_up_model()
    with torch.inference_mode():
        for m in TOKENS:
            for layer in layers:
                layer(torch.randn(m, HIDDEN).bfloat16())
        if not compiling:
            torch.compile(lambda x: layers[0](x).relu(), dynamic=True)(torch.randn(5, HIDDEN).bfloat16())
    return len(lib.calls), lib.stats().kernels_loaded, _launched(lib, [layer.weight.shape for layer in layers])


def _launched(lib: Any, shapes: list[Any]) -> int:
    """Launches of the library's own `gemm`, which the stand-in above computes with torch instead."""
    from runtime import Library

    from .recording_driver import FakeTensor, FakeTorch

    sys.modules["torch"] = FakeTorch()
    before = lib.stats().launches
    for m in TOKENS:
        for n, k in shapes:
            Library.gemm(lib, FakeTensor((m, k)), FakeTensor((n, k)), out=FakeTensor((m, n)), stream=0)
    return int(lib.stats().launches - before)


def _after_a_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function before which a compiler is started, in a frame of a file of `runtime/`."""
    names: dict[str, Any] = {"subprocess": subprocess, "function": function}
    text = (
        "def call(*given, **more):\n"
        "    subprocess.run(['gcc', '--version'], stdout=subprocess.DEVNULL)\n"
        "    return function(*given, **more)\n"
    )
    exec(compile(text, str(ROOT / "runtime" / "serve" / "plan.py"), "exec"), names)
    called: Callable[..., Any] = names["call"]
    return called


if __name__ == "__main__":
    main()
