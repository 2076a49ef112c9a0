"""The command coverage: which layers of a model an archive serves, and which are missing."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from aot.pack.write import Package

from . import universal_archives
from .command_line import ALONE, MANIFEST, ROOT, Run, unwrapped
from .inspected import tables, write
from .recording_driver import cubin, gemm_record, table
from .simulated_tuning import scripted, tuned

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
TUNE = ["aot", "tune", "OUT", "-o", "TUNED"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "more.yaml").write_text(MORE)
    return write(tmp_path / "x.aot")


def commands(out: str) -> list[list[str]]:
    """The commands that were printed, as a shell reads them."""
    return [shlex.split(line) for line in out.replace("\\\n", "").splitlines() if line.startswith("  aot ")]


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
    words = shlex.split(
        f"aot manifest from-config {LLAMA} --tp 2 --tokens 1,16 --dtype bf16 --target sm_90a -o MANIFEST"
    )
    out = run("coverage", path, LLAMA, "--tp", 2, "--tokens", "1,16", "--dtype", "bf16").out
    assert commands(out) == [words, shlex.split(f"aot build MANIFEST --base {path} -o OUT"), TUNE]
    assert "ranked again" not in unwrapped(out), "no layer is tuned that could be"
    whole = layers(run, path, LLAMA, "--dtype", "bf16", status=1)
    assert whole["qkv"]["m"]["tuned"] == [1, 16, 64, 256, 1024]


def test_a_layer_is_added_without_losing_those_that_are_tuned(run: Run, path: Path) -> None:
    for model, name in (
        (path.parent / "more.yaml", "is a copy of"),
        (LLAMA, "keep only the missing layers in MANIFEST"),
    ):
        out = run("coverage", path, model).out
        assert commands(out)[-2][:3] == ["aot", "build", "MANIFEST"]
        assert name in unwrapped(out)
        assert "a tuned layer that it names would be ranked again" in unwrapped(out)
    out = run("coverage", path, path.parent / "more.yaml", "--target", "sm_100a").out
    build = ["aot", "build", str(path.parent / "more.yaml"), "--target", "sm_100a", "--base", str(path), "-o", "OUT"]
    assert commands(out) == [build, TUNE], "nothing is tuned there"


def test_the_commands_that_are_printed_keep_what_is_tuned(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tuned(folder / "tiny.aot", Path("model.aot"), scripted(lambda name, s, m: 2.0))
    more = "  - {name: more, n: 512, k: 512, tokens: [1]}\n"
    Path("model.yaml").write_text(MANIFEST + more)
    (build, _) = commands(run("coverage", "model.aot", "model.yaml").out)
    Path("MANIFEST").write_text(MANIFEST.partition("  - {name: up")[0] + more)
    done = run(*build[1:], "--candidates", 1, "--cache", folder / "cache", "--no-tune", *ALONE)
    assert (done.status, "gave way" in done.err) == (0, False)
    tuned(Path("OUT"), Path("TUNED"), scripted(lambda name, s, m: 3.0))
    found = layers(run, "TUNED", "model.yaml")
    assert [layer["m"]["tuned"] for layer in found.values()] == [[16, 256], [1], [1]]
    before, after = (json.loads(run("ls", path, "--json").out)["entries"] for path in ("model.aot", "TUNED"))
    assert [entry for entry in after if entry["names"] != ["more"]] == before


def test_commands_of_paths_with_spaces_can_be_pasted(run: Run, path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "archives of o'brien, and of all who build them for GPUs at work"
    folder.mkdir()
    path = path.rename(folder / "my model.aot")
    shutil.copy(LLAMA, folder / "config.json")
    of_config = commands(run("coverage", path, folder / "config.json").out)
    assert of_config[0][:4] == ["aot", "manifest", "from-config", str(folder / "config.json")]
    explained = commands(run("explain", path, "--n", 4096, "--k", 4000, "--m", 1).out)
    for build in (of_config[1], explained[0]):
        assert build[build.index("--base") + 1] == str(path)


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


def test_every_kind_that_a_target_was_tuned_on_is_shown(run: Run, path: Path) -> None:
    gemm = tables()["gemm"]
    gemm["gpus"].append(dict(gemm["gpus"][0], name="NVIDIA H100 80GB HBM3"))
    gemm["entries"].append(gemm["entries"][0] | {"gpu": 1})
    both = write(path.parent / "both.aot", {"gemm": gemm})
    result = run("coverage", both, path.parent / "model.yaml", "--target", "sm_90a", "--json")
    assert [place["gpu"]["name"] for place in json.loads(result.out)["places"]] == [
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.yaml"], "none.yaml: no such file"),
        (["model.yaml", "--target", "sm_100a", "--gpu", "H200"], "or give --target sm_90a"),
        (["model.yaml", "--tp", 1], "is no config.json, and --tp is of configs; leave it out"),
        (["model.yaml", "--ep", 2], "--ep is of configs"),
        (["model.yaml", "--tokens", "1,2"], "--tokens is of configs"),
        (["model.yaml", "--dtype", "bf16"], "--dtype is of configs"),
        (["model.yaml", "--scaling", "tensor"], "--scaling is of configs"),
        (["model.yaml", "--experts"], "--experts is of configs"),
        (["model.yaml", "--no-experts"], "--no-experts is of configs"),
        ([LLAMA, "--tokens", "1;2"], "is no list of integers such as 1,16,1024"),
    ],
)
def test_a_wrong_call_is_one_line(
    run: Run, path: Path, arguments: list[object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    result = run("coverage", path, *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err


def test_one_recipe_adds_what_all_targets_lack_that_can_have_it(run: Run, tmp_path: Path) -> None:
    """Blocks have kernels on Hopper alone, and the archive functions for other targets too."""
    names = {"sm_90a": "one", "sm_100a": "other"}
    package = Package()
    for target, name in names.items():
        package.add_function(gemm_record(name, target=target), cubin(name))
    package.set_table("gemm", table([]))
    package.write(tmp_path / "some.aot")
    config = json.loads(LLAMA.read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    for model, targets in ((LLAMA, ["sm_100a", "sm_90a"]), (tmp_path / "config.json", ["sm_90a"])):
        out = run("coverage", tmp_path / "some.aot", model, "--tokens", "1,16").out
        words = [word for target in targets for word in ("--target", target)]
        manifest, build, tune = commands(out)
        assert (manifest[-len(words) - 2 : -2], build[:3], tune) == (words, ["aot", "build", "MANIFEST"], TUNE)
        assert ("no build for sm_100a has qkv, o, gate_up, down" in unwrapped(out)) is (len(targets) == 1)
        assert run(*manifest[1:-1], tmp_path / f"{len(targets)}.yaml").status == 0


def test_what_no_build_has_for_a_target_is_said_and_no_command_advised(run: Run, tmp_path: Path) -> None:
    package = Package()
    package.add_function(gemm_record("other", target="sm_100a"), cubin("other"))
    package.set_table("gemm", table([]))
    package.write(tmp_path / "some.aot")
    model = tmp_path / "blocks.yaml"
    model.write_text(
        "format: 1\nmodel: blocks\nsource: a test\ntokens: [16]\ntargets: [sm_90a]\n"
        "gemms: [{name: o, n: 512, k: 512, dtypes: {a: e4m3, b: e4m3, d: bf16}, scaling: block}]\n"
    )
    covered = run("coverage", tmp_path / "some.aot", model)
    assert covered.status == 1
    assert "no build for sm_100a has o: " in covered.out
    assert not commands(covered.out)
    explained = run("explain", tmp_path / "some.aot", "e4m3_e4m3_bf16_f32_none_n512_k512_block", "--m", 16)
    assert explained.status == 1
    assert "no build for sm_100a has it: " in explained.out
    assert "aot build" not in explained.out
