"""What a call of `Library.gemm` asks for: from the caller's tensors and words to a signature, and to matrices.

Knows shapes, strides and addresses as `TensorView`s show them, and nothing of archives, plans or the driver.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from ..errors import ArgumentError, LayoutError
from ..numbers.dtypes import DTYPES
from ..numbers.epilogue import EPILOGUES, Epilogue, extra_dtype
from ..numbers.scaling import FRAGMENTS, SCALINGS, TILES, Scaling, extent_of
from ..program.geometry import flatten_rows, overlaps_itself, same_elements, share_memory
from ..program.operation import OVERLAPS
from ..program.record import TensorView, check_address
from .signature import Signature

# What `gemm` takes besides a, b and out, in the order that kernels take them.
EXTRAS = ("scale_a", "scale_b", "scale_ab", "bias", "residual", "scale_d")
_PARTS = ("bias", "residual", "scale")  # of an epilogue, each there where its operand is
_ACTIVATIONS = {
    word: epilogue for word, epilogue in EPILOGUES.items() if not any(getattr(epilogue, part) for part in _PARTS)
}


class GemmOptions(TypedDict, total=False):
    """What `Library.gemm` takes by keyword besides out and stream; its docstring says what each is."""

    scale_a: Any
    scale_b: Any
    scale_ab: Any
    bias: Any
    residual: Any
    scale_d: Any
    epilogue: str
    overlap: str
    dtype: Any


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise TypeError, as Python does of its own, if `gemm` takes no argument by one of these keywords."""
    known = ("out", "stream", *GemmOptions.__annotations__)
    for name in names:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"gemm() got an unexpected keyword argument {name!r}; {hint}") from None


Views = Mapping[str, TensorView]  # by operand: a, b, perhaps d, and those of `EXTRAS` that were given


def epilogue_of(activation: Any, views: Views) -> Epilogue:
    """The whole epilogue: `activation`, and a part for each operand that is given.

    Raises:
        ArgumentError: `activation` is unknown.
    """
    found = _ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if found is None:
        raise ArgumentError(
            f"epilogue must be one of {', '.join(_ACTIVATIONS)}, found {activation!r:.50}; bias, residual and scale_d "
            "are arguments of their own"
        )
    return found._replace(bias="bias" in views, residual="residual" in views, scale="scale_d" in views)


