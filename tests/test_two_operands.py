"""An operation of another package with one input and one output, of two element types: built, packed, shown, called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aot.search.legal import of_name, unsuited
from aot.search.operation import building
from aot.search.unserved import why_none
from runtime import KernelMiss, Library
from runtime.container.archive import Archive
from runtime.program import operation as operations
from runtime.program.operation import operation

from .command_line import Run
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from .shared import built_once

# y[m, n] = 2 * b[m, n]. The input has the name of a GEMM's B, and is not meant to be taken for one.
OPERATION = """
from dataclasses import asdict, dataclass

from runtime.program.operation import Asked, Operand, Operation, contiguous


@dataclass(frozen=True)
class Signature:
    b: str
    y: str
    n: int
    operation = "doubling"

    def key(self):
        return f"{self.b}_{self.y}_doubling_n{self.n}"

    def operands(self):
        return Operand("b", self.b, ("M", "N")), Operand("y", self.y, ("M", "N"))

    def numbers(self):
        return ()

    def extents(self):
        return {"N": self.n}

    def to_json(self):
        return asdict(self)


class Doubling(Operation):
    name = "doubling"
    fields = ("b", "y", "n")

    def read(self, obj):
        return Signature(**obj)

    def of_key(self, key):
        b, y, *rest = key.split("_")
        return Signature(b, y, int(rest[1][1:])) if rest[:1] == ["doubling"] else None

    def differences(self, have, wanted):
        return [f"{f} is {getattr(have, f)}, wanted {getattr(wanted, f)}" for f in self.fields if have != wanted]

    def distance(self, have, wanted):
        return float(have != wanted)

    def arguments(self, signature, m, device):
        return contiguous(signature, m, device)

    def ask(self, view, b, *, out):
        seen, y = view(b, "b", False), view(out, "out", True)
        return Asked(Signature(seen.dtype, y.dtype, seen.shape[1]), seen.shape[0], (seen, y), out)


DOUBLING = Doubling()
"""
PROVIDER = """
from aot.providers.arguments import stand_ins
from aot.search.legal import legal_functions
from aot.search.provider import Buildable
from aot.search.variants import Family
from runtime.program.arguments import StreamArgument, Symbol, TensorArgument

ELEMENTS = ("f16", "f32"), ("f16", "f16")


class Doublings:
    name = "doublings"
    families = {"row": Family("doubling", ("sm_90a",), ELEMENTS, {"threads": (64, 128)}, batched=(False,))}

    def variants(self, target, signature):
        return []

    def functions(self, target):
        return legal_functions(self.name, target)

    def source_digest(self, family):
        return "0" * 64

    def build(self, variant):
        from doubling_kernel import Double

        symbols = {"m": Symbol(32, 1), "n": Symbol(32, 1), "ldb": Symbol(64, 1), "ldy": Symbol(64, 1)}
        b, y = variant.elements
        tree = [
            TensorArgument("b", b, ("m", "n"), ("ldb", 1), 2),
            TensorArgument("y", y, ("m", "n"), ("ldy", 1), 2),
            StreamArgument("stream"),
        ]
        return Buildable(Double(variant.integer("threads")), stand_ins(tree, symbols), tree, symbols)
"""
KERNEL = """
import cutlass
from cutlass import cute


class Double:
    def __init__(self, threads):
        self.threads = threads

    @cute.jit
    def __call__(self, b: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(b, y).launch(grid=[cute.size(b, mode=[0]), 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, b: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for n in cutlass.range(thread, cute.size(b, mode=[1]), self.threads):
            y[row, n] = (b[row, n].to(cutlass.Float32) * 2.0).to(y.element_type)
"""
MANIFEST = """
format: 1
model: doubled
source: made up
tokens: [1, 64]
targets: [sm_90a]
operations:
  doubling:
    - {name: embedding, b: f16, y: f32, n: 4097}
"""
MODULES = {"doubling_operation": OPERATION, "doubling_provider": PROVIDER, "doubling_kernel": KERNEL}
NAME = "doublings.row.f16_f32_f32.threads64.sm_90a"


def install(found: Path) -> None:
    """A distribution with the operation and a provider of kernels for it."""
    info = found / "doubling-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1\n")
    points = f"[{operations.GROUP}]\ndoubling = doubling_operation:DOUBLING\n"
    (info / "entry_points.txt").write_text(points + "[cute_aot.providers]\ndoublings = doubling_provider:Doublings\n")
    for module, text in MODULES.items():
        (found / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That distribution is on the path."""
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    operations._found.cache_clear()
    building.cache_clear()
    yield
    operations._found.cache_clear()
    building.cache_clear()
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("site")
def test_variants_of_two_operands_are_enumerated_named_and_read_back() -> None:
    wanted = operation("doubling").read({"b": "f16", "y": "f32", "n": 4097})
    found = building("doubling").variants("sm_90a", wanted)
    assert [v.name() for v in found] == [NAME, NAME.replace("threads64", "threads128")]
    assert [of_name(v.name()) for v in found] == found
    other = operation("doubling").read({"b": "f16", "y": "bf16", "n": 4097})
    assert unsuited(found[0], other) == "row is of f16, f32, not f16, bf16"
    assert why_none("sm_90a", other) == "none for sm_90a has the element types f16, bf16; no target can"


@pytest.fixture(scope="session")
def doubled(request: pytest.FixtureRequest) -> Path:
    """The archive of the manifest."""
    return built_once(request, "doubled", MANIFEST, install=install) / "doubled.aot"


@pytest.mark.usefixtures("site")
def test_an_operation_of_two_operands_is_built_listed_verified_and_called(
    doubled: Path, torch: FakeTorch, run: Run
) -> None:
    path = doubled
    assert run("ls", path).out.splitlines()[0].split()[:2] == ["doublings", "signature"]
    shown = run("show", path, "embedding").out
    assert shown.startswith("f16_f32_doubling_n4097 on sm_90a: ranked\ndoublings: embedding\n")
    assert "\ntakes: b f16 (M, 4097), y f32 (M, 4097)\n" in shown
    verified = run("verify", path)
    assert verified.status == 0, verified.out
    with Archive.open(path) as archive:
        assert NAME in archive.functions
        driver = RecordingDriver(kernels=kernels_of(archive))
        library = Library(archive, driver)
        b, y = FakeTensor((5, 4097), "float16"), FakeTensor((5, 4097), "float32")
        assert library.call("doubling", b, out=y) is y
        assert (driver.launches[-1].grid, driver.launches[-1].block) == ((5, 1, 1), (64, 1, 1))
        with pytest.raises(KernelMiss, match="no kernel for f16_f16_doubling_n4097"):
            library.call("doubling", b, out=b)
        library.close()
