"""Claims about manifests that are written: they read back as they were, and the page has all that they say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.problem.manifest import Gemm, Manifest, ManifestError, dump, loads, manifest, nodes, reader, rules
from aot.search.targets import TARGETS
from runtime.gemm.signature import MAJORS, Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import ACTIVATIONS, EPILOGUES, GATED
from runtime.numbers.products import ACCUMULATORS, PRODUCTS, scalings_of
from runtime.numbers.scaling import SCALINGS
from runtime.program.operation import OVERLAPS

from .manifest_texts import BF16, ROOT

PAGE = ROOT / "docs" / "manifests.md"


def test_dump_says_a_common_scaling_once() -> None:
    rows = Signature("e4m3", "e4m3", "bf16", "f32", "none", 64, 64, 1, "row_column")
    plain = Signature(*BF16, n=64, k=64)
    gemms = tuple(Gemm(name, s, 1, (1,)) for name, s in (("a", rows), ("b", rows), ("c", plain)))
    text = dump(Manifest("m", "s", (1,), ("sm_90a",), gemms))
    assert text.count("scaling: row_column") == 1
    assert text.count("scaling: none") == 1


def test_dump_rejects_an_unaligned_extent() -> None:
    gemm = Gemm("odd", Signature(*BF16, n=7, k=64), 1, (1,))
    with pytest.raises(ManifestError, match="positive multiple of 8, found 7"):
        dump(Manifest("m", "s", (1,), ("sm_90a",), (gemm,)))


def test_dump_rejects_text_that_would_not_read_back() -> None:
    gemm = Gemm("one", Signature(*BF16, n=8, k=64), 1, (1,))
    with pytest.raises(ManifestError, match="surrounding spaces"):
        dump(Manifest(" m", "s", (1,), ("sm_90a",), (gemm,)))


@pytest.mark.parametrize("line_break", ["\n", "\r", "\x85", "\u2028"])
def test_dump_rejects_a_line_break_in_the_model(line_break: str) -> None:
    gemm = Gemm("one", Signature(*BF16, n=8, k=64), 1, (1,))
    with pytest.raises(ManifestError, match="manifest of "):
        dump(Manifest(f"m{line_break}layers: 5", "s", (1,), ("sm_90a",), (gemm,)))


texts = st.text(min_size=1, max_size=200).filter(lambda s: s.isprintable() and s == s.strip())


tokens = st.sets(st.integers(1, manifest.MAX_TOKENS), min_size=1, max_size=6).map(lambda s: tuple(sorted(s)))


extents = st.integers(1, manifest.MAX_EXTENT // 32).map(lambda i: 32 * i)


def _signature(of: Any, n: int, k: int, batch: int, epilogue: str, words: tuple[str, str]) -> Signature:
    """With a B in rows and a scale of D where those are demanded, so that few are filtered out."""
    (a, b, d), scaling = of
    parts = EPILOGUES[epilogue]
    if DTYPES[d].narrow:
        parts = parts._replace(scale=True)
    b_major = words[0] if DTYPES[b].bits == 16 and not parts.gated else "k"
    return Signature(a, b, d, "f32", parts.word(), n, k, batch, scaling, b_major, words[1])


signatures = st.builds(
    _signature,
    st.sampled_from([(types, scaling) for types in PRODUCTS for scaling in scalings_of(types[0], types[1])]),
    extents,
    extents,
    st.integers(1, manifest.MAX_COUNT) | st.just(1),
    st.sampled_from(list(EPILOGUES)),
    st.tuples(st.sampled_from(MAJORS), st.sampled_from(OVERLAPS)),
).filter(lambda s: rules.signature_problem(s) is None)


counts = st.integers(1, manifest.MAX_COUNT)


names = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True) | st.sampled_from(["no", "1", "1e5", "null", "-", "."])


passes = st.dictionaries(st.integers(1, manifest.MAX_TOKENS), st.integers(1, manifest.MAX_PASSES), max_size=40)


traffic = passes.map(lambda found: tuple(sorted(found.items())))


gemms = st.builds(Gemm, names, signatures, counts, tokens, st.sampled_from(manifest.PER), traffic=traffic)


manifests = st.builds(
    Manifest,
    model=texts | st.sampled_from(["yes", "12", "a: b", "# x", "{}", "'", '"', "\\", "---"]),
    source=texts,
    tokens=tokens,
    targets=st.lists(st.sampled_from(list(TARGETS)), min_size=1, unique=True).map(tuple),
    gemms=st.lists(gemms, min_size=1, max_size=4, unique_by=lambda g: g.name).map(tuple),
    layers=counts,
)


@given(manifests)
def test_what_dump_writes_loads_back_equal(manifest: Manifest) -> None:
    assert loads(dump(manifest)) == manifest


def test_page_has_every_field_and_its_default() -> None:
    said = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE))
    defaults = {**manifest.USUAL, "count": 1, "per": "layer", "layers": 1}
    for field in (*reader._TOP_FIELDS, *reader._GEMM_FIELDS):
        assert field in said, field
        if field in defaults:
            assert said[field].strip("`") == str(defaults[field]), field


def test_page_has_every_word_and_every_limit() -> None:
    page = PAGE.read_text()
    words = {*TARGETS, *SCALINGS, *MAJORS, *OVERLAPS, *ACTIVATIONS, *GATED, *manifest.PER, *ACCUMULATORS}
    assert not {word for word in words if f"`{word}`" not in page}
    limits = (manifest.MAX_EXTENT, manifest.MAX_TOKENS, manifest.MAX_COUNT, nodes.MAX_ITEMS, nodes.MAX_TEXT_CHARACTERS)
    assert not {limit for limit in limits if f"{limit:,}" not in page}
    assert f"{nodes.MAX_FILE_BYTES >> 10} KiB" in page


def test_example_of_the_page_is_a_manifest() -> None:
    example, *_ = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [g.name for g in loads(example).gemms] == ["qkv", "gate_up", "lm_head"]
