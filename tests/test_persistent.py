"""The persistent Hopper GEMM: which forms exist, what they take of an SM, and the machine code of a few."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from aot.kernels.sm90.persistent import choices as persistent_choices
from aot.kernels.sm90.persistent.form import Form
from aot.kernels.sm90.persistent.plan import STAGE_BYTES_OF_K, Plan
from aot.providers import likely_persistent
from aot.search.legal import legal_variants, of_name, unsuited
from aot.search.variants import Variant
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.scaling import SCALINGS
from runtime.program.record import Record, TensorArgument, TensorView

from .persistent_variants import BLOCK, FAMILY, FP8, PLAIN, SIGNATURES, form, legal_plans, plain, variants
from .ranking import rank


def test_consumers_wait_for_the_kernel_before_where_they_read_anything_themselves() -> None:
    for epilogue in ("none", "relu", "silu", "swiglu", "geglu_interleaved"):
        assert not Form(epilogue=epilogue).reads, epilogue
    for epilogue in ("bias", "bias+relu", "residual", "swiglu+residual", "scale", "gelu+scale"):
        assert Form(epilogue=epilogue).reads, epilogue
    assert all(Form(a="e4m3", scaling=scaling).reads for scaling in SCALINGS if scaling != "none")


@pytest.mark.parametrize("signature", SIGNATURES, ids=Signature.key)
def test_every_form_has_variants_and_not_too_many(signature: Signature) -> None:
    assert 8 <= len(variants(signature)) <= 640


@pytest.mark.parametrize("signature", [PLAIN, pytest.param(BLOCK, marks=pytest.mark.long)], ids=Signature.key)
def test_what_enumeration_leaves_out_early_is_illegal_or_unlikely(signature: Signature) -> None:
    options = persistent_choices.OPTIONS | likely_persistent.OPTIONS
    assert list(options) == list(persistent_choices.OPTIONS)
    everything = (dict(zip(options, values, strict=True)) for values in itertools.product(*options.values()))
    legal = [o for o in everything if persistent_choices.rule(o, form(signature)) is None]
    likely = [o for o in legal if likely_persistent.unlikely(o, form(signature)) is None]
    promised = dataclasses.replace(signature, overlap="launch")
    assert likely == [{name: v.options[name] for name in options} for v in variants(promised)]


def test_what_overlaps_is_for_signatures_that_promise_it_and_has_no_workspace() -> None:
    assert {v.options["overlap"] for v in variants(PLAIN)} == {"serial"}
    for promise in ("launch", "weights"):
        found = variants(dataclasses.replace(PLAIN, overlap=promise))
        early = [v for v in found if v.options["overlap"] == "launch"]
        alone = sum(bool(v.options["stream_k"]) or v.options["order"] == "quads" for v in variants(PLAIN))
        assert len(early) == len(variants(PLAIN)) - alone
        assert not any(v.options["stream_k"] for v in early)
        assert all(Plan.of(v.options, form(PLAIN)).overlap for v in early)


def test_no_part_of_an_n_major_tile_ends_within_a_swizzle_atom() -> None:
    n_major = dataclasses.replace(PLAIN, b_major="n")
    for v in variants(n_major):
        plan = Plan.of(v.options, form(n_major))
        part = plan.columns // plan.atom_layout.columns
        assert part % 64 == 0 or 64 % part == 0, v.name()


def test_gates_are_loaded_by_the_cta_that_loads_what_they_gate() -> None:
    """8 of each by turns: half a turn cannot be said to TMA, and whoever waits for its bytes would wait for ever."""
    for epilogue in ("swiglu", "geglu_tanh_interleaved"):
        for a, scaling in (("bf16", "none"), ("e4m3", "row_column")):
            gated = Signature(a, a, "bf16", "f32", epilogue, 7168, 8192, scaling=scaling)
            shared = [plan for plan in legal_plans(gated) if plan.cluster_rows > 1 and not plan.swap]
            assert {plan.loads_in_turn[1] for plan in shared} == {False, True}
            for plan in shared:
                _, in_turn = plan.loads_in_turn
                assert plan.columns // (1 if in_turn else plan.cluster_rows) % 16 == 0


def boxes(variant: Variant, signature: Signature) -> list[int]:
    """Elements of the boxes that a launch's TMA descriptors ask for. Their extents, less one, are a descriptor's bytes
    from 55 on, as descriptors of tiles that are known show."""
    from aot.compile.lower import lower

    record = Record.from_json(lower(variant).record)
    columns = signature.n // (2 if signature.parts.gated else 1)
    matrices = {"a": (64, signature.k), "b": (signature.n, signature.k), "d": (64, columns)}
    given: list[Any] = []
    for argument in record.leaves():
        if isinstance(argument, TensorArgument):
            shape = matrices.get(argument.name, (matrices["a" if argument.name == "scale_a" else "b"][0],))
            strides = (shape[1], 1) if len(shape) > 1 else (1,)
            given.append(TensorView(1 << 20, argument.dtype, shape, strides, 0))
    bound = record.bind(given, {argument.name: 66 for argument in record.device_arguments})
    (launch,) = record.plan(bound.values)
    starts = [slot.offset + 55 for slot in launch.slots if slot.tma]
    return [math.prod(extent + 1 for extent in launch.parameters[start : start + 5]) for start in starts]


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)], ids=["an eighth", "all"])
@pytest.mark.parametrize(
    "signature",
    [
        Signature("bf16", "bf16", "bf16", "f32", "none", 7168, 8192),
        Signature("bf16", "bf16", "bf16", "f32", "swiglu", 7168, 8192),
        Signature("e4m3", "e4m3", "bf16", "f32", "geglu_interleaved", 7168, 8192, scaling="row_column"),
    ],
    ids=Signature.key,
)
def test_what_ctas_load_together_is_what_a_stage_waits_for(signature: Signature, every: int) -> None:
    """A byte more or less, and a kernel never ends. And what they store is a piece of D. Each is compiled."""
    pytest.importorskip("cutlass")
    found: dict[object, Variant] = {}
    for v in variants(signature):
        plan = Plan.of(v.options, form(signature))
        if (not plan.swap or plan.form.gated) and plan.rows >= 128 and plan.multicasts:
            rows = plan.rows if plan.columns in (96, 144) else 128
            found.setdefault((plan.swap, rows, plan.columns, plan.cluster_rows, plan.cluster_columns), v)
    assert len(found) >= 8
    for v in list(found.values())[::every]:
        plan = Plan.of(v.options, form(signature))
        of_rows, of_columns, of_d = boxes(v, signature)  # as WGMMA has them
        rows_in_turn, columns_in_turn = plan.loads_in_turn
        of_rows *= 1 if rows_in_turn else plan.cluster_columns
        of_columns *= 1 if columns_in_turn else plan.cluster_rows
        together = (of_rows + of_columns) * DTYPES[signature.a].bytes
        assert together == (plan.rows + plan.columns) * STAGE_BYTES_OF_K, v.name()
        assert of_d == 64 * plan.epilogue_tile_columns, v.name()


@pytest.mark.parametrize(
    "tile", ["128x72.cluster1x1", "128x216.cluster3x1", "192x176.cluster1x3", "128x248.cluster1x8"]
)
def test_what_no_build_chooses_compiles_for_who_names_it(tile: str) -> None:
    pytest.importorskip("cutlass")
    v = of_name(f"own.{FAMILY}.bf16_bf16_bf16_f32.tile{tile}.rows.serial.cooperative.split_k1.sm_90a")
    assert v is not None
    assert v not in variants(PLAIN)
    plan = Plan.of(v.options, form(PLAIN))
    of_a, of_b, of_d = boxes(v, PLAIN)
    assert (of_a * plan.cluster_columns + of_b * plan.cluster_rows) * 2 == (plan.rows + plan.columns) * STAGE_BYTES_OF_K
    assert of_d == 64 * plan.epilogue_tile_columns


def test_ctas_share_n_major_b_by_whole_swizzle_atoms_along_k() -> None:
    """TMA would round a third of a stage up, and more bytes would come than are waited for."""
    name = f"own.{FAMILY}.bf16_bf16_bf16_f32.b_n_major.tile128x192.cluster%dx1.rows.serial.cooperative.split_k1.sm_90a"
    assert [m for m in range(1, 9) if of_name(name % m)] == [1, 2, 4, 8]


@pytest.mark.parametrize("cluster", [(1, 2), (1, 4), (2, 4)])
def test_a_tile_without_shares_of_whole_groups_of_rows_is_loaded_whole_by_each_cta_in_turn(
    cluster: tuple[int, int],
) -> None:
    """88 tokens have no halves of whole groups of 8. A TMA box of all of them fills a stage of every CTA."""
    pytest.importorskip("cutlass")
    options = {"tile_m": 88, "tile_n": 128, "cluster_m": cluster[0], "cluster_n": cluster[1], "schedule": "pingpong"}
    v = plain(**options, swap=True)
    plan = Plan.of(v.options, form(PLAIN))
    assert plan.loads_in_turn == (False, True)
    of_b, of_a, of_d = boxes(v, PLAIN)  # B is on WGMMA's M side
    assert of_a == 88 * 64
    assert of_b * cluster[0] == 128 * 64
    assert of_d == 64 * plan.epilogue_tile_columns


@pytest.mark.parametrize("signature", SIGNATURES, ids=Signature.key)
def test_tiles_cover_every_row_and_hang_over_m_only_where_there_are_fewer_rows(signature: Signature) -> None:
    plans = [Plan.of(v.options, form(signature)) for v in variants(signature)]
    by_tokens = {plan.tokens: plan for plan in plans if not plan.stream_k}
    for tokens, plan in by_tokens.items():
        for m in (*range(1, 2 * tokens + 2), 1000, 4095, 4096, 4097):
            # One more, as a cluster along M may have.
            starts = [tile * tokens - plan.moved_up(tile, m) for tile in range(-(-m // tokens) + 1)]
            assert {row for start in starts for row in range(start, min(start + tokens, m))} == set(range(m))
            assert min(starts) == 0
            assert max(starts) + tokens <= max(m, tokens)


@pytest.mark.parametrize("signature", SIGNATURES, ids=Signature.key)
def test_rows_before_a_tiles_place_are_few_and_none_where_tiles_are_full(signature: Signature) -> None:
    for plan in (Plan.of(v.options, form(signature)) for v in variants(signature) if not v.options["stream_k"]):
        assert [plan.moved_up(tile, 3 * plan.tokens) for tile in range(3)] == [0, 0, 0]
        assert [plan.moved_up(tile, 3 * plan.tokens - 5) for tile in range(3)] == [0, 0, 5]
        assert [plan.moved_up(tile, 5) for tile in range(2)] == [0, plan.tokens]


def test_no_two_tiles_that_add_up_in_different_orders_share_a_row() -> None:
    """Only tiles of a last wave are cut along K: a row that another tile makes too would have either's bits."""
    shared = [Plan.of(v.options, form(PLAIN)) for v in variants(PLAIN) if v.options["stream_k"]]
    assert shared
    for plan in shared:
        assert {plan.moved_up(tile, m) for m in (1, plan.tokens + 1, 1000) for tile in range(9)} == {0}


