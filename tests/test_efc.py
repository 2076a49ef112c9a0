"""Epilogues on Blackwell by the Operator API's kernel with a function for an epilogue (EFC), from a signature to a
launch. No GPU that runs it was at hand: what our epilogue says is held against the reference, what a kernel is given is
seen, and what it computes is not."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot.providers.operator_api import dense, fused
from aot.providers.operator_api.operator import found_design
from aot.search.legal import illegal, legal_variants
from aot.search.unserved import why_none
from aot.search.variants import Variant
from runtime import LayoutError, Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.numbers.epilogue import EPILOGUES, Epilogue
from runtime.program.arguments import TensorArgument

from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from .shared import built_once

PRODUCTS = [
    (x, x, d) for x in ("bf16", "f16", "e4m3") for d in ("bf16", "f16", "e4m3") if x == "e4m3" or d in (x, "e4m3")
]
FAMILY = "sm100_static_persistent_efc"
UNGATED = [word for word, epilogue in EPILOGUES.items() if not epilogue.gated]
ALL_PARTS = "bias+silu+residual+scale"


def of(types: tuple[str, str, str], epilogue: str, scaling: str = "none") -> Signature:
    return Signature(*types, "f32", epilogue, 512, 1024, scaling=scaling)


FP8 = of(("e4m3", "e4m3", "bf16"), ALL_PARTS, "row_column")


def efc(target: str, signature: Signature) -> list[Variant]:
    return [v for v in legal_variants("cutlass_operators", target, signature) if v.family == FAMILY]


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("types", PRODUCTS, ids="_".join)
def test_every_product_has_every_epilogue_but_gates(target: str, types: tuple[str, str, str]) -> None:
    for epilogue in UNGATED[1:]:
        assert efc(target, of(types, epilogue)), epilogue


@pytest.mark.parametrize("scaling", ["tensor", "row_column"])
def test_e4m3_is_scaled_with_and_without_an_epilogue(scaling: str) -> None:
    for epilogue in ("none", "bias+silu"):
        assert efc("sm_100a", of(("e4m3", "e4m3", "e4m3"), epilogue, scaling))


def test_gates_are_refused_with_who_has_them() -> None:
    assert why_none("sm_100a", of(("bf16",) * 3, "swiglu")) == "none for sm_100a has the epilogue swiglu; sm_90a can"


def test_what_needs_no_epilogue_is_left_to_the_kernel_with_more_schedulers() -> None:
    types = ("bf16",) * 3
    assert not efc("sm_100a", of(types, "none"))
    for v in efc("sm_100a", of(types, "bias"))[:3]:
        assert illegal(replace(v, epilogue="none")) is None, "legal all the same"


def test_choices_are_those_that_the_operator_api_offers() -> None:
    ops, torch = pytest.importorskip("cutlass.operators"), pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = efc("sm_100a", of(("bf16",) * 3, "bias"))
    with FakeTensorMode():
        found = ops.get_operators(dense.arguments(torch, given[0]), target_sm="100a")
    theirs = [d for o in found if (d := found_design(o.metadata)).operator_class == "PersistentDenseGemmEFCOperator"]
    assert len(theirs) == len(given) > 100
    assert set(map(str, theirs)) == {str(fused.design(v)) for v in given}


class Said:
    """A tensor of an epilogue, as torch has it."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def load(self) -> Any:
        return self.numbers.float()

    def store(self, numbers: Any) -> None:
        self.numbers = numbers

    @property
    def remap_modes(self) -> Said:
        return self

    def __getitem__(self, modes: tuple[Any, ...]) -> Said:
        along_m, along_n, _ = (mode == 0 for mode in modes)
        return Said(self.numbers[:, None] if along_m else self.numbers[None, :] if along_n else self.numbers)


class InTorch:
    """The functions that an epilogue may use, of f32 tensors."""

    def __init__(self, sums: Any) -> None:
        self.accum = lambda: sums

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, {"rcp": "reciprocal"}.get(name, name))
        return lambda *args, **how: found(*args)


