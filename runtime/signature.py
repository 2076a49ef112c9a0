"""What a GEMM computes, without M: the key under which a server looks a kernel up.

Knows nothing of kernels, tiles or devices.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from .dtypes import DTYPES
from .errors import RecordError

EPILOGUES = ("none",)


@dataclass(frozen=True)
class Signature:
    """D = epilogue(A @ B^T): A (M, K), B (N, K) and D (M, N), all row-major; a leading batch extent L when `batch` > 1.

    `a`, `b`, `d` and `accumulator` are element types by short name (`runtime.dtypes`). B is stored as
    `torch.nn.Linear` stores its weight.
    """

    a: str
    b: str
    d: str
    accumulator: str
    epilogue: str
    n: int
    k: int
    batch: int = 1

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        batch = f"_b{self.batch}" if self.batch > 1 else ""
        return f"{self.a}_{self.b}_{self.d}_{self.accumulator}_{self.epilogue}_n{self.n}_k{self.k}{batch}"

    def flops(self, m: int) -> int:
        """Floating-point operations at `m` rows: 2 M N K for each batch."""
        return 2 * m * self.n * self.k * self.batch

    def bytes(self, m: int) -> int:
        """The fewest bytes of device memory to move at `m` rows: A and B read once, D written once."""
        a, b, d = (DTYPES[t].bytes for t in (self.a, self.b, self.d))
        return self.batch * (m * self.k * a + self.n * self.k * b + m * self.n * d)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: Any) -> Signature:
        """Read what `to_json` wrote.

        Raises:
            RecordError: a field is missing, unknown, or not of its type.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(obj, dict) or set(obj) != names:
            raise RecordError(f"a signature needs exactly the fields {sorted(names)}, found {obj!r}")
        for name in ("a", "b", "d", "accumulator"):
            if obj[name] not in DTYPES:
                raise RecordError(f"signature field {name!r}: unknown element type {obj[name]!r}")
        if obj["epilogue"] not in EPILOGUES:
            raise RecordError(f"signature field 'epilogue': unknown epilogue {obj['epilogue']!r}")
        for name in ("n", "k", "batch"):
            if type(obj[name]) is not int or obj[name] < 1:
                raise RecordError(f"signature field {name!r} must be a positive integer, found {obj[name]!r}")
        return cls(**obj)