def test_every_activation_has_variants_alone_and_with_all_other_parts() -> None:
    words = [w for w, e in EPILOGUES.items() if e.bias == e.residual == e.scale]
    for word, a in itertools.product(words, ("bf16", "e4m3")):
        assert variants(Signature(a, a, "bf16", "f32", word, 4096, 4096, scaling="none")), (word, a)


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_stages_and_epilogue_tiles_fit_the_shared_memory_of_a_cta(signature: Signature) -> None:
    for plan in legal_plans(signature):
        stages = plan.stages * (plan.rows + plan.columns) * 128
        epilogue_tiles = 4 * 64 * plan.epilogue_tile_columns * DTYPES[signature.d].bytes
        if plan.nonpersistent:  # they take the place of stages
            epilogue_tiles = 0
        scales = 2 * plan.shared_scales * 4
        scales += plan.stages * plan.staged_scales * 2 * 32 * 4  # of 32 quads of threads in two warp groups
        assert stages + epilogue_tiles + scales + 2048 <= 227 << 10  # 1 KiB of them is static, the other for mbarriers
        assert 16 * plan.stages + 8 <= 1024
        assert plan.stages >= 2


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_one_tile_a_cta_leaves_no_fewer_stages_and_all_its_epilogue_tiles_fit_into_them(signature: Signature) -> None:
    """Behind what others push, which is still being added up while they are written."""
    found = [plan for plan in legal_plans(signature) if plan.nonpersistent]
    assert found
    others = (plan for plan in legal_plans(signature) if not plan.nonpersistent)
    persistent = {(p.rows, p.columns, p.pingpong, p.swap, p.split_k): p.stages for p in others}
    for plan in found:
        assert not plan.stream_k
        assert plan.output_buffers * plan.split_k >= plan.epilogue_tiles
        assert plan.output_offset % 1024 == 0
        assert plan.output_offset >= plan.pushed_bytes
        assert plan.output_offset + plan.output_bytes <= plan.stages * sum(plan.operand_bytes)
        assert plan.stages >= persistent.get((plan.rows, plan.columns, plan.pingpong, plan.swap, plan.split_k), 0)
    chosen = [Plan.of(v.options, form(signature)) for v in variants(signature)]
    likely = {(p.rows, p.columns, p.pingpong, p.swap, p.split_k): p.stages for p in chosen if not p.nonpersistent}
    for plan in (plan for plan in chosen if plan.nonpersistent):
        assert signature.a != "e4m3", "of which none was timed"
        key = plan.rows, plan.columns, plan.pingpong, plan.swap, plan.split_k
        assert plan.stages >= likely[key] + (plan.split_k == 1), "builds choose it for the stage"


