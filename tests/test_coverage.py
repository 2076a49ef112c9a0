"""The command coverage: which layers of a model an archive serves, and which are missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from . import universal_archives
from .command_line import ROOT, Run
from .inspected import write

MODEL = """\
format: 1
model: made-up-8b
source: made up
tokens: [16, 1024, 4096]
targets: [sm_90a]
defaults:
  dtypes: {a: bf16, b: bf16, d: bf16}
gemms:
  - {name: qkv, n: 6144, k: 4096}
  - {name: o, n: 4096, k: 4096}
"""
MORE = MODEL + "  - {name: down, n: 4096, k: 14336}\n"
LLAMA = ROOT / "tests" / "data" / "configs" / "llama-3.1-8b.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "more.yaml").write_text(MORE)
    return write(tmp_path / "x.aot")


def layers(run: Run, *arguments: object, status: int = 0) -> dict[str, Any]:
    result = run("coverage", *arguments, "--json")
    assert result.status == status
    (place,) = json.loads(result.out)["places"]
    return {layer["name"]: layer for layer in place["layers"]}


def test_m_values_go_to_the_state_that_serves_them(run: Run, path: Path) -> None:
    found = layers(run, path, path.parent / "model.yaml")
    assert found["qkv"]["m"] == {"tuned": [16, 1024], "beyond": [4096], "ranked": [], "predicted": [], "missing": []}
    assert found["o"]["m"]["ranked"] == [16, 1024, 4096]
    out = run("coverage", path, path.parent / "model.yaml").out
    (line,) = [line.split() for line in out.splitlines() if line.startswith("qkv ")]
    assert line[2:] == ["16-1024", "4096"]
    assert out.endswith("all 2 layers are served\n")


def test_what_is_missing_is_named_with_status_1(run: Run, path: Path) -> None:
    found = layers(run, path, path.parent / "more.yaml", status=1)
    assert found["down"]["m"]["missing"] == [16, 1024, 4096]
    assert found["down"]["package"]
    result = run("coverage", path, path.parent / "more.yaml")
    assert (result.status, result.err) == (1, "")
    assert "1 of 3 layers are missing: down\n" in result.out
    assert "the package's archive predicts for 1 of these" in result.out


def test_a_config_is_taken_as_its_manifest(run: Run, path: Path) -> None:
    found = layers(run, path, LLAMA, "--tp", 2, "--tokens", "1,16", "--dtype", "bf16", status=1)
    assert found.keys() == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert found["qkv"]["signature"] == "bf16_bf16_bf16_f32_none_n3072_k4096"
    out = run("coverage", path, LLAMA, "--tp", 2, "--tokens", "1,16", "--dtype", "bf16").out.replace(" \\\n   ", "")
    assert f"\n  aot manifest from-config {LLAMA} --tp 2 --tokens 1,16 --dtype bf16 -o MANIFEST\n" in out
    assert f"\n  aot build MANIFEST --base {path} -o OUT\n" in out
    whole = layers(run, path, LLAMA, "--dtype", "bf16", status=1)
    assert whole["qkv"]["m"]["tuned"] == [1, 16, 64, 256, 1024]


def test_forms_serve_what_has_no_entry(run: Run, path: Path, tmp_path: Path) -> None:
    universal_archives.write(tmp_path / "forms.aot")
    found = layers(run, tmp_path / "forms.aot", path.parent / "more.yaml", "--gpu", "H200")
    assert all(layer["m"]["predicted"] == [16, 1024, 4096] for layer in found.values())


def test_what_was_tuned_on_another_kind_says_so(run: Run, path: Path) -> None:
    found = layers(run, path, path.parent / "model.yaml", "--gpu", "H100")
    assert found["qkv"]["tuned_on"]["name"] == "NVIDIA H200"
    assert found["o"]["tuned_on"] is None


def test_another_target_serves_nothing_of_it(run: Run, path: Path) -> None:
    found = layers(run, path, path.parent / "model.yaml", "--target", "sm_100a", status=1)
    assert found["qkv"]["m"]["missing"] == [16, 1024, 4096]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.yaml"], "none.yaml: no such file"),
        ([LLAMA, "--tokens", "1;2"], "is no list of integers such as 1,16,1024"),
    ],
)
def test_a_wrong_call_is_one_line(run: Run, path: Path, arguments: list[object], said: str) -> None:
    result = run("coverage", path, *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err
