"""Claims about the files of manifests: what is no YAML, no manifest, or no file is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot.problem.manifest import ManifestError, dump, load, loads, nodes

from .examples import few_or_many, run_examples
from .manifest_texts import GOOD, SHIPPED, edited, refused


def test_manifest_rejects_newer_format_before_its_unknown_fields() -> None:
    refused(edited("format: 1", "future: 1\nformat: 2"), "2: field 'format': found 2, this version reads 1")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n"])
def test_manifest_rejects_empty_text(text: str) -> None:
    refused(text, "")


@pytest.mark.parametrize("text", ["- 1\n", "text\n", "12\n"])
def test_manifest_rejects_a_root_that_is_no_mapping(text: str) -> None:
    refused(text, "1: the file: must be a mapping")


def test_manifest_rejects_tabs_and_says_so() -> None:
    refused(edited("    n: 1000", "\tn: 1000"), "12: not a YAML manifest", "indent with spaces, not tabs")


def test_manifest_rejects_broken_yaml_with_its_line() -> None:
    refused(edited("tokens: [1, 16]", "tokens: [1, 16"), "6: not a YAML manifest")


def test_manifest_rejects_two_documents() -> None:
    refused(GOOD + "---\n" + GOOD, "16: not a YAML manifest")


def test_manifest_rejects_control_characters_with_their_line() -> None:
    refused(edited("made up", "made\x00up"), "3: the character U+0000 is not allowed")


@pytest.mark.parametrize("value", ['"\\U7FFFFFFF"', "%", "@x", "!<%FF> x", '"\\xZZ"'])
def test_manifest_rejects_absurd_escapes(value: str) -> None:
    refused(edited("made up", value), "")


def test_manifest_rejects_absurd_yaml_directive() -> None:
    refused(f"%YAML {'9' * 5000}.1\n---\n{GOOD}", "")


def test_manifest_rejects_anchors() -> None:
    refused(edited("[1, 16]", "&t [1, 16]"), "5: not a YAML manifest: anchors and aliases are not allowed")


def test_manifest_rejects_aliases() -> None:
    refused(edited("[1, 16]", "*t"), "5: not a YAML manifest: anchors and aliases are not allowed")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_manifest_rejects_deep_nesting(opening: str) -> None:
    refused(opening * 10_000, "1: not a YAML manifest: nested deeper than 8 levels")


def test_manifest_rejects_too_large_a_text() -> None:
    refused(GOOD + "#" * nodes.MAX_FILE_BYTES, " larger than")


def test_load_rejects_too_large_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("#" * (nodes.MAX_FILE_BYTES + 1))
    with pytest.raises(ManifestError, match="larger than"):
        load(path)


def test_load_rejects_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"m\.yaml: no such file"):
        load(tmp_path / "m.yaml")


def test_load_rejects_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r": is a folder; name a manifest in it"):
        load(tmp_path)


def test_load_rejects_an_impossible_path() -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        load("a\0b")


@pytest.mark.parametrize("more", [1, nodes.MAX_FILE_BYTES])
def test_an_archive_is_told_from_a_manifest_whatever_its_size(tmp_path: Path, more: int) -> None:
    (tmp_path / "m.aot").write_bytes(b"CUTEAOT\0" + b"\xff" * more)
    with pytest.raises(ManifestError, match=r"m\.aot: is an archive, not a manifest; give it to `aot build --base`"):
        load(tmp_path / "m.aot")


def test_load_rejects_bytes_that_are_not_utf8_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(GOOD.encode().replace(b"made", b"m\xff"))
    with pytest.raises(ManifestError, match=r"m\.yaml:3: byte 0xff is not UTF-8"):
        load(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
@few_or_many(40, 150)
def test_any_mutated_byte_loads_or_is_a_manifest_error(path: Path, examples: int, tmp_path: Path) -> None:
    original, copy = path.read_bytes(), tmp_path / "mutated.yaml"

    def check(data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(original) - 1))
        mutated = bytearray(original)
        mutated[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        copy.write_bytes(mutated)
        try:
            manifest = load(copy)
        except ManifestError:
            return
        assert loads(dump(manifest)) == manifest

    run_examples(examples, check, data=st.data())


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("{}[]:,-&*!|>'\"%@`#?\\ \n\tab1~<=.")))
def test_any_text_of_yaml_signs_is_a_manifest_error(text: str) -> None:
    with pytest.raises(ManifestError):
        loads(text)
