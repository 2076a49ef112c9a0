"""What a compiled variant must be before it may be packed. Compiles in a process of its own, as workers do."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A row-wise kernel that indexes an array of registers at run time, which puts the array in local memory.
SPILLING = """
import cutlass
from cutlass import cute

import aot.compile.lower
import aot.search.provider
from aot.search.provider import Buildable
from aot.providers.arguments import stand_ins
from aot.search.variants import Variant
from runtime.program.arguments import StreamArgument, Symbol, TensorArgument

TREE = [
    TensorArgument("x", "f32", ("n",), (1,), 16),
    StreamArgument("stream"),
]
SYMBOLS = {"n": Symbol(32, 4)}


class Spilling:
    def __init__(self, dynamic):
        self.dynamic = dynamic

    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        self.kernel(x).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor((64,), cutlass.Float32)
        values.fill(0.0)
        for i in range(cute.size(x)):
            at = cutlass.Int32(x[i]) if cutlass.const_expr(self.dynamic) else 5
            values[at] = values[at] + x[i]
        for i in cutlass.range_constexpr(64):
            x[thread * 64 + i] = values[i]


class Provider:
    def build(self, variant):
        return Buildable(Spilling(variant.options["dynamic"]), stand_ins(TREE, SYMBOLS), TREE, SYMBOLS)


aot.search.provider.provider = lambda name: Provider()
for dynamic in (False, True):
    variant = Variant("own", "spilling", "sm_90a", (("dynamic", dynamic),), ("f32",) * 3, operation="test")
    try:
        print("compiled", aot.compile.lower.lower(variant).record["kernels"][0]["local_bytes"])
    except aot.compile.lower.LoweringError as error:
        print("refused", error)
"""


def test_kernel_that_spills_is_refused_and_its_twin_is_not(tmp_path: Path) -> None:
    (tmp_path / "spilling.py").write_text(SPILLING)
    environment = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, tmp_path / "spilling.py"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert len(run.stdout.splitlines()) == 2, run.stdout + run.stderr[-2000:]
    first, second = run.stdout.splitlines()
    assert first == "compiled 0"
    assert second.startswith("refused own.spilling")
    assert re.search(r" [0-9]+ bytes a thread in local memory", second)
