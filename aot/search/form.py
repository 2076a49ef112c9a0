"""What all variants that compute one signature have in common, and which of it a family has.

Knows no operation: `aot.search.operation.Building.form` says what of a signature that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from runtime.numbers.dtypes import DTYPES
from runtime.program.operation import OVERLAPS

from .variants import Family, Variant


class VariantForm(NamedTuple):
    """What variants must have alike to compute one signature: the element types of its operands, in order, and words.

    `accumulator` is the type of sums, None where the operation leaves that to the family.
    """

    elements: tuple[str, ...]
    batched: bool = False
    scaling: str = "none"
    b_major: str = "k"
    epilogue: str = "none"
    overlap: str = OVERLAPS[-1]  # the most that is promised
    accumulator: str | None = None
    rows: str = "contiguous"


def lacks(family: Family, form: VariantForm) -> list[str]:
    """What of a form no variant of a family has, whatever the choices; nothing where it has variants of this form. Its
    accumulator is not looked at."""
    has = {
        f"the element types {', '.join(form.elements)}": form.elements in family.elements,
        f"the epilogue {form.epilogue}": form.epilogue in family.epilogues,
        f"the scaling {form.scaling}": form.scaling in family.scalings,
        f"a B that is {form.b_major.upper()}-major": form.b_major in family.b_majors,
        f"{form.rows} rows": form.rows == family.rows,
        "batches" if form.batched else "an unbatched form": form.batched in family.batched,
        "scales or epilogues in a batch": not form.batched or (form.scaling, form.epilogue) == ("none", "none"),
    }
    return [part for part, there in has.items() if not there]


def relies_on_more(relied: object, promised: str) -> bool:
    """Whether a choice called overlap relies on more than is promised; words that are no such promise mean others."""
    return relied in OVERLAPS and OVERLAPS.index(str(relied)) > OVERLAPS.index(promised)


def unpromised(variant: Variant, promised: str) -> str | None:
    """Why a variant that has a choice called overlap cannot compute a signature that promises this, or None."""
    relied = variant.options.get("overlap")
    if relies_on_more(relied, promised):
        return f"{variant.family}: relies on overlap {relied}, promised is {promised}"
    return None


def no_whole_pieces(access_bytes: int, rows: Iterable[tuple[str, int, str]]) -> str | None:
    """Why rows of matrices are no whole pieces of so many bytes, or None. Of each row its extent by name, how many
    elements that is, and their type."""
    for extent, value, element in rows:
        pieces = DTYPES[element].filling(access_bytes)
        if value % pieces:
            need = f"which {access_bytes}-byte access to {element} needs"
            return f"{extent} = {value} is not a multiple of {pieces}, {need}"
    return None