def check_shapes(a: TensorView, b: TensorView) -> None:
    """Whether a @ b.T is meant by these shapes: b is 2-D, or both are 3-D with one batch extent."""
    batched = len(b.shape) == 3
    if batched and (len(a.shape) != 3 or a.shape[0] != b.shape[0]):
        raise ArgumentError(f"b of shape {b.shape} needs a of shape ({b.shape[0]}, M, {b.shape[2]}), found {a.shape}")
    if not batched and (len(b.shape) != 2 or not a.shape):
        raise ArgumentError(f"gemm takes a (..., K) and b (N, K), or both batched; found {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[-1] or a.shape[-1] == 0:
        raise ArgumentError(
            f"a {a.shape} and b {b.shape} must end in the same K, not 0: gemm computes a @ b.T, with b stored (N, K)"
        )


def result_shape(a: TensorView, b: TensorView, epilogue: Epilogue) -> tuple[int, ...]:
    """The shape of the result: a's, with the columns of D in place of K."""
    n = b.shape[-2]
    if epilogue.gated and n % 2:
        raise ArgumentError(f"b {b.shape} must have an even number of rows for {epilogue.activation}, found {n}")
    return (*a.shape[:-1], n // 2 if epilogue.gated else n)


def signature_of(views: Views, epilogue: Epilogue, overlap: Any) -> Signature:
    """What is asked for, of views that `check_shapes` has passed and with d of `result_shape`.

    Raises:
        ArgumentError: an operand has a wrong shape or element type, `overlap` is unknown, or one scale is missing.
    """
    a, b, d = views["a"], views["b"], views["d"]
    if overlap not in OVERLAPS:
        raise ArgumentError(f"overlap must be one of {', '.join(OVERLAPS)}, found {overlap!r:.50}")
    _check_extras(views, b.shape[-2], d)
    return Signature(
        a.dtype,
        b.dtype,
        d.dtype,
        "f32",
        epilogue.word(),
        b.shape[-2],
        b.shape[-1],
        b.shape[0] if len(b.shape) == 3 else 1,
        _scaling(views),
        "n" if _is_n_major(b) else "k",
        overlap,
    )


def _check_extras(views: Views, n: int, d: TensorView) -> None:
    for name in EXTRAS:
        if name not in views:
            continue
        found = views[name]
        dtypes = _scale_dtypes(views) if name in ("scale_a", "scale_b") else ("f32",)
        if not name.startswith("scale"):
            dtypes = (extra_dtype(d.dtype),)
        if found.dtype not in dtypes:
            known = " or ".join(dtypes)
            raise ArgumentError(f"{name} must have element type {known} where out has {d.dtype}, found {found.dtype}")
        if name in ("scale_d", "scale_ab") and math.prod(found.shape) != 1:
            raise ArgumentError(f"{name} must have one element, found shape {found.shape}")
        wanted = {"bias": (n,), "residual": d.shape}.get(name, found.shape)
        if found.shape != wanted:
            raise ArgumentError(f"{name} must have shape {wanted} for b {views['b'].shape}, found {found.shape}")


def _scale_dtypes(views: Views) -> tuple[str, ...]:
    """The element types that scales of A and B may have; of types that have none, that any have."""
    scaled = [s for s in SCALINGS.values() if s.dtype]
    fitting = [s for s in scaled if s.fits(views["a"].dtype, views["b"].dtype)]
    return tuple(dict.fromkeys(_held(s) for s in fitting or scaled))


def _held(scaling: Scaling) -> str:
    return DTYPES[scaling.dtype].stored or scaling.dtype


def _scaling(views: Views) -> str:
    """Which scaling element types and shapes of both scales mean; where several do, they mean the same, and the first
    is taken."""
    if not {"scale_a", "scale_b", "scale_ab"} & views.keys():
        return "none"
    if "scale_a" not in views and "scale_b" in views and views["a"].dtype != views["b"].dtype:
        return _scaling_of_weights(views)
    if "scale_a" not in views or "scale_b" not in views:
        raise ArgumentError("scale_a and scale_b come together; pass both or neither")
    scale_a, scale_b = views["scale_a"], views["scale_b"]
    a, b = views["a"].shape, views["b"].shape
    known = [s for s in SCALINGS.values() if s.operands == "ab" and _held(s) == scale_a.dtype == scale_b.dtype]
    known.sort(key=lambda s: views["a"].dtype not in s.of)
    for scaling in known:
        if _are_scales(scale_a.shape, scaling, "a", a) and _are_scales(scale_b.shape, scaling, "b", b):
            return _with_tensor_scale(scaling, "scale_ab" in views).word
    taken = ", ".join(f"{s.word} {_wanted(s, 'a', a)} and {_wanted(s, 'b', b)}" for s in known)
    raise ArgumentError(
        f"scale_a {scale_a.shape} of {scale_a.dtype} and scale_b {scale_b.shape} of {scale_b.dtype} fit no scaling of "
        f"a {a} and b {b}: {taken or 'pass two of one element type'}"
    )


def _scaling_of_weights(views: Views) -> str:
    """Which scaling of B alone its scales mean."""
    a, b, scale_b = views["a"], views["b"], views["scale_b"]
    known = [s for s in SCALINGS.values() if s.operands == "b" and s.fits(a.dtype, b.dtype)]
    for scaling in known:
        if _held(scaling) == scale_b.dtype and _are_scales(scale_b.shape, scaling, "b", b.shape):
            return _with_tensor_scale(scaling, "scale_ab" in views).word
    taken = " or ".join(f"{s.word} {_wanted(s, 'b', b.shape)} of {_held(s)}" for s in known)
    prepared = any(s.layout == FRAGMENTS for s in known)
    raise ArgumentError(
        f"scale_b {scale_b.shape} of {scale_b.dtype} fits no scaling of b {b.shape} of {b.dtype} under a of {a.dtype}: "
        f"{taken or 'there is none'}"
        + ("; runtime.torch.weights.prepare_weight makes b and scale_b" if prepared else "")
    )


def _with_tensor_scale(scaling: Scaling, given: bool) -> Scaling:
    """`scaling`, for which `scale_ab` is given or not as it has one or not."""
    if scaling.tensor_scale and not given:
        raise ArgumentError(
            f"scaling {scaling.word} needs scale_ab, one f32 element: the factor of A times that of B; pass "
            "torch.ones(1, device=...) where there are none"
        )
    if given and not scaling.tensor_scale:
        known = ", ".join(s.word for s in SCALINGS.values() if s.tensor_scale)
        raise ArgumentError(f"scale_ab is for the scaling {known}, found {scaling.word}; leave it out, or pass scale_d")
    return scaling


def _are_scales(found: tuple[int, ...], scaling: Scaling, of: str, shape: tuple[int, ...]) -> bool:
    """Whether such a shape is meant as the scales of `of`, "a" or "b", that has `shape`.

    One for a tensor: one element, of any shape. For rows: with an extent of 1 at will. For blocks: a matrix, of A also
    with its leading extents in place of the rows. Tiles: so many elements, of any shape.
    """
    wanted = _scales_shape(scaling, of, shape)
    if scaling.layout == TILES or scaling.axes(of) == ("1",):
        return math.prod(found) == math.prod(wanted)
    shapes = [wanted]
    if of == "a" and scaling.rows_a == 1:
        shapes.append((*shape[:-1], *wanted[1:]))
    if scaling.k is None:
        # A row of B's alone may be scales of blocks: (1, N) is for those that come with A's.
        shapes += [(*each, 1) for each in shapes] + ([(1, *wanted)] if of == "b" and scaling.operands == "ab" else [])
    return found in shapes


def _scales_shape(scaling: Scaling, of: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The extents of the scales of `of`, "a" or "b", that has `shape`, as a kernel takes them."""
    rows = math.prod(shape[:-1])
    known = {"M": rows, "N": rows, "K": shape[-1]}
    return tuple(extent_of(axis, known) for axis in scaling.axes(of))


def _wanted(scaling: Scaling, of: str, shape: tuple[int, ...]) -> str:
    wanted = _scales_shape(scaling, of, shape)
    if scaling.layout == TILES:
        return f"{math.prod(wanted)} elements in tiles of {TILES}"
    return "one element" if scaling.axes(of) == ("1",) else str(wanted)


def _is_n_major(b: TensorView) -> bool:
    """Whether consecutive rows of B, and not consecutive elements of a row, are neighbours in memory."""
    return b.strides[-1] != 1 < b.shape[-1] and b.strides[-2] == 1


def matrices(signature: Signature, views: Views) -> tuple[TensorView, ...]:
    """The operands as a kernel takes them, in its order: matrices, or all 3-D with a batch extent above 1; vectors.

    Raises:
        LayoutError: a tensor cannot be seen so without a copy.
    """
    for name in ("a", "b", "d", "residual"):
        if name in views and not (name == "b" and signature.b_major == "n"):
            _require_rows("out" if name == "d" else name, views[name])
    found = []
    for operand in signature.operands():
        name, view = operand.name, views[operand.name]
        if operand.axes == ("1",):
            view = view._replace(shape=(1,), strides=(1,))
        elif len(operand.axes) == 1:
            view = _vector(view, name)
        elif operand.layout == "tiles":
            view = _tiles(view, name, operand.axes, signature)
        elif len(operand.axes) == 2:
            view = flatten_rows(view, "out" if name == "d" else name)
        found.append(view)
    return tuple(found)


def _require_rows(name: str, t: TensorView) -> None:
    if t.strides[-1] != 1 < t.shape[-1]:
        raise LayoutError(
            f"{name} must be row-major, found strides {t.strides}; make it contiguous", f"strides of {name}"
        )


def _vector(t: TensorView, name: str) -> TensorView:
    """`t`, of extents that are 1 but for consecutive ones, as a vector of neighbours in memory."""
    size = math.prod(t.shape)
    expected = 1
    for extent, step in zip(reversed(t.shape), reversed(t.strides), strict=True):
        if extent != 1 and step != expected:
            raise LayoutError(
                f"{name} of shape {t.shape} must be contiguous, found strides {t.strides}; make it contiguous",
                f"strides of {name}",
            )
        expected *= extent
    return t._replace(shape=(size,), strides=(1,))


def _tiles(t: TensorView, name: str, axes: tuple[str, ...], signature: Signature) -> TensorView:
    """`t`, neighbours in memory, as tiles of scales: (tiles of rows, scales of a row of tiles); or as it is."""
    across = signature.extents()[axes[-1]]
    flat = _vector(t, name)
    return flat._replace(shape=(flat.shape[0] // across, across), strides=(across, 1))


def check_memory(views: Views) -> None:
    """Hold addresses against each other: all there, and D apart from itself and the rest.

    The residual may be D itself, the same elements at the same place: of that a copy is made.

    Raises:
        ArgumentError: they are not.
    """
    for name, t in views.items():
        check_address("out" if name == "d" else name, t)
    d = views["d"]
    if overlaps_itself(d):
        raise ArgumentError(f"out of shape {d.shape} and strides {d.strides} names elements twice; pass a dense tensor")
    for name, t in views.items():
        if name == "d" or not share_memory(t, d):
            continue
        if name != "residual":
            raise ArgumentError(f"out shares memory with {name}; write to another tensor")
        if not same_elements(t, d):
            raise ArgumentError(
                "out shares memory with residual without being the same tensor; pass the very same, or another"
            )
