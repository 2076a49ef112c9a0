"""Whether the addresses that launches give their kernels lie in the tensors and workspaces of the call.

A launch program may add a number to a pointer. Kernels go on from there by their own arithmetic, which nothing here
looks at. Knows nothing of functions, archives or the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..device.launch import Launch
from ..errors import ProgramError
from .geometry import span_bytes
from .record import Record, TensorView

# CuTe's TMA stores of variable length move a tensor's base by -2^30 strides, and its coordinates by as much the other
# way; a TMA descriptor keeps 57 bits of an address.
_TMA_SHIFT_STRIDES, _TMA_ADDRESS_BITS = 1 << 30, 57


def any_moved(launches: Iterable[Launch]) -> bool:
    """Whether a launch gives a kernel another address than that of a tensor or workspace."""
    for launch in launches:  # for every plan, and in loops a third of the time of `any`
        for slot in launch.slots:
            if slot.addend:
                return True
    return False


def tensors_of(given: Iterable[Any]) -> Iterator[TensorView]:
    """The tensors among a call's arguments, in the order of a program's pointers."""
    for argument in given:
        if isinstance(argument, TensorView):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_of(argument)


def require_inside(record: Record, launches: Iterable[Launch], given: Iterable[Any], workspaces: Sequence[int]) -> None:
    """Refuse launches of a function that was given these arguments, and workspaces of so many bytes.

    Raises:
        ProgramError: a kernel would get an address outside of these.
    """
    views = list(tensors_of(given))
    for launch in launches:
        problem = outside(launch, record.program.pointers, views, workspaces)
        if problem is not None:
            raise ProgramError(f"{record.name}: a launch {problem}; build the archive again")


def outside(launch: Launch, names: Sequence[str], views: Sequence[TensorView], workspaces: Sequence[int]) -> str | None:
    """Why an address is neither in its tensor or workspace nor at its end, as the end of a sentence; None where all
    are.

    `names` are those of the program's pointers: `views`, and then workspaces of so many bytes.
    """
    room: list[int] | None = None
    for slot in launch.slots:
        if not slot.addend:
            continue
        room = room or [*map(span_bytes, views), *workspaces]
        if 0 <= slot.addend <= room[slot.pointer]:  # at its end too: a kernel may take that to compare with
            continue
        shifted = _stride_bytes(views[slot.pointer]) if slot.tma and slot.pointer < len(views) else []
        if any((slot.addend + _TMA_SHIFT_STRIDES * s) % (1 << _TMA_ADDRESS_BITS) < room[slot.pointer] for s in shifted):
            continue
        return (
            f"gives a kernel the address of {names[slot.pointer]!r} plus {slot.addend}, where that has "
            f"{room[slot.pointer]} bytes"
        )
    return None


def _stride_bytes(view: TensorView) -> list[int]:
    one = span_bytes(view._replace(shape=(1,), strides=(1,)))
    return [stride * one for stride in view.strides]
