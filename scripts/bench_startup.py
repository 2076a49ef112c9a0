"""What an archive adds to the start of a process, and what cute.compile and torch.compile would; needs a GPU.

Every figure is of processes of their own, which take turns: from the parent's spawn to the end of the first GEMM,
beside a process that does the same but for the archive. The parent's clock is the child's (CLOCK_MONOTONIC). "beside"
are those where a thread prepares the archive while the context is created; what `first` takes is then all that is left
when there is one. To compile the archive's kernels anew, with `--jit`, the builder must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import ROOT, ends, out_argument, write

from runtime.errors import AotError

M, N, K = 16, 4096, 4096
_JIT_TOKENS = (1, 64, 1024)

_IMPORT_TORCH = """
import torch
"""
_CONTEXT_OF_TORCH = """
began_context = time.monotonic()
a = torch.randn({m}, {k}, device="cuda", dtype=torch.bfloat16)
b = torch.randn({n}, {k}, device="cuda", dtype=torch.bfloat16)
d = torch.empty({m}, {n}, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
said["context"] = time.monotonic() - began_context
"""
_TORCH = _IMPORT_TORCH + _CONTEXT_OF_TORCH
_DRIVER = """
import ctypes
began_context = time.monotonic()
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
cuda.cuCtxSetCurrent(context)
pointer = ctypes.c_uint64()
cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 26))
said["context"] = time.monotonic() - began_context
"""
# A thread that prepares the archive while the driver creates the context, for which it leaves the interpreter alone.
_BESIDE = """
import threading
def prepare():
    global library
    import runtime
    library = runtime.load(archive, device=0)
    said["kernels"] = len(library.preload({what}))
thread = threading.Thread(target=prepare)
thread.start()
"""
_ONE = _BESIDE.replace("{what}", 'only=["bf16_bf16_bf16_f32_none_n{n}_k{k}"]')
_ALL = _BESIDE.replace("{what}", "")
_READY = """
began = time.monotonic()
thread.join()
"""
_LOAD = """
began = time.monotonic()
import runtime
runtime.load  # with which all that serves is imported
said["import"] = time.monotonic() - began
began = time.monotonic()
library = runtime.load(archive)
said["load"] = time.monotonic() - began
"""
_END = """
torch.cuda.synchronize()
said["total"] = time.monotonic() - start
"""
_FIRST = """
library.gemm(a, b, out=d)
torch.cuda.synchronize()
said["first"] = time.monotonic() - began
"""
_FIRST_OF_DRIVER = """
class Matrix:
    def __init__(self, where, rows, columns):
        more = dict(typestr="<V2", descr=[("bfloat16", "<V2")], stream=None)
        self.__cuda_array_interface__ = dict(shape=(rows, columns), data=(where, False), version=3, **more)
a, b, d = (Matrix(pointer.value + at, *s) for at, s in ((0, ({m}, {k})), (1 << 20, ({n}, {k})), (40 << 20, ({m}, {n}))))
library.gemm(a, b, out=d)
cuda.cuCtxSynchronize()
said["first"] = time.monotonic() - began
said["total"] = time.monotonic() - start
"""
_NOW = """
began = time.monotonic()
"""
# What each child does; `said` is printed in the end, seconds by name.
CHILDREN = {
    "torch, no GEMM": _TORCH + _END,
    "torch, the archive's GEMM": _TORCH + _LOAD + _NOW + _FIRST + _END,
    "torch, the archive's GEMM, beside": _IMPORT_TORCH + _ONE + _CONTEXT_OF_TORCH + _READY + _FIRST + _END,
    "torch, torch.mm": _TORCH + "torch.mm(a, b.t(), out=d)" + _END,
    "torch, preload": _TORCH
    + """
import runtime
library = runtime.load(archive)
began = time.monotonic()
said["kernels"] = len(library.preload())
said["preload"] = time.monotonic() - began
"""
    + _END,
    "torch, preload beside": _IMPORT_TORCH + _ALL + _CONTEXT_OF_TORCH + _READY + _FIRST + _END,
    "torch, cute.compile": _TORCH
    + """
import os
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
import runtime
from runtime.gemm.operation import GEMM
from runtime.tables.dispatch import Dispatch
library = runtime.load(archive)
names, found = set(library.preload()), {}
began = time.monotonic()
from aot.compile.lower import lower
from aot.search.provider import PROVIDERS, provider
for entry in Dispatch.from_json(library._now.archives[0].table(GEMM.name), GEMM).entries:
    for variant in (v for p in PROVIDERS for v in provider(p).variants("sm_90a", entry.signature)):
        if variant.name() in names and len(found) < {jit}:
            found[variant.name()] = variant
