"""Element types, one row each: their bits, what others call them, and how exactly they hold a number.

The short names are those of archives and messages. Imports no framework: names of others' types are strings, "" where
there is none.
"""

from __future__ import annotations

import math

from ..named_tuple import NamedTuple


class DType(NamedTuple):
    """An element type.

    One of fewer than 8 bits is packed: `unit` elements, the fewest that fill whole bytes, lie together without a gap,
    the first in the lowest bits. torch counts extents and strides of such a tensor in units; here they are in elements.
    """

    name: str
    bits: int
    torch: str = ""  # attribute of torch
    dlpack: int = -1  # DLDataTypeCode of dlpack.h 1.1; -1 where there is none
    dsl: str = ""  # attribute of cutlass, nvidia-cutlass-dsl
    typestr: str = ""  # of __array_interface__, without the order of bytes; ml_dtypes has torch's names for others
    heuristics: str = ""  # letter of nvidia-matmul-heuristics
    mantissa_bits: int | None = None  # stored ones; None of integers
    largest: float = 0.0  # finite value; 0.0 of integers
    # ||out - reference|| / ||reference|| that a kernel's output in this type may have. Rounding to nearest gives about
    # 0.42 of half a unit in the last place of it, and the rest is room for the order of summation. 0.0 where no kernel
    # here writes it.
    tolerance: float = 0.0
    stored: str = ""  # the type in which tensors hold it, where that is another: the same bits with a sign that is 0

    @property
    def unit(self) -> int:
        """Elements in the fewest whole bytes: 1, but of packed types 2 (4 bits) or 4 (6 bits)."""
        return 8 // math.gcd(self.bits, 8)

    @property
    def bytes(self) -> int:
        """Width in bytes of one element.

        Raises:
            ValueError: the type is packed, so an element has no whole number of bytes.
        """
        if self.bits % 8:
            raise ValueError(f"one {self.name} has {self.bits} bits, no whole bytes; ask `bytes_of` for several")
        return self.bits // 8

    def bytes_of(self, elements: int) -> int:
        """Bytes that hold so many neighbouring elements, the last perhaps in part."""
        return -(-elements * self.bits // 8)

    def filling(self, count_bytes: int) -> int:
        """The fewest elements, 1 or more, that fill a whole multiple of so many bytes (1 or more)."""
        return 8 * count_bytes // math.gcd(self.bits, 8 * count_bytes)

    @property
    def narrow(self) -> bool:
        """Whether this is a float of at most 8 bits: what is written saturates, and values use its whole range."""
        return self.mantissa_bits is not None and self.bits <= 8

    @property
    def rounding(self) -> float:
        """Half a unit in the last place, relative: the most that rounding to nearest changes a normal number by.

        Raises:
            ValueError: this is an integer.
        """
        if self.mantissa_bits is None:
            raise ValueError(f"{self.name} is an integer and rounds nothing")
        return 2.0 ** -(self.mantissa_bits + 1)


_F32_MAX, _BF16_MAX = (2 - 2.0**-23) * 2.0**127, (2 - 2.0**-7) * 2.0**127

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", 32, "float32", 2, "Float32", "f4", "S", 23, _F32_MAX, tolerance=1e-4),
        DType("bf16", 16, "bfloat16", 4, "BFloat16", "", "T", 7, _BF16_MAX, tolerance=3e-3),
        DType("f16", 16, "float16", 2, "Float16", "f2", "H", 10, 65504.0, tolerance=5e-4),
        DType("e4m3", 8, "float8_e4m3fn", 10, "Float8E4M3FN", "", "Q", 3, 448.0, tolerance=4e-2),
        DType("e5m2", 8, "float8_e5m2", 12, "Float8E5M2", "", "R", 2, 57344.0),
        DType("e3m2", 6, "", 16, "Float6E3M2FN", mantissa_bits=2, largest=28.0),
        DType("e2m1", 4, "float4_e2m1fn_x2", 17, "Float4E2M1FN", mantissa_bits=1, largest=6.0),
        DType("u4", 4, "uint4", 1, "Int4"),
        DType("i4", 4, "int4", 0, "Int4"),
        DType("i64", 64, "int64", 0, "Int64", "i8"),
        DType("i32", 32, "int32", 0, "Int32", "i4"),
        DType("i8", 8, "int8", 0, "Int8", "i1"),
        DType("u8", 8, "uint8", 1, "Uint8", "u1"),
        # Scales: powers of two, and (NVFP4's) e4m3 that are not negative.
        DType("ue8m0", 8, "float8_e8m0fnu", 14, "Float8E8M0FNU", mantissa_bits=0, largest=2.0**127),
        DType("ue4m3", 8, "float8_e4m3fn", 10, "Float8E4M3FN", mantissa_bits=3, largest=448.0, stored="e4m3"),
    )
}
# torch's names of the types that tensors have.
TORCH_NAMES = {d.name: d.torch for d in DTYPES.values() if d.torch and not d.stored}
