"""Grouped GEMMs of 4-bit weights: what is legal, what a launch gives the kernel, and what the kernel makes of that.

No GPU: a launch's tensor maps say what TMA would load of prepared weights, and what threads do with it is done here
with the functions that the kernel is made with, so that layouts, tiles and the epilogue's order are seen to give D.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from aot.kernels.group_sizes import GROUPS_BYTES
from aot.kernels.sm90.grouped_w4.plan import Plan
from aot.kernels.sm90.small_m.plan import row_of_b
from aot.kernels.w4.form import Form
from aot.search.legal import legal_variants, of_name, unsuited
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from aot.tune.grouped_gemm.measures import GroupedMeasures, OperandSet, Weights
from aot.verify import shapes
from runtime import Library
from runtime.container.archive import Archive
from runtime.errors import ArgumentError, LayoutError
from runtime.gemm.fallback import apply_activation
from runtime.grouped_gemm import GROUPED_GEMM, Signature
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.weights import FORMATS, WeightFormat, e2m1_pairs, int4_pairs
from runtime.program.record import Record
from runtime.torch.weights import prepare_weight

from ..command_line import Run
from ..legal_samples import drawn
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from ..shared import built_once

_MXFP4 = "a: bf16, b: e2m1, d: bf16, groups: 5, k: 320, scaling: mxfp4_weight"
MANIFEST = f"""
format: 1
model: experts_w4
source: made up
tokens: [8, 4096]
targets: [sm_90a]
operations:
  grouped_gemm:
    - {{name: gate_up, {_MXFP4}, n: 288, epilogue: bias+swiglu_clamped_interleaved}}
    - {{name: halves, {_MXFP4}, n: 288, epilogue: swiglu}}
    - {{name: down, {_MXFP4}, n: 144, epilogue: bias}}
    - {{name: int4, a: bf16, b: u4, d: bf16, groups: 5, n: 144, k: 384, scaling: int4_weight}}
    - {{name: zeros, a: bf16, b: u4, d: bf16, groups: 5, n: 144, k: 384, scaling: int4_zero_weight}}