said["choose"] = time.monotonic() - began
began = time.monotonic()
for variant in found.values():
    lower(variant)
said["compile"] = time.monotonic() - began
said["kernels"] = len(found)
"""
    + _END,
    "torch.compile, max-autotune": _TORCH
    + """
began = time.monotonic()
compiled = torch.compile(lambda x, y: x @ y.t(), mode="max-autotune-no-cudagraphs")
compiled(a, b)
torch.cuda.synchronize()
said["first"] = time.monotonic() - began
"""
    + _END,
    # What preloading makes ready, but for a few M only: every plain 16-bit layer of the archive.
    "torch.compile, max-autotune of a model": _TORCH
    + """
import runtime
from runtime.gemm.operation import GEMM
from runtime.tables.dispatch import Dispatch
library = runtime.load(archive)
entries = Dispatch.from_json(library._now.archives[0].table(GEMM.name), GEMM).entries
found = [e.signature for e in entries]
plain = [(s.n, s.k) for s in found if s.key() == f"bf16_bf16_bf16_f32_none_n{s.n}_k{s.k}"]
library.close()
compiled = torch.compile(lambda x, y: x @ y.t(), mode="max-autotune-no-cudagraphs", dynamic=False)
torch._dynamo.config.recompile_limit = 1000
began = time.monotonic()
for n, k in plain:
    y = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    for m in {tokens}:
        compiled(torch.randn(m, k, device="cuda", dtype=torch.bfloat16), y)
torch.cuda.synchronize()
said["compile"] = time.monotonic() - began
said["gemms"] = len(plain) * len({tokens})
"""
    + _END,
    "driver, context only": _DRIVER
    + """
cuda.cuCtxSynchronize()
said["total"] = time.monotonic() - start
""",
    "driver, the archive's GEMM": _DRIVER + _LOAD + _NOW + _FIRST_OF_DRIVER,
    "driver, the archive's GEMM, beside": _ONE + _DRIVER + _READY + _FIRST_OF_DRIVER,
}
COUNTS = ("kernels", "gemms")
_BEFORE = """
import sys, time
start, archive = float(sys.argv[1]), sys.argv[2]
said = {}
said["python"] = time.monotonic() - start
"""
_AFTER = """
import json
print(json.dumps(said))
"""


def code_of(name: str, jit: int) -> str:
    """What one runs."""
    code = CHILDREN[name]
    for word, number in (("m", M), ("n", N), ("k", K), ("jit", jit), ("tokens", _JIT_TOKENS)):
        code = code.replace("{" + word + "}", str(number))
    return _BEFORE + code + _AFTER


def child(name: str, archive: Path, jit: int) -> dict[str, float]:
    """Run one; seconds by name."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        paths = [str(ROOT), environment.get("PYTHONPATH", "")]
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        command = [sys.executable, "-c", code_of(name, jit), str(time.monotonic()), str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise AotError(f"{name}: {(done.stderr.strip().splitlines() or ['it ended without a word'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="a tuned archive for this GPU, or one of a thousand kernels")
    parser.add_argument("--preload", type=Path, help="the tuned archive of one model, whose kernels are preloaded")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--jit", type=int, default=0, help="of the kernels preloaded, compile so many in one process")
    parser.add_argument("--skip", nargs="*", default=[], choices=list(CHILDREN))
    out_argument(parser)
    options = parser.parse_args()
    samples: dict[str, list[dict[str, float]]] = {}
    names = list(CHILDREN)
    for repeat in range(options.repeats + 1):
        # What a process leaves behind on the GPU is cleaned up while the next one starts, so each follows others.
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            slow = "compile" in name
            if name in options.skip or (slow and repeat not in (1, 2)) or ("cute" in name and not options.jit):
                continue
            of_model = "preload" in name or "cute" in name or "model" in name
            archive = options.preload if of_model and options.preload else options.archive
            found = child(name, archive, options.jit)
            if repeat:  # the first finds files that nobody has read
                samples.setdefault(name, []).append(found)
    results: dict[str, Any] = {}
    for name in (name for name in names if name in samples):
        runs = samples[name]
        results[name] = {
            part: {
                "median": round(statistics.median(r[part] for r in runs), 6),
                "min": round(min(r[part] for r in runs), 6),
                "max": round(max(r[part] for r in runs), 6),
            }
            for part in runs[0]
        }
        shown = (f"{p}={x['median'] * 1e3:.1f}ms" for p, x in results[name].items() if p not in COUNTS)
        print(name, *shown, flush=True)
    from aot.tune import measure

    write(options.out, measure.environment(), unit="s, but for kernels and gemms, which are counts", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
