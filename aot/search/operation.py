"""What building must know of an operation besides its signatures: which variants compute one, which of them are
compiled, at which M and in which order, and what refuses them. The operations of which it knows that, by name.

A `Building` is found by the operation's name. Others than this package's come by entry points in the group
"cute_aot.building", each the name of an operation and where its `Building` is (`package.module:object`). An operation
without one has what is usual: `Building` as it is here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from runtime.errors import AotError, ArgumentError
from runtime.program.entry_points import find
from runtime.program.operation import names as operation_names
from runtime.program.operation import operation
from runtime.program.record import Record

from .form import VariantForm
from .provider import family_of, provider, provider_names
from .shorthand import Shorthand
from .variants import Family, Variant

GROUP = "cute_aot.building"
_OWN = {
    "gemm": "aot.search.gemm:GEMM",
    "rmsnorm": "aot.search.rmsnorm:RMSNORM",
    "grouped_gemm": "aot.search.grouped_gemm:GROUPED_GEMM",
    "moe_permute": "aot.search.moe:MOE_PERMUTE",
    "moe_combine": "aot.search.moe:MOE_COMBINE",
    "quantise": "aot.search.quantise:QUANTISE",
}
FIRST = next(iter(_OWN))  # which a file means that names none: it was written when there was no other


class BuildingError(AotError):
    """What an entry point names says nothing of how its operation is built."""


class Shortlist(NamedTuple):
    """What is compiled for each signature: variants at each M, ascending, best first; and what ordered them, in words,
    which are empty where nothing did."""

    by_signature: Mapping[Any, tuple[tuple[int, tuple[Variant, ...]], ...]]
    source: str = ""


class Building:
    """What building knows of the operation called `name`; of each method here is what is usual.

    `plural` is what messages call several of its problems. `section` is the field of manifests that lists them:
    "operations", under its name, unless it has a field of its own. With `by_signature` its variants are too many to be
    enumerated but for a signature, so nobody gets all of them by the operation's name. `forms` says whether functions
    can be chosen for forms of its signatures, which serve others of the form too. `shorthand` is what an item of a
    manifest may say in place of some fields of signatures.
    """

    section = "operations"
    by_signature = False
    forms = False
    shorthand: Shorthand | None = None

    def __init__(self, name: str, plural: str = "") -> None:
        self.name, self.plural = name, plural or f"{name}s"

    def form(self, signature: Any) -> VariantForm:
        """What variants must have to compute it: the element types of its operands."""
        return VariantForm(tuple(operand.dtype for operand in signature.operands()))

    def unlike(self, variant: Variant, signature: Any) -> str | None:
        """Why a variant of the operation is of another form than a signature, or None."""
        wanted = self.form(signature)
        if variant.elements != wanted.elements:
            return f"{variant.family} is of {', '.join(variant.elements)}, not {', '.join(wanted.elements)}"
        if variant.scaling != wanted.scaling:
            return f"{variant.family}: scaling is {variant.scaling}, not {wanted.scaling}"
        if variant.epilogue != wanted.epilogue:
            return f"{variant.family}: epilogue is {variant.epilogue}, not {wanted.epilogue}"
        return None

    def limit(self, variant: Variant, family: Family | None, signature: Any) -> str | None:
        """Why a variant of a signature's form cannot compute it, or None: what its family says. `family` is None where
        it is unknown here. What extents functions take their records say too, see `refusal`."""
        return family.limit(variant, signature) if family else None

    def roomy(self, signature: Any) -> Any:
        """The signature, or another of its form whose extents every family takes, where some take only some."""
        return signature

    def variants(self, target: str, signature: Any) -> list[Variant]:
        """Every variant of all providers that computes it on a target and is worth compiling, in their order."""
        every = (v for p in provider_names() for v in provider(p).functions(target))
        return [v for v in every if v.operation == self.name and self.unlike(v, signature) is None]

    def shortlist(self, wanted: Mapping[Any, Sequence[int]], target: str, limit: int) -> Shortlist:
        """What to compile for signatures at M values, which ascend; about `limit` variants at each, if something orders
        them. Usually nothing does, and it is all that there are."""
        return Shortlist({s: tuple((m, tuple(self.variants(target, s))) for m in ms) for s, ms in wanted.items()})

    def estimates(self, variants: Sequence[Variant]) -> Callable[[Any, int], list[float]]:
        """What gives the estimated microseconds of each of `variants`, of a signature and M. Their families must have
        estimates, which are usually asked one by one."""
        asked = [(v, f.estimate_us) for v in variants if (f := family_of(v)) and f.estimate_us]
        return lambda signature, m: [float(estimate_us(v, signature, m)) for v, estimate_us in asked]

    def correction(self, variant: Variant, signature: Any) -> Callable[[int], float]:
        """What gives what an estimate at an M is to be multiplied by, by what was measured of such variants at other
        signatures; usually 1."""
        return lambda m: 1.0

    def refusal(self, record: Record, signature: Any) -> str | None:
        """Why a compiled function, whose arguments are the signature's, cannot be called for it, or None: by what its
        record demands of contiguous operands."""
        try:
            numbers = {argument.name: 1 for argument in record.device_arguments}
            record.bind(operation(self.name).arguments(signature, 1, 0), numbers)
        except ArgumentError as error:
            return str(error)
        return None


def names() -> tuple[str, ...]:
    """The operations that there are here: this project's in their order, then others by name."""
    return (*_OWN, *sorted(set(operation_names()) - set(_OWN)))


@functools.cache
def building(name: str) -> Building:
    """How the operation called `name` is built; what is usual where nobody says.

    Raises:
        BuildingError: what an entry point names cannot be imported, or is no `Building`, or there are two.
    """
    made = find(name, _OWN, GROUP, ("name", "plural"), BuildingError)
    if made is None:
        return Building(name)
    if not isinstance(made, Building) or made.name != name:
        raise BuildingError(
            f"operation {name}: what is in the group {GROUP} is no aot.search.operation.Building of that name; mend it"
        )
    return made
