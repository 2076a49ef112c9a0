"""What serving from an archive costs the host: opening, the first launch of a kernel, a steady launch, and one from a
module that torch.compile compiled; needs a GPU.

The steady-state figure is host time of `lib.gemm(a, b, out=...)` beside `torch.mm(..., out=...)` in the same process,
in blocks that take turns; the device is far ahead, so that the queue never fills.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import ends, out_argument, write

import runtime
from aot.tune import measure
from aot.tune.elements import TORCH_DTYPES
from runtime import native
from runtime.container.archive import Archive
from runtime.device.prepared_launch import PooledLaunch
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.program.record import TensorArgument
from runtime.tables.dispatch import Dispatch, serves

BLOCK_LAUNCHES = 200


def median_ms(action: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median, smallest and largest wall time of an action in milliseconds."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        samples.append((time.perf_counter() - start) * 1e3)
    return {
        "median": round(statistics.median(samples), 4),
        "min": round(min(samples), 4),
        "max": round(max(samples), 4),
    }


def host_us(
    actions: dict[str, Callable[[], Any]], blocks: int, launches_per_call: int = 1
) -> dict[str, dict[str, float]]:
    """Host time of one call in microseconds, over blocks of calls that take turns; a block is of so few launches that
    the queue of the device never fills, at 1,024 of them."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in actions}
    calls = max(1, BLOCK_LAUNCHES // launches_per_call)
    for _ in range(blocks):
        for name, action in actions.items():
            torch.cuda.synchronize()
            for _ in range(10):
                action()
            start = time.perf_counter()
            for _ in range(calls):
                action()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return {
        n: {"median": round(statistics.median(s), 3), "min": round(min(s), 3), "max": round(max(s), 3)}
        for n, s in samples.items()
    }


def bare_launch(library: Any, a: Any, b: Any, d: Any) -> Callable[[], Any]:
    """cuLaunchKernelEx alone through ctypes, with everything prepared: the least that Python can do with it."""
    import torch

    library.gemm(a, b, out=d)
    found = next(iter(library._now.plans.by_call.values()))
    (shape,) = found.function.record.plan(found.plan.values)
    kernel = found.function._kernels[shape.kernel]
    pointers = (a.data_ptr(), b.data_ptr(), d.data_ptr())
    driver = library._driver
    ready = PooledLaunch(driver._cuda.cuLaunchKernelEx, kernel, shape, print)
    ready.launch(pointers, torch.cuda.current_stream().cuda_stream)
    _, _, config, parameters, _ = ready._pool[0]

    def launch(_keep: Any = ready, call: Any = driver._cuda.cuLaunchKernelEx, where: int = config.address) -> None:
        call(where, kernel, parameters, None)

    return launch


def open_and_close(path: Path) -> None:
    """Open an archive: header, index and their checks."""
    Archive.open(path).close()


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="a tuned archive for this GPU")
    parser.add_argument("--large", type=Path, help="an archive of 1,000 kernels, some of them for this GPU")
    parser.add_argument("--universal", type=Path, help="an archive that serves any N and K (aot build --universal)")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--linears", type=int, default=8, help="layers of the module that is compiled")
    out_argument(parser)
    options = parser.parse_args()
    import torch

    environment = measure.environment() | {"native": native._native is not None}
    torch.zeros(1, device="cuda")
    results: dict[str, Any] = {}
    for label, path in (("tuned", options.archive), ("large", options.large)):
        if path is None:
            continue
        with Archive.open(path) as archive:
            functions, size = len(archive.functions), archive.file_bytes
        results[f"open_{label}_ms"] = median_ms(functools.partial(open_and_close, path), 51)
        results[f"{label}_functions"], results[f"{label}_bytes"] = functions, size
    results |= first_launches(options.large or options.archive)
    m, n, k = 16, 4096, 4096
    library = runtime.load(options.archive)
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    bt = b.t()
    steady = host_us(
        {
            "lib.gemm(a, b, out=d)": lambda: library.gemm(a, b, out=d),
            "torch.mm(a, b.t(), out=d)": lambda: torch.mm(a, bt, out=d),
            "lib.gemm(a, b)": lambda: library.gemm(a, b),
            "torch.mm(a, b.t())": lambda: torch.mm(a, bt),
            "cuLaunchKernelEx, prepared": bare_launch(library, a, b, d),
        },
        options.blocks,
    )
    results["host_us"] = steady
    ours, theirs = (steady[f]["median"] for f in ("lib.gemm(a, b, out=d)", "torch.mm(a, b.t(), out=d)"))
    results["host_ratio"] = round(ours / theirs, 3)
    results["compiled_host_us"] = compiled_calls(library, m, n, options.linears, options.blocks)
    fresh = iter(range(2000, 4000))

    def new_shape() -> None:
        rows = next(fresh)
        library.gemm(a_large[:rows], b, out=d_large[:rows])

    a_large = torch.randn(4096, k, device="cuda", dtype=torch.bfloat16)
    d_large = torch.empty(4096, n, device="cuda", dtype=torch.bfloat16)
    new_shape()
    results["new_m_ms"] = median_ms(new_shape, 200)
    results |= first_calls(options.archive)
    if options.universal is not None:
        results |= any_shape(options.universal)
    for name, value in results.items():
        print(f"{name:24s} {value}")
    write(options.out, environment, results=results)
    return 0