def test_builds_choose_large_clusters_where_they_won() -> None:
    """With one tile a CTA, of the sizes that `_ONE_TILE` names, all of them; else pingpong along N."""
    chosen = [(v, Plan.of(v.options, form(PLAIN))) for v in variants(PLAIN)]
    with_one_tile = {
        ((v.integer("cluster_m"), v.integer("cluster_n"), plan.split_k, v.integer("tile_n")), v.integer("tile_m"))
        for v, plan in chosen
        if plan.nonpersistent
    }
    assert with_one_tile == {(of, tokens) for of, all_of in likely_persistent._ONE_TILE.items() for tokens in all_of}
    slices = {tokens for (m, n, split_k, _), tokens in with_one_tile if split_k > 1 and m * n > 1}
    assert slices == {80, 96, 112, 128, 144}
    persistent = [(v.integer("cluster_m"), v.integer("cluster_n"), p) for v, p in chosen if not p.nonpersistent]
    assert {(m, n, p.pingpong, p.swap) for m, n, p in persistent if m * n > 2} == {(1, 4, True, True)}


def test_a_residual_beside_one_tile_a_cta_leaves_few_accumulators() -> None:
    """With 72 the compiler spills: no store stands between what epilogue tiles add."""
    residual = dataclasses.replace(PLAIN, epilogue="residual")
    by_registers = sorted(legal_plans(residual), key=lambda plan: plan.accumulator_registers)
    found = {plan.nonpersistent: plan.accumulator_registers for plan in by_registers}
    assert found == {False: 144, True: 64}


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_epilogue_tiles_and_warp_groups_cover_a_tile_once(signature: Signature) -> None:
    for plan in legal_plans(signature):
        assert plan.m_atoms * plan.atom_layout.rows * 64 == plan.rows
        assert plan.part_columns * plan.atom_layout.columns == plan.out_columns
        across, width = plan.epilogue_tiles_across, plan.epilogue_tile_columns
        starts = [plan.epilogue_tile_start(number) for number in range(across)]
        assert {column for start in starts for column in range(start, start + width)} == set(range(plan.part_columns))
        assert all(start % 8 == 0 for start in starts)
        if not plan.swap or plan.split_k > 1 or plan.stream_k:  # each is added up once
            assert across * width == plan.part_columns
    for v in variants(signature):
        plan = Plan.of(v.options, form(signature))
        assert {plan.rows, plan.columns} == {v.integer("tile_m"), v.integer("tile_n")}


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_rows_of_an_epilogue_tile_are_those_of_a_swizzle_atom_or_meet_no_bank_twice(signature: Signature) -> None:
    """8 rows of 16 bytes are stored at a time: where they lie an odd number of 16 bytes apart, each has banks of its
    own."""
    for plan in legal_plans(signature):
        if not plan.swap:
            units, rest = divmod(plan.epilogue_tile_columns * DTYPES[signature.d].bytes, 16)
            assert rest == 0
            assert units in (2, 4, 8) or len({row * units % 8 for row in range(8)}) == 8, plan


