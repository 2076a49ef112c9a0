"""Element types by their short names, as archives and messages write them.

Knows bits and nothing of frameworks; `runtime.program.tensor` maps framework types to these names.
"""

from ..named_tuple import NamedTuple


class DType(NamedTuple):
    """An element type: its short name and its width in bits."""

    name: str
    bits: int

    @property
    def bytes(self) -> int:
        """Width in bytes of one element."""
        return self.bits // 8


DTYPES = {
    d.name: d
    for d in (
        DType("f32", 32),
        DType("bf16", 16),
        DType("f16", 16),
        DType("e4m3", 8),
        DType("e5m2", 8),
        DType("i64", 64),
        DType("i32", 32),
        DType("i8", 8),
        DType("u8", 8),
    )
}
