"""Which instructions do more than set a lane's registers from its own, and who knows what each does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import accesses, barriers, copies, lanes, products, tcgen05
from .arithmetic import TYPES
from .parse import Instruction
from .steps import Step

if TYPE_CHECKING:
    from .code import Code
    from .machine import Warp


def effect(code: Code, given: Instruction) -> Step:
    """The step of an instruction of `OPCODES`."""
    return OPCODES[given.opcode](code, given)


def _nothing(code: Code, given: Instruction) -> Step:
    return lambda warp: None


def _mapped(code: Code, given: Instruction) -> Step:
    """mapa: the same shared offset, of another CTA of the cluster."""
    kind = given.words[-1]
    put, of, rank = (
        code.target(given.operands[0], kind),
        code.value(given.operands[1], kind),
        code.value(given.operands[2], "u32"),
    )
    to = TYPES[kind]

    def mapped(warp: Warp) -> None:
        offsets = of(warp) & to((1 << 24) - 1)
        put(warp, (rank(warp).astype(to) << to(24)) | offsets)

    return mapped


OPCODES: dict[str, Callable[[Any, Instruction], Step]] = {
    **dict.fromkeys(("prefetch", "fence", "griddepcontrol", "setmaxnreg", "nanosleep", "membar"), _nothing),
    "ld": accesses.load,
    "ldu": accesses.load,
    "st": accesses.store,
    "atom": accesses.atomic,
    "red": accesses.atomic,
    "shfl": lanes.shuffled,
    "vote": lanes.voted,
    "elect": lanes.elected,
    "redux": lanes.reduced,
    "bar": barriers.barrier,
    "barrier": barriers.barrier,
    "mbarrier": barriers.mbarrier,
    "cp": copies.copy,
    "wgmma": products.wgmma,
    "mma": products.mma,
    "ldmatrix": products.matrices,
    "stmatrix": products.matrices,
    "mapa": _mapped,
    "clusterlaunchcontrol": copies.cluster_launch,
    "tcgen05": tcgen05.effect,
}
