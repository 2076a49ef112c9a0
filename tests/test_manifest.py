"""Claims about manifests: what is accepted, what is refused, and how that is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.problem.manifest import Gemm, Manifest, ManifestError, Problem, dump, load, loads
from runtime.gemm.signature import Signature
from runtime.numbers.epilogue import EPILOGUES

from .manifest_texts import BF16, GOOD, SHIPPED, edited, refused


def test_manifest_reads_every_field() -> None:
    assert loads(GOOD) == Manifest(
        model="tiny",
        source="made up",
        layers=2,
        tokens=(1, 16),
        targets=("sm_90a", "sm_80"),
        gemms=(
            Gemm("qkv", Signature(*BF16, n=96, k=64), count=1, tokens=(1, 16)),
            Gemm("lm_head", Signature(*BF16, n=1000, k=64), count=1, tokens=(1,), per="model"),
        ),
    )


def test_manifest_gemm_overrides_defaults() -> None:
    text = edited("{name: qkv, n: 96, k: 64}", "{name: qkv, n: 96, k: 64, dtypes: {a: f16, b: f16, d: f16}, batch: 3}")
    assert loads(text).gemms[0].signature == Signature("f16", "f16", "f16", "f32", "none", 96, 64, 3)


def test_manifest_default_tokens_stand_before_the_files() -> None:
    assert loads(edited("defaults:\n", "defaults:\n  tokens: [7]\n")).gemms[0].tokens == (7,)


def test_manifest_layers_default_to_one() -> None:
    assert loads(edited("layers: 2\n", "")).layers == 1


def test_manifest_accepts_a_byte_order_mark_and_windows_lines() -> None:
    assert loads("\ufeff" + GOOD.replace("\n", "\r\n")) == loads(GOOD)


def test_manifest_counts_calls_per_layer_and_per_model() -> None:
    manifest = loads(edited("{name: qkv, ", "{name: qkv, count: 3, "))
    assert [manifest.calls(g) for g in manifest.gemms] == [6, 1]


def test_problems_merge_equal_signatures() -> None:
    manifest = loads(edited("n: 1000", "n: 96"))
    assert manifest.problems() == (Problem(Signature(*BF16, n=96, k=64), ("qkv", "lm_head"), (1, 16)),)


def test_problems_keep_the_order_of_first_appearance() -> None:
    assert [p.names for p in loads(GOOD).problems()] == [("qkv",), ("lm_head",)]


def test_problems_keep_dtypes_apart() -> None:
    text = edited("n: 1000\n", "n: 96\n    dtypes: {a: f16, b: f16, d: f16}\n")
    assert len(loads(text).problems()) == 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_manifest_is_what_dump_writes_but_for_comments(path: Path) -> None:
    written = [line for line in dump(load(path)).splitlines() if not line.startswith("#")]
    assert written == [line for line in path.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_manifest_names_the_model_as_its_file(path: Path) -> None:
    assert load(path).model == path.stem


@pytest.mark.parametrize("field", ["format", "model", "source", "tokens", "targets", "gemms"])
def test_manifest_rejects_missing_field(field: str) -> None:
    renamed = "\n".join(line for line in GOOD.splitlines() if not line.startswith(f"{field}:"))
    if field == "gemms":
        renamed = GOOD[: GOOD.index("gemms:")]
    refused(renamed, f"1: field '{field}': missing; add `{field}:`")


@pytest.mark.parametrize("field", ["name", "n", "k"])
def test_manifest_rejects_gemm_without(field: str) -> None:
    text = re.sub(rf"\b{field}: \w+,? ?", "", GOOD.splitlines()[9]).replace(", }", "}")
    refused(edited(GOOD.splitlines()[9], text), f"10: field 'gemms[0].{field}': missing")


def test_manifest_rejects_gemm_without_dtypes() -> None:
    refused(
        edited("defaults:\n  dtypes: {a: bf16, b: bf16, d: bf16}\n", ""), "8: field 'gemms[0].dtypes': missing; add"
    )


def test_manifest_rejects_dtypes_without_d() -> None:
    refused(edited(", d: bf16", ""), "8: field 'defaults.dtypes.d': missing")


def test_manifest_rejects_unknown_top_field() -> None:
    refused(edited("targets:", "target:"), "6: field 'target': unknown; did you mean 'targets'?")


def test_manifest_rejects_unknown_gemm_field() -> None:
    refused(edited("per: model", "pre: model"), "14: field 'gemms[1].pre': unknown; did you mean 'per'?")


@pytest.mark.parametrize("field", ["name", "n", "k"])
def test_manifest_rejects_default_for_what_differs(field: str) -> None:
    refused(edited("defaults:\n", f"defaults:\n  {field}: 8\n"), f"8: field 'defaults.{field}': unknown")


def test_manifest_rejects_duplicate_top_key() -> None:
    refused(edited("layers: 2\n", "layers: 2\nlayers: 2\n"), "5: field 'layers': given twice, first on line 4")


def test_manifest_rejects_duplicate_gemm_key() -> None:
    refused(edited("n: 96,", "n: 96, n: 96,"), "10: field 'gemms[0].n': given twice")


def test_manifest_rejects_duplicate_gemm_name() -> None:
    refused(edited("lm_head", "qkv"), "11: field 'gemms[1].name': 'qkv' is already taken on line 10; give each")


def test_manifest_rejects_a_key_that_is_no_word() -> None:
    refused(edited("layers: 2", "yes: 2"), "4: the file: field names are words, found the boolean 'yes'")


def test_manifest_rejects_a_key_that_is_a_list() -> None:
    refused(edited("layers: 2", "[a]: 2"), "4: the file: field names are words, found a list")


def test_manifest_rejects_merge_keys() -> None:
    refused(edited("layers: 2", "<<: {layers: 2}"), "4: the file: field names are words")


def test_manifest_rejects_unaligned_n() -> None:
    refused(
        edited("n: 1000", "n: 100"), "12: field 'gemms[1].n': must be a positive multiple of 8, found 100", "pad to 104"
    )


def test_manifest_rejects_unaligned_k_of_fp8() -> None:
    text = GOOD.replace("{a: bf16, b: bf16", "{a: e4m3, b: e4m3").replace("k: 64}", "k: 72}")
    refused(text, "10: field 'gemms[0].k': must be a positive multiple of 16, found 72", "pad to 80")


@pytest.mark.parametrize("value", ["0", "-8", "99999999999", "9" * 5000, "0x60", "1_000", "010", "1:30"])
def test_manifest_rejects_integer_out_of_range_or_not_decimal(value: str) -> None:
    refused(edited("n: 1000", f"n: {value}"), "12: field 'gemms[1].n': must be an integer from 1 to 16777216, found")


@pytest.mark.parametrize(
    "value", ["'96'", "96.0", "true", "", "~", "[96]", "{a: 96}", "1e3", "0o140", "!!python/name:os.x"]
)
def test_manifest_rejects_what_is_not_an_integer(value: str) -> None:
    refused(edited("n: 1000", f"n: {value}"), "12: field 'gemms[1].n': must be a positive integer, found")


@pytest.mark.parametrize("value", ["1", "true", "~", "1.5", "[a]", "2020-01-01"])
def test_manifest_rejects_what_is_not_text(value: str) -> None:
    refused(edited("model: tiny", f"model: {value}"), "2: field 'model': must be text", "put quotes around text")


@pytest.mark.parametrize("value", ['""', '"a\\nb"', '"\\e[31m"', '"\\uD800"', "x" * 3000])
def test_manifest_rejects_text_that_is_not_one_printable_line(value: str) -> None:
    refused(edited("model: tiny", f"model: {value}"), "2: field 'model': must be one line")


@pytest.mark.parametrize("value", ["a b", "''", "a/b", "x" * 65, '"a\\n"'])
def test_manifest_rejects_gemm_name(value: str) -> None:
    refused(edited("name: lm_head", f"name: {value}"), "11: field 'gemms[1].name': must be 1 to 64 letters")


@pytest.mark.parametrize("tokens", ["[16, 1]", "[1, 1, 16]"])
def test_manifest_rejects_tokens_that_do_not_increase(tokens: str) -> None:
    refused(edited("tokens: [1, 16]", f"tokens: {tokens}"), "5: field 'tokens': must increase strictly; write [1, 16]")


def test_traffic_is_of_the_file_or_of_a_gemm() -> None:
    text = edited("tokens: [1, 16]", "tokens: [1, 16]\ntraffic: {1: 812, 16: 20311}")
    found = loads(text.replace("per: model", "per: model\n    traffic: {1: 3}"))
    assert [gemm.traffic for gemm in found.gemms] == [((1, 812), (16, 20311)), ((1, 3),)]
    assert loads(dump(found)) == found


@pytest.mark.parametrize(
    ("traffic", "says"),
    [
        ("{16: 1, 1: 2}", "field 'traffic': its M must increase strictly"),
        ("{1: 1, 1: 2}", "field 'traffic': its M must increase strictly"),
        ("[1, 2]", "field 'traffic': must be a mapping of 1 to 1000 M to counts, found a list"),
        ("{}", "field 'traffic': must be a mapping of 1 to 1000 M to counts, found 0 of them"),
        ("{0: 1}", "field 'traffic, an M': must be an integer from 1"),
        ("{1: 0}", "field 'traffic, a count': must be an integer from 1"),
        ("{1: {}}", "field 'traffic, a count': must be a positive integer, found a mapping"),
        ("{a: 1}", "field 'traffic, an M': must be a positive integer, found the text 'a'"),
    ],
)
def test_manifest_rejects_traffic_that_makes_no_sense(traffic: str, says: str) -> None:
    refused(edited("tokens: [1, 16]", f"tokens: [1, 16]\ntraffic: {traffic}"), f"6: {says}")


def test_manifest_rejects_zero_tokens() -> None:
    refused(edited("tokens: [1, 16]", "tokens: [1, 0]"), "5: field 'tokens[1]': must be an integer from 1")


@pytest.mark.parametrize(("old", "field"), [("[1, 16]", "tokens"), ("[sm_90a, sm_80]", "targets")])
def test_manifest_rejects_empty_list(old: str, field: str) -> None:
    refused(edited(old, "[]"), f"{5 if field == 'tokens' else 6}: field '{field}': must hold 1 to 1000 items")


def test_manifest_rejects_empty_gemms() -> None:
    refused(GOOD[: GOOD.index("gemms:")] + "gemms: []\n", "9: field 'gemms': must hold 1 to")


def test_manifest_rejects_too_many_items() -> None:
    refused(edited("[1, 16]", str(list(range(1, 1002)))), "5: field 'tokens': must hold 1 to 1000 items, found 1001")


def test_manifest_rejects_a_scalar_where_a_list_belongs() -> None:
    refused(edited("tokens: [1, 16]", "tokens: 16"), "5: field 'tokens': must be a list, found the integer '16'")


def test_manifest_rejects_a_gemm_that_is_no_mapping() -> None:
    refused(edited("{name: qkv, n: 96, k: 64}", "qkv"), "10: field 'gemms[0]': must be a mapping")


def test_manifest_rejects_unknown_target() -> None:
    refused(edited("sm_90a, sm_80", "sm_90"), "6: field 'targets[0]': unknown value 'sm_90'; did you mean 'sm_90a'?")


def test_manifest_rejects_target_given_twice() -> None:
    refused(edited("sm_90a, sm_80", "sm_80, sm_80"), "6: field 'targets[1]': 'sm_80' is there twice")


def test_manifest_rejects_unknown_dtype() -> None:
    refused(edited("a: bf16", "a: bf61"), "8: field 'defaults.dtypes.a': unknown value 'bf61'; did you mean 'bf16'?")


def test_manifest_rejects_unsupported_combination_of_dtypes() -> None:
    text = edited("{name: qkv, n: 96, k: 64}", "{name: qkv, n: 96, k: 64, dtypes: {a: f16, b: f16, d: bf16}}")
    refused(text, "10: field 'gemms[0].dtypes': the combination {a: f16, b: f16, d: bf16}")


def test_manifest_rejects_unsupported_combination_in_defaults_at_its_own_line() -> None:
    refused(edited("d: bf16", "d: f16"), "8: field 'defaults.dtypes': the combination {a: bf16, b: bf16, d: f16}")


@pytest.mark.parametrize("dtype", ["i64", "u8", "f32"])
def test_manifest_names_as_known_only_element_types_that_a_gemm_takes(dtype: str) -> None:
    with pytest.raises(ManifestError) as caught:
        loads(edited("a: bf16", f"a: {dtype}"))
    assert str(caught.value).endswith("known: bf16, f16, e4m3, e2m1")


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("0", "check the value"),
        ("-8", "check the value"),
        ("9" * 5000, "check the value"),
        ("0x60", "write plain digits"),
    ],
)
def test_manifest_fix_for_an_integer_fits_the_mistake(value: str, fix: str) -> None:
    with pytest.raises(ManifestError) as caught:
        loads(edited("n: 1000", f"n: {value}"))
    assert str(caught.value).endswith(f"; {fix}")


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("accumulator", "f16", "f32"),
        ("epilogue", "swigul", "swiglu"),
        ("epilogue", "residual+bias", "some parts, in this order"),
        ("scaling", "row_colum", "row_column"),
        ("b_major", "m", "known: k, n"),
        ("overlap", "weight", "weights"),
        ("per", "token", "known: layer, model"),
    ],
)
def test_manifest_rejects_unknown_choice(field: str, value: str, near: str) -> None:
    where = f"10: field 'gemms[0].{field}': unknown value '{value}'"
    refused(edited("n: 96,", f"n: 96, {field}: {value},"), where, near)


@pytest.mark.parametrize(
    ("found", "meant"),
    [
        ("relu+bias", "bias+relu"),
        ("scale+residual+swiglu_interleaved+bias", "bias+swiglu_interleaved+residual+scale"),
        ("Bias + ReLU", "bias+relu"),
        ("none+bias", "bias"),
        ("bias+bias", "bias"),
    ],
)
def test_manifest_suggests_the_right_order_of_the_parts_of_an_epilogue(found: str, meant: str) -> None:
    refused(edited("n: 96,", f"n: 96, epilogue: {found},"), f"10: field 'gemms[0].epilogue': unknown value '{found}'")
    refused(edited("n: 96,", f"n: 96, epilogue: {found},"), "10", f"; did you mean '{meant}'? known: ")


@given(st.sampled_from(sorted(EPILOGUES)).flatmap(lambda word: st.permutations(word.split("+"))))
def test_manifest_suggests_the_epilogue_that_any_order_of_its_parts_means(parts: list[str]) -> None:
    found, meant = "+".join(parts), next(w for w in EPILOGUES if sorted(w.split("+")) == sorted(parts))
    if found != meant:
        refused(edited("n: 96,", f"n: 96, epilogue: {found},"), "10", f"did you mean '{meant}'? ")


def test_a_manifest_reads_back_where_a_terminal_had_to_escape_it() -> None:
    written = loads(GOOD.replace("tiny", "t\u00efny \u6a21 \U0001f600").replace("made up", "m\u00e4de up \u6a21 " * 20))
    assert loads(dump(written).encode("ascii", "backslashreplace").decode()) == written


def test_manifest_does_not_list_a_hundred_epilogues() -> None:
    with pytest.raises(ManifestError) as caught:
        loads(edited("n: 96,", "n: 96, epilogue: swigul,"))
    assert len(str(caught.value)) < 300
    assert "gelu_tanh|silu|swiglu[_interleaved]|" in str(caught.value)


FP8 = "dtypes: {a: e4m3, b: e4m3, d: bf16}"


def test_manifest_reads_the_words_of_a_gemm() -> None:
    words = "epilogue: bias+silu+residual, overlap: weights, b_major: n"
    found = loads(edited("n: 96,", f"n: 96, {words},")).gemms[0].signature
    assert found == Signature("bf16", "bf16", "bf16", "f32", "bias+silu+residual", 96, 64, 1, "none", "n", "weights")
    scaled = loads(edited("n: 96,", f"n: 96, scaling: block, {FP8},")).gemms[0].signature
    assert (scaled.scaling, scaled.a) == ("block", "e4m3")


def test_manifest_takes_words_from_defaults() -> None:
    text = edited("defaults:\n", "defaults:\n  epilogue: silu\n  overlap: launch\n")
    assert {(g.signature.epilogue, g.signature.overlap) for g in loads(text).gemms} == {("silu", "launch")}


@pytest.mark.parametrize(
    ("words", "field", "message"),
    [
        ("scaling: tensor", "scaling", "tensor is for A and B in e4m3, found bf16; write `scaling: none`"),
        (f"b_major: n, {FP8}", "b_major", "write `b_major: k`"),
        ("b_major: n, epilogue: bias+geglu", "b_major", "n is not for gates, found bias+geglu; write `b_major: k`"),
        ("dtypes: {a: bf16, b: bf16, d: e4m3}", "epilogue", "needs a scale, found none; write `epilogue: scale`"),
        ("dtypes: {a: f16, b: f16, d: e4m3}, epilogue: silu", "epilogue", "write `epilogue: silu+scale`"),
        ("batch: 2, epilogue: silu", "epilogue", "silu is not for a batch, found 2; write `epilogue: none`"),
        ("batch: 2, overlap: launch", "overlap", "write `overlap: serial`"),
        (f"batch: 2, scaling: block, {FP8}", "scaling", "write `scaling: none`"),
    ],
)
def test_manifest_rejects_words_that_do_not_go_together(words: str, field: str, message: str) -> None:
    refused(edited("n: 96,", f"n: 96, {words},"), f"10: field 'gemms[0].{field}': ", message)


@pytest.mark.parametrize(
    ("words", "multiple"),
    [
        ("epilogue: swiglu", 16),
        ("dtypes: {a: bf16, b: bf16, d: e4m3}, epilogue: swiglu+scale", 32),
        ("dtypes: {a: bf16, b: bf16, d: e4m3}, epilogue: scale", 16),
    ],
)
def test_manifest_rejects_columns_of_d_that_fill_no_row(words: str, multiple: int) -> None:
    n = 96 + multiple // 2
    refused(
        edited("n: 96,", f"n: {n}, {words},"),
        f"10: field 'gemms[0].n': must be a positive multiple of {multiple}, found {n}",
        f"pad to {96 + multiple}",
    )


@pytest.mark.parametrize("field", ["batch", "count"])
def test_manifest_rejects_zero(field: str) -> None:
    refused(edited("n: 96,", f"n: 96, {field}: 0,"), f"10: field 'gemms[0].{field}': must be an integer from 1")


def test_manifest_checks_defaults_that_every_gemm_overrides() -> None:
    refused(edited("defaults:\n", "defaults:\n  count: many\n"), "8: field 'defaults.count'")
