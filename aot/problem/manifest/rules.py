"""Which GEMMs a manifest may hold, from a file or from elsewhere: what their words and extents owe each other."""

from __future__ import annotations

from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.products import scalings_of, unsupported_scaling, unsupported_types
from runtime.numbers.scaling import SCALINGS

from .manifest import MAX_EXTENT, USUAL

# TMA and vectorised copies need rows that start on this boundary.
ROW_ALIGNMENT_BYTES = 16


def signature_problem(signature: Signature) -> tuple[str, str] | None:
    """Why no manifest may hold this signature, as (field, complaint with its fix), or None when it may."""
    if problem := unsupported_types(signature.a, signature.b, signature.d):
        return "dtypes", problem
    return _words_problem(signature) or _extents_problem(signature)


def _words_problem(signature: Signature) -> tuple[str, str] | None:
    """What does not go together, whatever the extents."""
    s = signature
    if problem := unsupported_scaling(s.a, s.scaling, s.b):
        of_b = SCALINGS[s.scaling].of_b if s.scaling in SCALINGS else ()
        fixes = [f"`b: {b}`" for b in of_b if s.scaling in scalings_of(s.a, b)]
        fixes.append(f"`scaling: {' or '.join(scalings_of(s.a, s.b))}`")
        return "scaling", f"{problem}; write {' or '.join(fixes)}"
    if s.b_major == "n" and DTYPES[s.b].narrow:
        return "b_major", f"n is for B of 16 bits, and {s.b} is K-major; write `b_major: k`"
    if s.b_major == "n" and s.parts.gated:
        return "b_major", f"n is not for gates, found {s.epilogue}; write `b_major: k` and store B (N, K)"
    if DTYPES[s.d].narrow and not s.parts.scale:
        fixed = "scale" if s.epilogue == "none" else f"{s.epilogue}+scale"
        return "epilogue", f"D in {s.d} needs a scale, found {s.epilogue}; write `epilogue: {fixed}`"
    if s.batch > 1:
        for field in ("scaling", "epilogue", "overlap"):
            found = getattr(s, field)
            if found != USUAL[field]:
                may_be_usual = field != "scaling" or USUAL[field] in scalings_of(s.a, s.b)
                fix = f"write `{field}: {USUAL[field]}`" if may_be_usual else "leave `batch` out"
                return field, f"{found} is not for a batch, found {s.batch}; {fix}"
    return None


def _extents_problem(signature: Signature) -> tuple[str, str] | None:
    """Which extent does not fill rows, or is absurd."""
    s = signature
    whole = {t: DTYPES[t].filling(ROW_ALIGNMENT_BYTES) for t in (s.a, s.b, s.d)}
    wider, of = ("B", s.b) if whole[s.b] > whole[s.a] else ("A and B", s.a)
    rows = [("n", s.n, "D", s.d, whole[s.d]), ("k", s.k, wider, of, whole[of])]
    if s.parts.gated:
        rows[0] = ("n", s.n, "D, n/2 columns,", s.d, 2 * whole[s.d])
    if s.b_major == "n":
        rows.insert(1, ("n", s.n, "an N-major B", s.b, whole[s.b]))
    for field, extent, operand, dtype, multiple in rows:
        if extent < 1 or extent % multiple:
            near = max(extent + -extent % multiple, multiple)
            return field, (
                f"must be a positive multiple of {multiple}, found {extent}; rows of {operand} in {dtype} must be "
                f"multiples of {ROW_ALIGNMENT_BYTES} bytes: pad to {near}"
            )
        if extent > MAX_EXTENT:
            return field, f"must be at most {MAX_EXTENT}, found {extent}; check the shape"
    return None