@pytest.mark.parametrize("epilogue", [w for w in UNGATED if w.startswith("bias")])
@pytest.mark.parametrize("scaling", ["tensor", "row_column"])
def test_an_epilogue_says_what_the_reference_says(epilogue: str, scaling: str) -> None:
    pytest.importorskip("cutlass.operators")
    torch = pytest.importorskip("torch")
    from aot.tune.gemm.operands import Weights, reference

    signature, m = of(("e4m3", "e4m3", "bf16"), epilogue, scaling), 33
    operands = Weights(signature, m, 0, 0, device="cpu").operands(m)[0]
    axes = {o.name: tuple(1 if x == "1" else x.lower() for x in o.axes) for o in signature.operands()[2:]}
    tensors = [TensorArgument(name, "", shape, (), 16) for name, shape in axes.items()]
    d, *others = Said(None), *(Said(operands.extras[name]) for name in list(axes)[1:])
    written = fused.epilogue_of(Epilogue.of(epilogue), tensors)
    written(InTorch(operands.a.float() @ operands.b.float().T), d, *others)
    torch.testing.assert_close(d.numbers, reference(signature, operands).float(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def archive(request: pytest.FixtureRequest) -> Path:
    """Two compiled kernels."""
    return built_once(request, "efc", MANIFEST, "--candidates", "1") / "efc.aot"


MANIFEST = f"""
format: 1
model: efc
source: made up
tokens: [300]
targets: [sm_100a]
gemms:
  - {{name: up, n: 512, k: 1024, dtypes: {{a: bf16, b: bf16, d: bf16}}, epilogue: bias+gelu}}
  - {{name: down, n: 512, k: 1024, dtypes: {{a: e4m3, b: e4m3, d: bf16}}, scaling: row_column, epilogue: {ALL_PARTS}}}
"""


def driver_of(archive: Archive) -> RecordingDriver:
    return RecordingDriver(capability=(10, 0), kernels=kernels_of(archive))


def call(m: int) -> dict[str, Any]:
    return {
        "a": FakeTensor((m, FP8.k), "float8_e4m3fn"),
        "b": FakeTensor((FP8.n, FP8.k), "float8_e4m3fn"),
        "scale_a": FakeTensor((m, 1), "float32"),
        "scale_b": FakeTensor((1, FP8.n), "float32"),
        "bias": FakeTensor((FP8.n,)),
        "residual": FakeTensor((m, FP8.n)),
        "scale_d": FakeTensor((1,), "float32"),
        "out": FakeTensor((m, FP8.n)),
        "epilogue": "silu",
    }


@pytest.mark.parametrize("m", [1, 300, 4097])
def test_a_call_gives_the_kernel_maps_that_end_where_operands_end(archive: Path, torch: FakeTorch, m: int) -> None:
    with Archive.open(archive) as opened:
        driver, given = driver_of(opened), call(m)
        library = Library(opened, driver)
        assert library.gemm(**given) is given["out"]
        (launch,) = driver.launches
        maps = {struct.unpack_from("<Q", p)[0]: p for p in launch.parameters if len(p) == 128}
        read = ("a", "b", "scale_a", "scale_b", "bias", "residual", "out")
        assert set(maps) == {given[name].data_ptr() for name in read}
        assert struct.pack("<Q", given["scale_d"].data_ptr()) in launch.parameters, "a number by its address"
        # Extents less 1 from byte 32 on, the contiguous first; strides in 16 bytes from byte 12 on.
        for name, extents in {
            "residual": (FP8.n, m),
            "bias": (FP8.n, m),
            "scale_b": (FP8.n, m),
            "scale_a": (m, FP8.n),
        }.items():
            found = maps[given[name].data_ptr()]
            assert struct.unpack_from("<II", found, 32) == tuple(e - 1 for e in extents), name
            assert (struct.unpack_from("<I", found, 12)[0] == 0) == (name != "residual"), name
        library.close()


def test_scales_that_tma_cannot_load_are_refused(archive: Path, torch: FakeTorch) -> None:
    with Archive.open(archive) as opened:
        library, given = Library(opened, driver_of(opened)), call(64)
        given["scale_a"] = FakeTensor((64, 1), "float32", pointer=given["scale_a"].data_ptr() + 4)
        with pytest.raises(LayoutError, match="scale_a"):
            library.gemm(**given)
        library.close()
