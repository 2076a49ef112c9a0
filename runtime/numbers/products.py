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


def scalings_of(a: str) -> tuple[str, ...]:
    """The words of the scalings that A and B of this type may have."""
    return tuple(word for word, s in SCALINGS.items() if not s.of or a in s.of)


def unsupported_scaling(a: str, scaling: str) -> str | None:
    """Why A and B of this type are not scaled so; None where they are."""
    if scaling in scalings_of(a):
        return None
    if scaling not in SCALINGS:
        return f"{scaling} is unknown; known: {', '.join(SCALINGS)}"
    return f"{scaling} is for A and B in {' or '.join(SCALINGS[scaling].of)}, found {a}"
