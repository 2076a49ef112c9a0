"""How an operation of another package is built: as is usual, or as its distribution says under "cute_aot.building"."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot.problem import manifest
from aot.search.operation import BuildingError, building
from aot.selection import select

from .distributions import BUILDING, install
from .row_scale.archives import MANIFEST

pytestmark = pytest.mark.usefixtures("row_scale")

# In another way than is usual.
LARGEST_M_ALONE = """
from aot.search.operation import Building, Shortlist

class Scalings(Building):
    def shortlist(self, wanted, target, limit):
        found = super().shortlist(wanted, target, limit).by_signature
        return Shortlist({s: by_tokens[-1:] for s, by_tokens in found.items()}, "the largest M alone")

ROW_SCALE = Scalings("row_scale", "scalings")
"""


def tell_building(site: Path, code: str) -> None:
    """Install what says how row-wise scaling is built."""
    (site / "row_scale_building.py").write_text(code)
    install(site, "row-scale-building", {BUILDING: "row_scale = row_scale_building:ROW_SCALE"})
    building.cache_clear()


def test_an_operation_of_another_package_is_built_as_is_usual_unless_it_says_otherwise(site: Path) -> None:
    asked = [manifest.loads(MANIFEST)]
    usual = select(asked)
    every = [f"row_scales.row.bf16_bf16_bf16_f32.threads{n}.sm_90a" for n in (128, 256)]
    assert [(m, [v.name() for v in variants]) for m, variants in usual.problems[0].by_tokens] == [
        (1, every),
        (64, every),
    ]
    assert (usual.ranking, building("row_scale").plural) == ({}, "row_scales")
    tell_building(site, LARGEST_M_ALONE)
    found = select(asked)
    assert [m for m, _ in found.problems[0].by_tokens] == [64]
    assert (found.ranking, building("row_scale").plural) == ({"sm_90a": "the largest M alone"}, "scalings")


@pytest.mark.parametrize(
    ("code", "another", "match"),
    [
        ("import nothing_of_this_name", False, "cannot be imported .*nothing_of_this_name.*; install it again"),
        ("ROW_SCALE = None", False, "row_scale_building:ROW_SCALE, in the group cute_aot.building, lacks name, plural"),
        (LARGEST_M_ALONE.replace('("row_scale"', '("rows"'), False, "is no .*Building of that name; mend it"),
        (LARGEST_M_ALONE, True, "are in the group cute_aot.building; uninstall all but one"),
    ],
)
def test_what_does_not_say_how_an_operation_is_built_is_refused(
    site: Path, code: str, another: bool, match: str
) -> None:
    tell_building(site, code)
    if another:
        install(site, "other", {BUILDING: "row_scale = other:X"})
    with pytest.raises(BuildingError, match=f"operation row_scale: .*{match}"):
        select([manifest.loads(MANIFEST)])