def test_5376_columns_and_gates_of_7168_are_whole_tiles_of_some_variant() -> None:
    """Gemma 3 has the one, 32 tiles of 168; Llama-3.3-70B over eight GPUs the other, 64 of 112."""
    for n, k, epilogue, tile_n, m in ((5376, 4096, "none", 168, 512), (7168, 8192, "swiglu", 112, 256)):
        signature = Signature("bf16", "bf16", "bf16", "f32", epilogue, n, k)
        best = rank(legal_variants("own", "sm_90a", signature), signature, m, "sm_90a").variants[:8]
        assert any(v.options.get("tile_n") == tile_n and not v.options["swap"] for v in best)


def test_swapped_gates_are_whole_atoms_of_one_warp_group_with_all_of_k() -> None:
    gated = dataclasses.replace(PLAIN, epilogue="swiglu")
    common = {"swap": True, "tile_m": 136, "cluster_m": 1, "cluster_n": 1, "nonpersistent": False, "order": "rows"}
    taken = {
        (schedule, tile_n, split_k, stream_k)
        for schedule in ("cooperative", "pingpong")
        for tile_n in (64, 128, 192, 256)
        for split_k in (1, 2)
        for stream_k in (False, True)
        for more in ({"schedule": schedule, "tile_n": tile_n, "split_k": split_k, "stream_k": stream_k},)
        if persistent_choices.rule({**common, **more, "overlap": "serial"}, form(gated)) is None
    }
    assert taken == {("cooperative", 256, 1, False), ("pingpong", 128, 1, False)}
    swapped = of_name(
        f"own.{FAMILY}.bf16_bf16_bf16_f32.swiglu.tile136x128.cluster1x1.rows.serial.pingpong.split_k1.swap.sm_90a"
    )
    assert swapped is not None
    assert unsuited(swapped, dataclasses.replace(gated, n=7168)) is None
    assert (
        unsuited(swapped, dataclasses.replace(gated, n=7232)) == "gates and what they gate are loaded 64 rows at a time"
    )


