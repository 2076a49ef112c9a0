"""Scales, bias, residual and epilogues on a recording driver: which operand reaches which slot, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from runtime import ArgumentError, KernelMiss, LayoutError, Library
from runtime.container.archive import Archive
from runtime.serve.gemm import request
from runtime.serve.options import Options

from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, operands_record, signature, write_archive

N, K, P = 512, 4160, 256  # K is 32.5 blocks of 128
FULL = {"epilogue": "bias+swiglu+residual+scale", "scaling": "row_column", "dtype": "e4m3", "d": "bf16"}
SIGNATURES: dict[str, dict[str, Any]] = {
    "full": FULL,
    "block": {"scaling": "block", "dtype": "e4m3", "d": "bf16"},
    "tensor": {"scaling": "tensor", "dtype": "e4m3", "d": "f16"},
    "rows": {"scaling": "row_column", "dtype": "e4m3", "d": "bf16"},
    "quantised": {"epilogue": "relu+residual+scale", "d": "e4m3"},
    "silu": {"epilogue": "silu"},
    "bias": {"epilogue": "bias"},
    "residual": {"epilogue": "residual"},
    "weights": {"overlap": "weights"},
    "n_major": {"b_major": "n"},
    "interleaved": {"epilogue": "geglu_tanh_interleaved"},
}


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    wanted = {name: signature(N, K, **more) for name, more in SIGNATURES.items()}
    records = [operands_record(name, of) for name, of in wanted.items()]
    entries = [entry(of, [(None, name)]) for name, of in wanted.items()]
    return RecordingDriver(kernels=write_archive(tmp_path / "model.aot", records, entries))


@pytest.fixture
def library(driver: RecordingDriver, tmp_path: Path) -> Library:
    return Library(Archive.open(tmp_path / "model.aot"), driver)


E4M3, F32 = "float8_e4m3fn", "float32"


def everything(m: int = 16, *lead: int) -> dict[str, Any]:
    """The arguments of "full"."""
    rows = lead or (m,)
    return {
        "a": FakeTensor((*rows, K), E4M3),
        "b": FakeTensor((N, K), E4M3),
        "out": FakeTensor((*rows, P)),
        "scale_a": FakeTensor((*rows, 1), F32),
        "scale_b": FakeTensor((N,), F32),
        "bias": FakeTensor((N,)),
        "residual": FakeTensor((*rows, P)),
        "scale_d": FakeTensor((), F32),
        "epilogue": "swiglu",
    }


def pointers(driver: RecordingDriver, launch: int = -1) -> list[int]:
    return [struct.unpack("<Q", p)[0] for p in driver.launches[launch].parameters[:-1]]


def rows_of(driver: RecordingDriver) -> int:
    return int(struct.unpack("<I", driver.launches[-1].parameters[-1])[0])


# --- where operands go ---

ORDER = ("a", "b", "out", "scale_a", "scale_b", "bias", "residual", "scale_d")


def test_every_operand_reaches_its_slot_at_the_first_and_at_later_calls(
    library: Library, driver: RecordingDriver
) -> None:
    for _ in range(3):
        call = everything()
        assert library.gemm(**call) is call["out"]
        assert pointers(driver) == [call[name].pointer for name in ORDER]
    assert driver.count("prepare") == 1
    assert {x.symbol for x in driver.launches} == {"kernel_full"}


def test_later_calls_ask_the_driver_for_nothing(library: Library, driver: RecordingDriver) -> None:
    library.gemm(**everything())
    driver.log.clear()
    library.gemm(**everything())
    assert driver.log == []
    library.gemm(**everything(), stream=7)
    assert driver.log == []
    assert driver.launches[-1].stream == 7


def test_result_is_allocated_with_the_columns_of_the_epilogue(library: Library, driver: RecordingDriver) -> None:
    for _ in range(2):
        call = everything()
        del call["out"]
        result = library.gemm(**call)
        assert (result.shape, repr(result.dtype)) == ((16, P), "torch.bfloat16")
        assert pointers(driver)[2] == result.pointer
    assert driver.count("prepare") == 1


def test_leading_dimensions_of_every_operand_become_rows(library: Library, driver: RecordingDriver) -> None:
    library.gemm(**everything(0, 2, 3, 4))
    assert rows_of(driver) == 24


@pytest.mark.parametrize(
    ("of_a", "of_b", "name"),
    [
        ((), (), "tensor"),
        ((1,), (1, 1), "tensor"),
        ((16,), (N,), "rows"),
        ((16, 1), (1, N), "rows"),
        ((16, 1), (N, 1), "rows"),
        ((16, 33), (4, 33), "block"),
    ],
)
def test_scaling_follows_from_the_shapes_of_the_scales(
    library: Library, driver: RecordingDriver, of_a: tuple[int, ...], of_b: tuple[int, ...], name: str
) -> None:
    a, b = FakeTensor((16, K), E4M3), FakeTensor((N, K), E4M3)
    dtype = "f16" if name == "tensor" else None
    library.gemm(a, b, scale_a=FakeTensor(of_a, F32), scale_b=FakeTensor(of_b, F32), dtype=dtype)
    assert driver.launches[-1].symbol == f"kernel_{name}"


@pytest.mark.parametrize(
    ("of_a", "of_b", "name"),
    [((1,), (N,), "rows"), ((1, 1), (1, N), "rows"), ((1,), (1,), "tensor"), ((1, 33), (4, 33), "block")],
)
def test_scaling_of_one_row_is_told_by_both_scales(
    library: Library, driver: RecordingDriver, of_a: tuple[int, ...], of_b: tuple[int, ...], name: str
) -> None:
    a, b = FakeTensor((1, K), E4M3), FakeTensor((N, K), E4M3)
    dtype = "f16" if name == "tensor" else None
    library.gemm(a, b, scale_a=FakeTensor(of_a, F32), scale_b=FakeTensor(of_b, F32), dtype=dtype)
    assert driver.launches[-1].symbol == f"kernel_{name}"


def test_scales_of_blocks_of_a_may_lie_either_way(library: Library, driver: RecordingDriver) -> None:
    a, b = FakeTensor((16, K), E4M3), FakeTensor((N, K), E4M3)
    for strides in ((33, 1), (1, 16), (40, 1)):
        library.gemm(a, b, scale_a=FakeTensor((16, 33), F32, strides), scale_b=FakeTensor((4, 33), F32))
    assert len(driver.launches) == 3


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"epilogue": "silu"}, "silu"),
        ({"bias": FakeTensor((N,))}, "bias"),
        ({"residual": FakeTensor((16, N))}, "residual"),
        ({"overlap": "weights"}, "weights"),
        ({"epilogue": "geglu_tanh_interleaved"}, "interleaved"),
    ],
)
def test_words_and_operands_choose_the_signature(
    library: Library, driver: RecordingDriver, more: dict[str, Any], name: str
) -> None:
    for _ in range(2):
        library.gemm(FakeTensor((16, K)), FakeTensor((N, K)), **more)
        assert driver.launches[-1].symbol == f"kernel_{name}"


def test_transposed_b_reaches_the_kernel_for_it(library: Library, driver: RecordingDriver) -> None:
    library.gemm(FakeTensor((16, K)), FakeTensor((N, K), strides=(1, N)))
    assert driver.launches[-1].symbol == "kernel_n_major"


@pytest.mark.parametrize("dtype", ["e4m3", None])
def test_element_type_of_the_result_may_be_asked_for(
    library: Library, driver: RecordingDriver, torch: FakeTorch, dtype: str | None
) -> None:
    wanted = dtype or torch.float8_e4m3fn
    result = library.gemm(
        FakeTensor((16, K)),
        FakeTensor((N, K)),
        residual=FakeTensor((16, N)),
        scale_d=FakeTensor((1,), F32),
        epilogue="relu",
        dtype=wanted,
    )
    assert repr(result.dtype) == "torch.float8_e4m3fn"
    assert driver.launches[-1].symbol == "kernel_quantised"


def test_no_rows_give_an_empty_result_and_no_launch(library: Library, driver: RecordingDriver) -> None:
    call = everything(0)
    assert library.gemm(**call) is call["out"]
    assert driver.launches == []


def test_plain_calls_have_plans_of_their_own(library: Library, driver: RecordingDriver) -> None:
    a, b, out = FakeTensor((16, K)), FakeTensor((N, K)), FakeTensor((16, N))
    library.gemm(a, b, out=out, epilogue="silu")
    with pytest.raises(KernelMiss):
        library.gemm(a, b, out=out)
    with pytest.raises(KernelMiss):
        library.gemm(a, b, out=out, epilogue="none")


# --- residual in place ---


def test_of_a_residual_that_is_the_output_a_copy_is_added(library: Library, driver: RecordingDriver) -> None:
    a, b = FakeTensor((16, K)), FakeTensor((N, K))
    for _ in range(3):
        x = FakeTensor((16, N))
        assert library.gemm(a, b, residual=x, out=x) is x
        *_, d, residual = pointers(driver)
        assert d == x.pointer
        assert not x.pointer - 2 * 16 * N < residual < x.pointer + 2 * 16 * N, "two tiles may make a row"
        library.gemm(a, b, residual=FakeTensor((16, N)), out=x)  # a plan of such calls does not serve the next


def test_the_copy_of_a_residual_is_made_on_the_stream_of_the_call(
    library: Library, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    on: list[Any] = []
    entered = request.on_stream

    def noting(handle: Any, like: Any) -> Any:
        on.append(handle)
        return entered(handle, like)

    monkeypatch.setattr(request, "on_stream", noting)
    a, b, x = FakeTensor((16, K)), FakeTensor((N, K)), FakeTensor((16, N))
    library.gemm(a, b, residual=x, out=x, stream=7)
    assert (on, driver.launches[-1].stream) == ([7], 7)


def test_a_residual_that_is_the_output_and_not_torchs_is_refused(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.serve.gemm.request.is_torch", lambda x: False)
    a, b, x = FakeTensor((16, K)), FakeTensor((N, K)), FakeTensor((16, N))
    with pytest.raises(ArgumentError, match="out is residual, which kernels may read after they wrote it"):
        library.gemm(a, b, residual=x, out=x)


def test_residual_that_overlaps_the_output_otherwise_is_refused_on_every_call(library: Library) -> None:
    a, b, x = FakeTensor((16, K)), FakeTensor((N, K)), FakeTensor((16, N))
    for _ in range(2):
        shifted = FakeTensor((16, N), pointer=x.pointer + 64)
        with pytest.raises(ArgumentError, match="out shares memory with residual without being the same tensor"):
            library.gemm(a, b, residual=shifted, out=x)
        wide = FakeTensor((16, N), strides=(2 * N, 1), pointer=x.pointer)
        with pytest.raises(ArgumentError, match="out shares memory with residual without"):
            library.gemm(a, b, residual=wide, out=x)
        library.gemm(a, b, residual=x, out=x)


def test_residual_of_another_width_cannot_be_the_output(library: Library) -> None:
    out = FakeTensor((16, N), E4M3)
    with pytest.raises(ArgumentError, match="out shares memory with residual"):
        library.gemm(
            FakeTensor((16, K)),
            FakeTensor((N, K)),
            residual=FakeTensor((16, N), pointer=out.pointer),
            scale_d=FakeTensor((1,), F32),
            epilogue="relu",
            out=out,
        )


# --- refusals ---


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("bias", FakeTensor((P,)), r"bias must have shape \(512,\)"),
        ("bias", FakeTensor((N,), F32), "bias must have element type bf16 where out has bf16, found f32"),
        ("residual", FakeTensor((16, N)), r"residual must have shape \(16, 256\)"),
        ("residual", FakeTensor((16, P), "float16"), "residual must have element type bf16"),
        ("scale_d", FakeTensor((2,), F32), "scale_d must have one element"),
        ("scale_d", FakeTensor(()), "scale_d must have element type f32"),
        ("scale_a", FakeTensor((16,)), "scale_a must have element type f32"),
        ("scale_a", None, "scale_a and scale_b come together"),
        ("scale_b", None, "scale_a and scale_b come together"),
        ("scale_a", FakeTensor((17,), F32), r"fit no scaling of .*: tensor .*row_column \(16,\).*block \(16, 33\) and"),
        ("scale_b", FakeTensor((), F32), "fit no scaling"),
        ("scale_b", FakeTensor((4, 33), F32), "fit no scaling"),
        ("epilogue", "swigul", "epilogue must be one of none, relu, .*found 'swigul'"),
        ("epilogue", "bias+silu", "bias, residual and scale_d are arguments of their own"),
        ("epilogue", ["silu"], "epilogue must be one of"),
        ("overlap", "always", "overlap must be one of serial, launch, weights"),
        ("dtype", "f17", "dtype must be a torch dtype or one of"),
        ("dtype", "f16", "out has element type bf16, dtype says f16"),
        ("out", FakeTensor((16, N)), r"out must have shape \(16, 256\)"),
    ],
)
def test_operand_that_does_not_fit_is_refused_by_name(library: Library, name: str, wrong: Any, message: str) -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message):
            library.gemm(**(everything() | {name: wrong}))
        library.gemm(**everything())


def test_odd_rows_of_b_have_no_gates(library: Library) -> None:
    with pytest.raises(ArgumentError, match="even number of rows for swiglu, found 511"):
        library.gemm(FakeTensor((16, K)), FakeTensor((511, K)), epilogue="swiglu")


@pytest.mark.parametrize("name", [n for n in ORDER if n != "out"])
def test_output_over_any_operand_is_refused_on_every_call(library: Library, name: str) -> None:
    for _ in range(2):
        call = everything()
        call["out"].pointer = call[name].pointer - 32
        with pytest.raises(ArgumentError, match=f"out shares memory with {name}"):
            library.gemm(**call)
        library.gemm(**everything())


@pytest.mark.parametrize("name", ORDER)
def test_misaligned_operand_is_refused_on_every_call(library: Library, name: str) -> None:
    shift = 2 if name in ("scale_a", "scale_d") else 8
    for _ in range(2):
        call = everything()
        call[name].pointer += shift
        with pytest.raises(LayoutError, match="must start at a multiple of"):
            library.gemm(**call)
        library.gemm(**everything())


@pytest.mark.parametrize("name", ORDER)
def test_operand_without_memory_is_refused_on_every_call(library: Library, name: str) -> None:
    for _ in range(2):
        call = everything()
        call[name].pointer = 0
        with pytest.raises(ArgumentError, match=f"{name} of shape .* has no memory behind it"):
            library.gemm(**call)
        library.gemm(**everything())


@pytest.mark.parametrize("name", ORDER[1:])
def test_operand_on_another_device_is_refused(library: Library, name: str) -> None:
    library.gemm(**everything())
    call = everything()
    call[name].device.index = 1
    with pytest.raises(ArgumentError, match=f"{name} is on device 1"):
        library.gemm(**call)


@pytest.mark.parametrize(
    ("name", "strides"), [("scale_a", (2, 1)), ("scale_b", (2,)), ("bias", (2,)), ("residual", (1, 16))]
)
def test_operand_that_is_not_dense_is_refused(library: Library, name: str, strides: tuple[int, ...]) -> None:
    call = everything()
    call[name]._strides = strides
    with pytest.raises(LayoutError, match=rf"{name} .*make it contiguous"):
        library.gemm(**call)


def test_unknown_keyword_is_refused(library: Library) -> None:
    with pytest.raises(TypeError) as caught:
        library.gemm(**(everything() | {"biass": None}))
    assert str(caught.value) == "gemm() got an unexpected keyword argument 'biass'; did you mean 'bias'?"
    with pytest.raises(TypeError, match=r"^gemm\(\) got .* 'zzz'; it takes out, stream, scale_a, .*, dtype$"):
        library.gemm(**(everything() | {"zzz": None}))


def test_type_error_of_another_kind_is_not_taken_for_an_unknown_keyword(library: Library) -> None:
    class Odd(FakeTensor):
        def data_ptr(self) -> int:
            raise TypeError("odd")

    call = everything()
    library.gemm(**call)
    call["bias"] = Odd(call["bias"].shape, "bfloat16")
    with pytest.raises(TypeError, match=r"^odd$"):
        library.gemm(**call)


# --- fall-back ---


def test_scaled_gemms_do_not_fall_back(driver: RecordingDriver, tmp_path: Path) -> None:
    library = Library(Archive.open(tmp_path / "model.aot"), driver, Options(on_miss="torch"))
    call = everything() | {"epilogue": "geglu"}
    with pytest.raises(KernelMiss, match=r"epilogue is bias.swiglu.residual.scale, wanted bias.geglu.residual.scale"):
        library.gemm(**call)


def test_fallback_counts_by_the_whole_signature(
    driver: RecordingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "runtime.serve.gemm.calls.torch_gemm", lambda torch, epilogue, given, out: seen.append((given, out))
    )
    library = Library(Archive.open(tmp_path / "model.aot"), driver, Options(on_miss="torch"))
    a, b, x = FakeTensor((16, K)), FakeTensor((N, K)), FakeTensor((16, N))
    assert library.gemm(a, b, residual=x, out=x, epilogue="gelu") is x
    assert library.misses == {"bf16_bf16_bf16_f32_gelu+residual_n512_k4160": 1}
    assert seen == [({"a": a, "b": b, "residual": x}, x)]