"""
GATE_UP = Signature("bf16", "e2m1", "bf16", 5, 288, 320, "bias+swiglu_clamped_interleaved", scaling="mxfp4_weight")
HALVES = dataclasses.replace(GATE_UP, epilogue="swiglu")
DOWN = dataclasses.replace(GATE_UP, n=144, epilogue="bias")
INT4 = Signature("bf16", "u4", "bf16", 5, 144, 384, scaling="int4_weight")
ZEROS = dataclasses.replace(INT4, scaling="int4_zero_weight")
SIGNATURES = [GATE_UP, HALVES, DOWN, INT4, ZEROS]
every = pytest.mark.parametrize("s", SIGNATURES, ids=lambda s: s.key())


def plan_of(v: Variant) -> Plan:
    return Plan.of(v.options, Form(v.scaling, v.epilogue))


# --- what is legal ---


@every
def test_signatures_are_read_as_they_are_written(s: Signature) -> None:
    assert GROUPED_GEMM.read(s.to_json()) == s
    assert GROUPED_GEMM.of_key(s.key()) == s


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"n": 5768, "epilogue": "bias"}, "N must be a multiple of 16, found 5768"),
        ({"n": 5776, "epilogue": "swiglu"}, "half of the rows of B are gates, so N must be a multiple of 32"),
        ({"k": 2912}, "K must be a multiple of 64, found 2912"),
        ({"groups": 513}, "room for 512 groups"),
    ],
)
def test_extents_that_no_kernel_takes_are_refused(changed: dict[str, Any], reason: str) -> None:
    large = dataclasses.replace(GATE_UP, groups=128, n=5760, k=2880)
    of = dataclasses.replace(large, **changed)
    v = legal_variants("own", "sm_90a", dataclasses.replace(large, epilogue=of.epilogue))[0]
    assert reason in (unsuited(v, of) or "")


@every
def test_a_plan_fills_the_shared_memory_of_an_sm_and_no_more(s: Signature) -> None:
    for v in drawn(s, "sm90_grouped_w4", 2000):
        plan = plan_of(v)
        found = plan.memory
        a_cta = 2048 + GROUPS_BYTES + found.block + plan.tile_buffers * 4 * plan.epilogue_terms
        each = (228 << 10) // plan.ctas_per_sm - 1024
        of_a_cta = min(TARGETS["sm_90a"].shared_bytes_per_block, each)
        assert a_cta <= of_a_cta, v.name()
        more = found.stages + plan.sliced_k  # stages come in whole rounds of slices
        assert a_cta + plan.sliced_k * (found.m_side + found.n_side) > of_a_cta or more > 32, v.name()
        assert plan.staging_offset % 16 == 0


@every
def test_rows_are_staged_where_the_epilogue_looks_for_them(s: Signature) -> None:
    """A warp multiplies a slab as B has it; gates and ups meet in shared memory, and bias is fetched by the place."""
    for tile_n, plan in {p.tile_n: p for p in map(plan_of, drawn(s, "sm90_grouped_w4", 500))}.items():
        places = [plan.staged_row(row) for row in range(tile_n)]
        assert sorted(places) == list(range(tile_n))
        for tile, row in itertools.product((0, 1, 3), range(tile_n)):
            of_b = tile * tile_n + row
            if plan.halves:
                half, pair = divmod(row, tile_n // 2)
                of_b = half * 4096 // 2 + tile * (tile_n // 2) + pair
            assert row_of_b(tile_n, plan.form, tile, places[row], 4096) == of_b


# --- what a launch gives the kernel ---


@pytest.fixture(scope="session")
def experts_w4(request: pytest.FixtureRequest) -> Path:
    """The archive of the manifest."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    return built_once(request, "experts_w4", MANIFEST, "--candidates", "1") / "experts_w4.aot"


