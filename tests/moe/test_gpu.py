"""What permutes and adds up rows of experts on a real GPU: functions of an archive against references.

pytest -m gpu tests/moe --archive=X, for an archive of manifests/qwen3-30b-a3b.yaml, or any with these operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import Library
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute

from .functions import functions_of

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.moe_combine.measures import CombineMeasures  # noqa: E402
from aot.tune.moe_permute.measures import OperandSet, PermuteMeasures, Weights  # noqa: E402
from aot.tune.operation import tuning  # noqa: E402

from ..gpu_library import library_of_module as library_of_module  # noqa: E402

pytestmark = pytest.mark.gpu

TOKENS = 1, 2, 7, 33, 128, 700
# Experts, those of a token, K; and of how many there are in all.
EXTENTS = (1, 1, 64, 0), (8, 2, 512, 0), (40, 5, 1000, 0), (128, 8, 2048, 0), (512, 10, 256, 0), (16, 8, 256, 128)
GUARD = 8
PERMUTE, COMBINE = PermuteMeasures(), CombineMeasures()


@pytest.fixture(scope="module")
def permutations(tuned_archive: Path) -> dict[tuple[str, bool, str], list[str]]:
    """Functions by element type, whether they take an expert map, and their weights."""
    found = {}
    for dtype, mapped, weights in itertools.product(("bf16", "f16", "e4m3"), (False, True), ("none", "f32")):
        s = Permute(dtype, 16, 4, 256, 64 if mapped else 0, weights=weights)
        names = functions_of(tuned_archive, "moe_permute", s)
        if names:
            found[dtype, mapped, weights] = names
    if not found:
        pytest.skip("the archive has no moe_permute for this GPU")
    return found


@pytest.fixture(scope="module")
def combinations(tuned_archive: Path) -> dict[tuple[str, str], list[str]]:
    """Functions that add rows up, by element type and weights."""
    found = {}
    for dtype, weights in itertools.product(("bf16", "f16"), ("f32", "none")):
        s = Combine(dtype, dtype, 4, 256, weights)
        if names := functions_of(tuned_archive, "moe_combine", s):
            found[dtype, weights] = names
    if not found:
        pytest.skip("the archive has no moe_combine for this GPU")
    return found


def launch(library: Library, name: str, o: Any) -> None:
    library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())


def launcher(library: Library, name: str) -> Callable[[Any], None]:
    return lambda o: launch(library, name, o)


def signatures(dtype: str, mapped: bool, weights: str) -> list[Permute]:
    extents = [(e, top, k - k % 16, every) for e, top, k, every in EXTENTS if mapped == bool(every)]
    return [Permute(dtype, *of, weights=weights) for of in extents]


def same(found: Any, wanted: Any) -> bool:
    """Whether rows are equal where there is one, and what was not to be written is not."""
    return bool(((found == wanted) | (torch.isnan(found) & torch.isnan(wanted))).all())


def is_right(s: Permute, o: OperandSet) -> bool:
    wanted = PERMUTE.reference(s, o)
    integers = all(torch.equal(getattr(o, n).double(), wanted[n]) for n in ("ends", "positions"))
    return integers and same(o.rows.float(), wanted["rows"])


# --- permutations ---


def test_every_permutation_is_right_by_the_check_of_tuning(
    permutations: dict[tuple[str, bool, str], list[str]], library: Library
) -> None:
    """Experts drawn at random, and one that has all; guards behind each output."""
    for (dtype, mapped, of), names in permutations.items():
        for s in signatures(dtype, mapped, of):
            for m in TOKENS:
                weights = tuning(s).measures().weights(s, m, 0, m)
                found = measure.check(s, m, weights, {name: launcher(library, name) for name in names})
                assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (s.key(), m)


def test_ids_that_are_no_experts_get_no_row_and_leave_the_rest_as_it_is(
    permutations: dict[tuple[str, bool, str], list[str]], library: Library
) -> None:
    for (dtype, mapped, of), names in permutations.items():
        for s in signatures(dtype, mapped, of):
            for m in (1, 33, 700):
                weights = Weights(s, m, 0, m)
                random = torch.randint(-s.experts, 2 * s.experts, (m, s.top_k), device="cuda")
                for experts in (random, torch.full_like(random, -1), random % s.experts):
                    for name in names:
                        o = weights.made(experts)
                        launch(library, name, o)
                        assert is_right(s, o), (name, s.key(), m)


def test_no_ids_make_a_kernel_write_outside_its_outputs(
    permutations: dict[tuple[str, bool, str], list[str]], library: Library
) -> None:
    for (dtype, mapped, of), names in permutations.items():
        s = Permute(dtype, 8, 4, 128, 24 if mapped else 0, weights=of)
        o = Weights(s, 50, 0, 0).made(torch.zeros((50, 4), dtype=torch.int64, device="cuda"))
        whole = torch.full((200 + 2 * GUARD, 128), float("nan"), device="cuda").to(o.rows.dtype)
        integers = torch.full((2, 200 + 2 * GUARD), 77, dtype=torch.int32, device="cuda")
        outputs = {
            "rows": whole[GUARD:-GUARD],
            "ends": integers[0, GUARD : GUARD + 8],
            "positions": integers[1, GUARD:-GUARD].view(50, 4),
        }
        o = o.writing(outputs)
        if o.expert_map is not None:
            o.expert_map.copy_(torch.arange(-8, 16, dtype=torch.int32) * 12345678)
        hostile = torch.tensor([-1, 8, (1 << 31) - 1, -(1 << 31), 1 << 20, 24, 23, 7], dtype=torch.int32)
        for ids in (hostile.repeat(25), hostile.repeat_interleave(25)):
            o.ids.copy_(ids.view(50, 4))
            for name in names:
                launch(library, name, o)
                assert bool(torch.isnan(whole[:GUARD].float()).all()), name
                assert bool(torch.isnan(whole[-GUARD:].float()).all()), name
                assert bool((integers[:, :GUARD] == 77).all()), name
                assert bool((integers[0, GUARD + 8 :] == 77).all()), name
                assert bool((integers[1, -GUARD:] == 77).all()), name
        torch.cuda.synchronize()


# --- sums ---


def test_every_sum_is_right_by_the_check_of_tuning(
    combinations: dict[tuple[str, str], list[str]], library: Library
) -> None:
    """All rows named once, and a third of the positions -1 with NaN in rows that nobody names."""
    for (dtype, of), names in combinations.items():
        for _, top_k, n, _ in EXTENTS:
            s = Combine(dtype, dtype, top_k, n - n % 8, of)
            for m in TOKENS:
                weights = tuning(s).measures().weights(s, m, 0, m)
                found = measure.check(s, m, weights, {name: launcher(library, name) for name in names})
                assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (s.key(), m)


def test_positions_that_are_no_rows_are_not_read(
    combinations: dict[tuple[str, str], list[str]], library: Library
) -> None:
    for (dtype, of), names in combinations.items():
        s = Combine(dtype, dtype, 4, 256, of)
        (o, *_) = COMBINE.weights(s, 20, 0, 0).operands(20)
        o.positions[::2, 1] = 80
        o.positions[1::2, 2] = (1 << 31) - 1
        o.positions[5, 3] = -(1 << 31)
        wanted = COMBINE.reference(s, o)["y"]
        for name in names:
            o.y.fill_(float("nan"))
            launch(library, name, o)
            error = float((o.y.float() - wanted).norm() / wanted.norm())
            assert error < measure.tolerance(dtype), (name, error)


def test_all_sums_give_equal_bits_at_every_repeat(
    combinations: dict[tuple[str, str], list[str]], library: Library
) -> None:
    for (dtype, of), names in combinations.items():
        s = Combine(dtype, dtype, 8, 2048, of)
        (o, *_) = COMBINE.weights(s, 300, 0, 0).operands(300)
        found = []
        for name in names:
            for _ in range(5):
                o.y.fill_(float("nan"))
                launch(library, name, o)
                found.append(o.y.clone())
        assert all(torch.equal(y, found[0]) for y in found)
