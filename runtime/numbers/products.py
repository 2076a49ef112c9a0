"""Which element types and scalings go together in a product: what manifests may ask for.

Whether there is a kernel for it on a target is for providers to say.
"""

from __future__ import annotations

from .scaling import SCALINGS

# a, b, d
PRODUCTS: tuple[tuple[str, str, str], ...] = (
    ("bf16", "bf16", "bf16"),
    ("f16", "f16", "f16"),
    ("e4m3", "e4m3", "bf16"),
    ("e4m3", "e4m3", "f16"),
    ("e4m3", "e4m3", "e4m3"),
    ("bf16", "bf16", "e4m3"),
    ("f16", "f16", "e4m3"),
    ("e2m1", "e2m1", "bf16"),
    ("e2m1", "e2m1", "f16"),
    ("bf16", "e2m1", "bf16"),
    ("bf16", "u4", "bf16"),
    ("bf16", "i8", "bf16"),
    ("f16", "i8", "f16"),
    ("bf16", "i4", "bf16"),
    ("bf16", "e4m3", "bf16"),
)
ACCUMULATORS = ("f32",)


def product_words(a: str, b: str, d: str) -> str:
    """Three element types as a manifest writes them."""
    return f"{{a: {a}, b: {b}, d: {d}}}"


def unsupported_types(a: str, b: str, d: str) -> str | None:
    """Why these make no product, and which do; None where they make one."""
    if (a, b, d) in PRODUCTS:
        return None
    known = "; ".join(product_words(*product) for product in PRODUCTS)
    return f"the combination {product_words(a, b, d)} is not supported; use one of {known}"


def scalings_of(a: str, b: str = "") -> tuple[str, ...]:
    """The words of the scalings that A and B of these types, or both of one, may have."""
    return tuple(word for word, s in SCALINGS.items() if s.fits(a, b or a))


def unsupported_scaling(a: str, scaling: str, b: str = "") -> str | None:
    """Why A and B of these types, or both of one, are not scaled so; None where they are."""
    if scaling in scalings_of(a, b):
        return None
    if scaling not in SCALINGS:
        return f"{scaling} is unknown; known: {', '.join(SCALINGS)}"
    of, of_b = SCALINGS[scaling].of, SCALINGS[scaling].of_b
    if of_b or b not in ("", a):
        wanted = f"A in {' or '.join(of)} and B in {' or '.join(of_b)}" if of_b else "A and B of one type"
        return f"{scaling} is for {wanted}, found {a} and {b or a}"
    return f"{scaling} is for A and B in {' or '.join(of)}, found {a}"