class Opened:
    """A library of the archive on a driver that records, and the archive."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        for name in archive.functions:
            (kernel,) = archive.record(name)["kernels"]
            assert kernel["local_bytes"] == 0
        self.driver = RecordingDriver(kernels=kernels_of(archive))
        self.library = Library(archive, self.driver)


@pytest.fixture
def opened(experts_w4: Path, torch: FakeTorch) -> Iterator[Opened]:
    with Archive.open(experts_w4) as archive:
        made = Opened(archive)
        with made.library:
            yield made


def call(s: Signature, m: int) -> dict[str, Any]:
    """What `Library.grouped_gemm` takes for such a signature."""
    form = FORMATS[s.scaling]
    mxfp4 = s.scaling == "mxfp4_weight"
    scales = (s.groups, s.k // form.columns, s.n * max(1, form.columns // form.group))
    given = {
        "a": FakeTensor((m, s.k)),
        "b": FakeTensor((s.groups, s.n, s.k // 2), "float4_e2m1fn_x2" if mxfp4 else "uint4"),
        "ends": FakeTensor((s.groups,), "int32"),
        "scale_b": FakeTensor(scales, "float8_e8m0fnu" if mxfp4 else "bfloat16"),
        "out": FakeTensor((m, s.columns)),
        "epilogue": s.parts.activation_word,
    }
    return given | ({"bias": FakeTensor((s.groups, s.n))} if s.parts.bias else {})


def test_what_a_manifest_asks_is_built_and_verified(run: Run, experts_w4: Path) -> None:
    assert run("verify", experts_w4).status == 0
    with Archive.open(experts_w4) as archive:
        assert {archive.record(name)["family"] for name in archive.functions} == {"own.sm90_grouped_w4"}


@every
@pytest.mark.parametrize("m", [1, 17, 5000])
def test_prepared_weights_are_served_at_any_number_of_rows(opened: Opened, s: Signature, m: int) -> None:
    given = call(s, m)
    assert opened.library.grouped_gemm(**given) is given["out"]
    opened.library.grouped_gemm(**call(s, m))  # as planned


@every
def test_groups_may_lie_apart(opened: Opened, s: Signature) -> None:
    """As experts of one rank do in the weights of all."""
    given, every_second = call(s, 17), call(dataclasses.replace(s, groups=2 * s.groups), 17)
    for name in ("b", "scale_b"):
        of, wide = given[name], every_second[name]
        strides = (2 * wide.shape[1] * wide.shape[2], wide.shape[2], 1)
        given[name] = FakeTensor(of.shape, str(of.dtype).split(".")[-1], strides)
    opened.library.grouped_gemm(**given)
    apart = tensor_maps(opened.driver.launches[-1].parameters)
    opened.library.grouped_gemm(**call(s, 17))
    together = tensor_maps(opened.driver.launches[-1].parameters)
    for name in ("codes", "scales"):
        assert apart[name].strides[-1] == 2 * together[name].strides[-1]
        assert apart[name].strides[:-1] == together[name].strides[:-1]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scale_b": None}, ArgumentError, r"comes with scale_b \(5, 5, 288\) and without scale_a"),
        ({"scale_a": FakeTensor((17,), "float32")}, ArgumentError, "without scale_a"),
        ({"scale_b": FakeTensor((5, 144, 10), "float8_e8m0fnu")}, ArgumentError, "prepare_weight makes b and scale_b"),
        ({"scale_b": FakeTensor((5, 5, 288), "float32")}, ArgumentError, "must be ue8m0 of shape"),
        ({"scale_b": FakeTensor((4, 5, 288), "float8_e8m0fnu")}, ArgumentError, "prepare_weight makes"),
        ({"a": FakeTensor((17, 320), "float16")}, ArgumentError, "is for A in bf16"),
        ({"b": FakeTensor((5, 144, 160), "float4_e2m1fn_x2", (144 * 320, 320, 1))}, LayoutError, "without a gap"),
        ({"scale_b": FakeTensor((5, 5, 288), "float8_e8m0fnu", (2880, 576, 1))}, LayoutError, "without a gap"),
        ({"indices": FakeTensor((17,), "int32")}, ArgumentError, "contiguous rows, found gathered"),
        ({"bias": FakeTensor((5, 288))}, ArgumentError, "bias must be"),
        ({"ends": FakeTensor((5,), "int64")}, ArgumentError, "ends of type i32"),
    ],
)
def test_what_does_not_go_together_is_refused(
    opened: Opened, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=match):
            opened.library.grouped_gemm(**(call(DOWN, 17) | change))
        opened.library.grouped_gemm(**call(DOWN, 17))


@every
@pytest.mark.parametrize("name", ["a", "b", "scale_b", "out"])
def test_an_operand_that_does_not_start_at_16_bytes_is_refused(opened: Opened, s: Signature, name: str) -> None:
    off = call(s, 17)[name]
    off.pointer += 8
    for _ in range(2):
        with pytest.raises(LayoutError, match="must start at a multiple of"):
            opened.library.grouped_gemm(**(call(s, 17) | {name: off}))
        opened.library.grouped_gemm(**call(s, 17))


# --- what the kernel makes of it ---


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What a TMA descriptor says, by dimension, the innermost first: extents and the box in elements, strides of all
    but the first in bytes."""

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @classmethod
    def of(cls, raw: bytes) -> TensorMap:
        words = struct.unpack("<32I", raw)
        rank = (words[2] >> 4 & 7) + 1
        box = raw[55 : 55 + rank]  # less 1, a byte each
        return cls(
            struct.unpack_from("<Q", raw)[0] & ~15,
            tuple(extent + 1 for extent in words[8 : 8 + rank]),
            tuple(16 * step for step in words[3 : 2 + rank]),
            tuple(extent + 1 for extent in box),
        )

    def load(self, memory: Any, at: tuple[int, ...]) -> Any:
        """The words of a box at these coordinates, the innermost dimension last; zeros outside."""
        places = np.meshgrid(*(np.arange(b) + x for b, x in zip(self.box, at, strict=True)), indexing="ij")
        there = np.logical_and.reduce(
            [(place >= 0) & (place < extent) for place, extent in zip(places, self.extents, strict=True)]
        )
        steps = (4, *self.strides)
        offsets = sum(place * step for place, step in zip(places, steps, strict=True)) // 4
        return np.where(there, memory[np.where(there, offsets, 0)], 0).transpose()

    def load_box(self, memory: Any, box: tuple[int, ...]) -> Any:
        """Box number `box`; a dimension before those that it names, if there is one, has one box."""
        numbers = (*(0 for _ in range(len(self.box) - len(box))), *box)
        return self.load(memory, tuple(x * b for x, b in zip(numbers, self.box, strict=True)))