@pytest.mark.parametrize(
    "epilogue",
    [
        "geglu",
        *(pytest.param(e, marks=pytest.mark.long) for e in ("swiglu", "bias+geglu", "geglu_interleaved", "geglu_tanh")),
    ],
)
@pytest.mark.parametrize("schedule", ["cooperative", "pingpong"])
def test_the_largest_swapped_gates_keep_their_sums_in_registers(epilogue: str, schedule: str) -> None:
    pytest.importorskip("cutlass")
    from aot.compile.lower import lower

    found = [v for v in variants(dataclasses.replace(PLAIN, epilogue=epilogue)) if v.options["swap"]]
    largest = max((v for v in found if v.options["schedule"] == schedule), key=lambda v: v.integer("tile_m"))
    assert largest.integer("tile_m") >= 144
    lower(largest)


def test_gates_of_tokens_that_fill_no_tile_are_swapped() -> None:
    """Else three tiles of 128 rows of A for 259 of them, and two for 132."""
    gated = Signature("bf16", "bf16", "bf16", "f32", "swiglu", 28672, 4096)
    for m, fewest in ((132, 132), (259, 130)):
        best = rank(legal_variants("own", "sm_90a", gated), gated, m, "sm_90a").variants[0]
        assert best.options["swap"]
        assert fewest <= best.integer("tile_m") <= fewest + 8


