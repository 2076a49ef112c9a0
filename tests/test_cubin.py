import pytest

from aot.compile import cubin
from aot.compile.cubin import CubinError, CubinKernel

from .made_up_kernel import cubin as made_up
from .made_up_kernel import cubin_of

WHOLE = made_up("rows", payload=bytes(64))


def test_a_cubin_says_what_its_kernels_are() -> None:
    (kernel,) = cubin.kernels(WHOLE).values()
    assert (kernel.symbol, kernel.registers, kernel.shared_bytes, kernel.local_bytes) == ("rows", 32, 0, 0)


def test_a_cubin_says_the_resources_and_parameters_of_each_of_its_kernels() -> None:
    stated = [CubinKernel("a", 168, 1024, 0, (128, 8, 4)), CubinKernel("b", 255, 0, 64, ())]
    assert cubin.kernels(cubin_of(stated)) == {kernel.symbol: kernel for kernel in stated}


def test_a_cubin_cut_short_anywhere_is_refused() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(CubinError):
            cubin.kernels(WHOLE[:length])


def test_a_cubin_without_its_last_program_header_is_refused() -> None:
    """Compilers write these last; a full disk takes them first."""
    headers = bytearray(WHOLE)
    headers[0x20:0x28] = (len(WHOLE) - 50).to_bytes(8, "little")
    headers[0x36:0x3A] = b"\x38\x00\x01\x00"  # one of 56 bytes
    with pytest.raises(CubinError, match="cut short"):
        cubin.kernels(bytes(headers))