def tensor_maps(parameters: tuple[bytes, ...]) -> dict[str, TensorMap]:
    """Those of A, codes and scales."""
    return dict(zip(("a", "codes", "scales"), map(TensorMap.of, (p for p in parameters if len(p) == 128)), strict=True))


def bf16(bits: Any) -> Any:
    """The numbers of these bits."""
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def weights_of_tile(plan: Plan, codes: Any, scales: Any) -> Any:
    """A stage's weights (rows of the tile, columns) as registers have them, by lanes: those of `mainloop._load` and
    `dequantise`, where WGMMA's operand A wants them."""
    form: WeightFormat = plan.weights
    codes = codes.reshape(plan.blocks_k, plan.slabs, 32, 4).astype(np.int64)  # as `operands.codes_of_lanes`
    scales = scales.reshape(plan.scale_blocks, plan.slabs, 8).astype(np.int64)
    block, slab, lane, step = np.meshgrid(*map(np.arange, codes.shape), indexing="ij")
    column = block * 64 + step * 16
    word = column // form.group * 2 if form.zeros else column // form.columns
    of_scales = scales[word, slab, lane // 4]
    below = scales[word + 1, slab, lane // 4] if form.zeros else None
    group = column % form.columns // form.group
    found = np.full((plan.tile_n, plan.tile_k), np.nan)
    for j, pair in enumerate((e2m1_pairs if form.word == "mxfp4_weight" else int4_pairs)(codes)):
        row = slab * 16 + lane // 4 + 8 * (j % 2)
        for element in range(2):
            number = bf16(pair >> (16 * element) & 0xFFFF)
            if form.word == "mxfp4_weight":
                number = number * bf16((of_scales >> 8 * (2 * group + j % 2) & 0xFF) << 7)
            else:
                scale = bf16(of_scales >> 16 * (j % 2) & 0xFFFF)
                point = -(2.0**-130) if below is None else bf16(below >> 16 * (j % 2) & 0xFFFF)
                number = ((number + point) * scale).astype(ml_dtypes.bfloat16).astype(np.float64)
            found[row, column + 2 * (lane % 4) + element + 8 * (j // 2)] = number
    return found * 2.0**form.exponent


def simulated(plan: Plan, s: Signature, o: OperandSet, maps: dict[str, TensorMap]) -> Any:
    """D, with NaN where nothing is stored."""
    a = o.a.float().numpy().astype(np.float64)
    codes, scales = (
        np.frombuffer(x.contiguous().view(torch.uint8).numpy().tobytes(), np.uint32) for x in (o.b, o.extras["scale_b"])
    )
    d = np.full((len(a), s.columns), np.nan)
    parts = Epilogue(s.parts.activation)  # gates come before ups here
    width = 16 if plan.form.gated else 8
    begin = 0
    for group, end in enumerate(o.ends.tolist()):
        for along_n in range(-(-s.n // plan.tile_n)):
            rows = (along_n, 0) if plan.halves else (along_n,)
            tile = np.zeros((plan.tile_n, 0))
            for k in range(-(-s.k // plan.tile_k)):
                box = (*rows, k, group)
                stage = maps["codes"].load_box(codes, box), maps["scales"].load_box(scales, box)
                tile = np.concatenate([tile, weights_of_tile(plan, *(x.reshape(-1) for x in stage))], 1)
            for first in range(begin, end, plan.tile_m):
                tokens = min(end - first, plan.tile_m)
                sums = tile[:, : s.k] @ a[first : first + tokens].T
                assert not tile[:, s.k :].any(), "what is outside B is zeros"
                staged = np.empty_like(sums)
                for row in range(plan.tile_n):
                    staged[plan.staged_row(row)] = sums[row]
                for slot in range(plan.tile_n if s.parts.bias else 0):
                    row = row_of_b(plan.tile_n, plan.form, along_n, slot, s.n)
                    staged[slot] += float(o.extras["bias"][group, row]) if row < s.n else np.nan
                for vector in range(plan.tile_n // width):
                    column = (along_n * (plan.tile_n // width) + vector) * 8
                    if column < s.columns:
                        of = torch.from_numpy(staged[vector * width : (vector + 1) * width].T.copy())
                        d[first : first + tokens, column : column + 8] = apply_activation(torch, parts, of)
        begin = end
    return d


def maps_of(record: Record, s: Signature, m: int) -> dict[str, TensorMap]:
    """The tensor maps of a launch of a function for packed operands."""
    arguments = shapes.arguments(record, shapes.extents_of(record, s, m))
    values = record.bind(arguments, {"max_active_clusters": 132}).values
    (launch,) = record.program.evaluate(values).launches
    places = zip(launch.offsets, launch.sizes, strict=True)
    return tensor_maps(tuple(bytes(launch.parameters[start : start + size]) for start, size in places))


@every
def test_what_is_loaded_and_multiplied_is_d(experts_w4: Path, s: Signature) -> None:
    """All tiles of all functions, of groups with no row, with few and with many."""
    with Archive.open(experts_w4) as archive:
        records = {name: Record.from_json(archive.record(name)) for name in archive.functions}
    names = [name for name in records if of_name(name) in legal_variants("own", "sm_90a", s)]
    assert names
    for name in names:
        v = of_name(name)
        assert v is not None
        plan = plan_of(v)
        m = plan.tile_m + 11
        (o,) = Weights(s, m, 0, 3, device="cpu").operands(m)
        ends = [0, plan.tile_m + 1, plan.tile_m + 1, plan.tile_m + 9, m]
        o.ends.copy_(torch.tensor(ends, dtype=torch.int32))
        maps = maps_of(records[name], s, m)
        assert maps["a"].extents == (s.k, m)
        assert math.prod(maps["codes"].box) == plan.codes_bytes // 4
        assert math.prod(maps["scales"].box) == plan.scales_bytes // 4
        found, exact = simulated(plan, s, o, maps), GroupedMeasures().reference(s, o)["d"].double().numpy()
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_experts_of_a_checkpoint_are_prepared_one_by_one() -> None:
    """GPT-OSS's gate_up_proj_blocks (experts, 2N, K / 32, 16) and _scales; gates and ups in turn stay so."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 130, (3, 64, 4), dtype=torch.uint8, generator=generator)
    whole = prepare_weight(blocks, scales, "mxfp4")
    assert (whole.b.shape, whole.scale_b.shape) == ((3, 64, 64), (3, 2, 128))
    for expert in range(3):
        one = prepare_weight(blocks[expert], scales[expert], "mxfp4")
        assert torch.equal(whole.b[expert].view(torch.uint8), one.b.view(torch.uint8))
        assert torch.equal(whole.scale_b[expert].view(torch.uint8), one.scale_b.view(torch.uint8))