def test_more_rows_of_b_than_tiles_can_be_placed_for_are_unsuited() -> None:
    v = variants(PLAIN)[0]
    assert unsuited(v, dataclasses.replace(PLAIN, n=1 << 27)) is None
    assert "exact up to N" in (unsuited(v, dataclasses.replace(PLAIN, n=(1 << 27) + 8)) or "")


def machine_code(variant: Variant, directory: Path) -> list[str]:
    """The instructions of a variant's kernel, and its labels."""
    pytest.importorskip("cutlass")
    program = next(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"), None)
    if program is None:
        pytest.skip("nvdisasm is not installed")
    from aot.compile.lower import lower

    (directory / "kernel.cubin").write_bytes(lower(variant).cubin)
    command = [str(program), "-c", str(directory / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:\s*/\*[0-9a-f]{4,}\*/\s*(.*)|(\.L_\w+:))$", said, re.MULTILINE)
    return [(instruction or label).strip() for instruction, label in found]


def test_the_other_warp_group_is_let_through_right_behind_the_last_products(tmp_path: Path) -> None:
    """The compiler may put the barrier after whatever else there is to compute, and the tensor cores wait for it."""
    options = {"tile_m": 128, "tile_n": 128, "cluster_m": 1, "cluster_n": 2, "schedule": "pingpong", "order": "rows"}
    options |= {"split_k": 1, "stream_k": False, "nonpersistent": False, "swap": False}
    (variant,) = [v for v in variants(PLAIN) if options.items() <= v.options.items()]
    code = machine_code(variant, tmp_path)
    (last,) = [i for i, line in enumerate(code) if "HGMMA" in line and "gsb0" in line]
    arrival = next(i for i, line in enumerate(code) if i > last and "BAR.ARV" in line)
    between = code[last + 1 : arrival]
    assert len(between) < 8, between
    assert not any(word in line for line in between for word in ("MUFU", "F2I", "DEPBAR", "BRA"))


@pytest.mark.parametrize(
    ("tile", "most"),
    [
        *(((256, 128), 230), ((128, 128), 130)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (((128, 192), 175), ((128, 96), 120))),
    ],
)
def test_a_stage_takes_little_beside_its_products_and_their_promotion(
    tmp_path: Path, tile: tuple[int, int], most: int
) -> None:
    """4 products of 32 of K for each atom of 64 rows: the next products wait for all that is between."""
    rows, columns = tile
    atoms = rows // 128
    signature = dataclasses.replace(BLOCK, epilogue="none")
    options = {"tile_m": rows, "tile_n": columns, "cluster_m": 2, "cluster_n": 1, "schedule": "cooperative"}
    options |= {"order": "rows", "split_k": 1, "overlap": "serial", "swap": False, "nonpersistent": False}
    (variant,) = [v for v in variants(signature) if options.items() <= v.options.items()]
    code = machine_code(variant, tmp_path)
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    branches = [(labels[name], i) for i, line in enumerate(code) for name in re.findall(r"BRA `\((\.L_\w+)\)", line)]
    loops = [code[begin:end] for begin, end in branches if begin < end]
    loop = min((loop for loop in loops if any("QGMMA" in line for line in loop)), key=len)
    assert sum("QGMMA" in line for line in loop) == 4 * atoms
    assert sum("FFMA" in line for line in loop) == atoms * columns // 2
    assert sum("DEPBAR" in line for line in loop) == atoms, "products wait for each other"
    behind = next(i for i, line in enumerate(reversed(loop)) if "FFMA" in line)
    assert behind + next(i for i, line in enumerate(loop) if "QGMMA" in line) <= 22
    assert not any("LDG" in line for line in loop)
    assert len(loop) <= most