def compiled_calls(library: Any, m: int, n: int, layers: int, blocks: int) -> dict[str, Any]:
    """Host time of one call of a compiled module of linear layers of N = K = `n` one after the other, in microseconds,
    with torch's products and with the library's, and what a layer of the latter takes more; empty where the library
    does not serve them."""
    import torch

    import runtime.torch

    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    actions: dict[str, Callable[[], Any]] = {}
    for name in ("torch", "archive"):
        made = [torch.nn.Linear(n, n, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        model = torch.nn.Sequential(*made).eval()
        if name == "archive" and not all(x.taken for x in runtime.torch.replace_linears(model, library).layers):
            return {}
        actions[name] = functools.partial(torch.compile(model, fullgraph=True, dynamic=True), x)
    with torch.inference_mode():
        for action in actions.values():
            for _ in range(3):
                action()
        found: dict[str, Any] = host_us(actions, blocks, layers)
    more = (found["archive"]["median"] - found["torch"]["median"]) / layers
    return found | {"layers": layers, "more_per_layer": round(more, 3)}


def first_launches(path: Path) -> dict[str, Any]:
    """Time the first launch of each GEMM kernel for this GPU, the library being open and the context there."""
    import torch

    library = runtime.load(path)
    capability = torch.cuda.get_device_capability()
    samples = []
    for name, function in library.functions.items():
        if "batched" in name or not serves(function.target, capability):
            continue
        tensors = [x for x in function.record.leaves() if isinstance(x, TensorArgument)]
        if [t.name for t in tensors] != ["a", "b", "d"]:
            continue
        shapes = {"a": (64, 4096), "b": (4096, 4096), "d": (64, 4096)}
        given = [torch.zeros(shapes[t.name], device="cuda", dtype=TORCH_DTYPES[t.dtype]) for t in tensors]
        torch.cuda.synchronize()
        start = time.perf_counter()
        function(*given, stream=torch.cuda.current_stream())
        samples.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    library.close()
    return {
        "first_launch_ms": {
            "median": round(statistics.median(samples), 3),
            "max": round(max(samples), 3),
            "kernels": len(samples),
            "the_very_first": round(samples[0], 3),
        }
    }


def first_calls(path: Path) -> dict[str, Any]:
    """Time first calls after `preload`: of each kernel that a plain 16-bit signature has, and of each with one row.

    All that an M which comes later takes of these is in `new_m_ms`: it is planned from what its kernel's first one had.
    """
    import torch

    with Archive.open(path) as archive:
        entries = Dispatch.from_json(archive.table(GEMM.name), GEMM).entries_for(torch.cuda.get_device_capability())
    library = runtime.load(path)
    library.preload()
    samples: dict[str, list[float]] = {"first_of_kernel_ms": [], "one_row_ms": []}
    for entry in entries:
        s = entry.signature
        if s != Signature(s.a, s.b, s.d, s.accumulator, "none", s.n, s.k) or DTYPES[s.a].bits != 16:
            continue
        b = torch.zeros(s.n, s.k, device="cuda", dtype=TORCH_DTYPES[s.b])
        for m in dict.fromkeys([2, *(bound + 1 for bound, _ in entry.ranges if bound), 1]):
            a = torch.zeros(m, s.k, device="cuda", dtype=TORCH_DTYPES[s.a])
            d = torch.zeros(m, s.n, device="cuda", dtype=TORCH_DTYPES[s.d])
            torch.cuda.synchronize()
            start = time.perf_counter()
            library.gemm(a, b, out=d)
            samples["one_row_ms" if m == 1 else "first_of_kernel_ms"].append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    library.close()
    return {
        name: {"median": round(statistics.median(found), 4), "max": round(max(found), 4), "calls": len(found)}
        for name, found in samples.items()
    }


def any_shape(path: Path) -> dict[str, Any]:
    """Time calls that a universal table serves, all of its functions being loaded: the first of an N and K, and then
    those of M values that come later, apart by whether their function was called for this N and K before."""
    import torch

    library = runtime.load(path)
    start = time.perf_counter()
    functions = len(library.preload())
    found: dict[str, Any] = {"universal_preload_ms": round((time.perf_counter() - start) * 1e3, 1)}
    found["universal_functions"] = functions
    k, most = 2048, 4096
    samples: dict[str, list[float]] = {"first_of_shape_ms": [], "new_m_new_function_ms": [], "new_m_predicted_ms": []}
    a = torch.randn(most, k, device="cuda", dtype=torch.bfloat16)
    for n in range(1024, 4096, 128):
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        d = torch.empty(most, n, device="cuda", dtype=torch.bfloat16)
        entry = library.entry(Signature("bf16", "bf16", "bf16", "f32", "none", n, k))
        seen: set[str] = set()
        for place, m in enumerate((100, *range(2, 64, 9), *range(70, most, 331))):
            name = entry.best(m)
            label = "new_m_predicted_ms" if name in seen else "new_m_new_function_ms" if place else "first_of_shape_ms"
            seen.add(name)
            torch.cuda.synchronize()
            start = time.perf_counter()
            library.gemm(a[:m], b, out=d[:m])
            samples[label].append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    library.close()
    return found | {
        name: {"median": round(statistics.median(of), 4), "max": round(max(of), 4), "calls": len(of)}
        for name, of in samples.items()
    }


if __name__ == "__main__":
    sys.exit(ends(main))
