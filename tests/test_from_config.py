"""`aot manifest from-config`: what it writes and refuses to replace."""

import errno
import os
from pathlib import Path

import pytest

from aot.problem import manifest
from aot.problem.manifest import Manifest

from .command_line import ROOT, Run


def test_from_config_writes_a_manifest(run: Run, tmp_path: Path) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    arguments = ["--tp", 2, "--tokens", "1,16", "--target", "sm_90a", "--model", "half", "--source", "someone/llama"]
    result = run("manifest", "from-config", config, *arguments)
    written: Manifest = manifest.loads(result.out)
    assert (result.status, written.model, written.tokens, written.targets) == (0, "half", (1, 16), ("sm_90a",))
    assert run("manifest", "from-config", config, *arguments, "-o", tmp_path / "m.yaml").out == ""
    assert (tmp_path / "m.yaml").read_text() == result.out


def test_from_config_keeps_the_machines_path_out_and_names_the_model(run: Run, tmp_path: Path) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    (tmp_path / "Mine").mkdir()
    (tmp_path / "Mine" / "config.json").write_bytes(config.read_bytes())
    for path, model in ((config, "llama-3.1-8b-tp8"), (tmp_path / "Mine" / "config.json", "mine-tp8")):
        written = manifest.loads(run("manifest", "from-config", path, "--tp", 8, "--tokens", 1).out)
        assert written.model == model
        assert written.source.startswith(f"{path.name} at tp 8: ")


def test_from_config_targets_what_has_kernels_of_the_type(run: Run) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    result = run("manifest", "from-config", config, "--tp", 1, "--tokens", 1, "--dtype", "e4m3", "--scaling", "none")
    assert manifest.loads(result.out).targets == ("sm_90a", "sm_100a", "sm_103a")


def test_from_config_fuses_and_scales(run: Run) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    arguments = ["--tp", 1, "--tokens", 1, "--target", "sm_90a", "--dtype", "e4m3", "--scaling", "block", "--fuse"]
    written = manifest.loads(run("manifest", "from-config", config, *arguments).out)
    assert written.model == "llama-3.1-8b-e4m3-fused"
    assert [g.signature.epilogue for g in written.gemms] == ["none", "residual", "swiglu", "residual", "none"]
    assert {g.signature.scaling for g in written.gemms} == {"block", "none"}


def test_from_config_has_every_way_to_compute_a_layer(run: Run) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    written = manifest.loads(run("manifest", "from-config", config, "--tokens", "1,16,2048", "--in-graph").out)
    assert written.targets == ("sm_90a",)
    found = {g.name: (g.signature.epilogue, g.signature.overlap, g.tokens) for g in written.gemms}
    every, few = (1, 16, 2048), (1, 16)
    assert found == {
        **dict.fromkeys(("qkv", "o", "gate_up", "down"), ("none", "serial", every)),
        **{f"{part}.weights": ("none", "weights", few) for part in ("qkv", "o", "gate_up", "down")},
        "gate_up.swiglu": ("swiglu", "serial", every),
        "gate_up.swiglu.weights": ("swiglu", "weights", few),
        "lm_head": ("none", "serial", few),
    }


@pytest.mark.parametrize(
    ("name", "options", "has"),
    [
        ("llama-3.1-8b", ("--in-graph",), True),
        ("llama-3.1-8b", (), False),
        ("llama-3.1-8b", ("--in-graph", "--tp", "2"), True),
        ("gemma-3-27b", ("--in-graph",), False),  # more norms, of x * (1 + weight)
    ],
)
def test_from_config_has_the_norms_that_servers_take(run: Run, name: str, options: tuple[str, ...], has: bool) -> None:
    config = ROOT / f"tests/data/configs/{name}.json"
    found = run("manifest", "from-config", config, "--tokens", "1,16", "--target", "sm_90a", *options)
    assert found.status == 0, found.err
    keys = [(use.name, use.signature.key(), use.tokens) for use in manifest.loads(found.out).uses]
    n = "bf16_bf16_bf16_rmsnorm_n4096"
    wanted = [("norm", f"{n}_residual_bf16", (1, 16)), ("first_norm", n, (1, 16))]
    assert [each for each in keys if "rmsnorm" in each[1]] == (wanted if has else [])


def test_from_config_has_what_quantises_tokens(run: Run, tmp_path: Path) -> None:
    config = ROOT / "tests/data/configs/qwen3-30b-a3b-fp8.json"
    asked = ("manifest", "from-config", config, "--tokens", "1,64", "--target", "sm_90a")
    ways = ("--no-quantise",), ("--quantise",), ()
    plain, more, usual = (manifest.loads(run(*asked, *options).out) for options in ways)
    assert [g.name for g in more.gemms if g not in plain.gemms] == ["qkv.few", "qkv.behind", "o.few", "o.behind"]
    assert [g.name for g in usual.gemms if g not in plain.gemms] == ["qkv.few", "o.few"]
    assert usual.uses == plain.uses
    assert [use.name for use in more.uses if use not in plain.uses] == [
        *("qkv_quantise", "o_quantise"),
        *("norm", "first_norm", "norm_block"),
    ]
    (norm,) = (use for use in more.uses if use.name == "norm_block")
    assert (norm.signature.key(), norm.tokens) == ("bf16_bf16_e4m3_rmsnorm_n2048_residual_bf16_block", (64,))
    many = manifest.loads(run(*asked[:4], "1024", *asked[5:], "--quantise").out)
    assert {"qkv_quantise", "o_quantise"} <= {use.name for use in many.uses}  # no GEMM is for so many
    of_16_bits = run(*asked[:2], ROOT / "tests/data/configs/llama-3.1-8b.json", *asked[3:], "--quantise")
    assert of_16_bits.status == 2
    assert "has no layer in e4m3 scaled by blocks, or by tokens and channels" in of_16_bits.err


def test_from_config_names_targets_that_have_kernels_for_what_quantises_too(run: Run) -> None:
    asked = "manifest", "from-config", ROOT / "tests/data/configs/llama-3.1-8b.json", "--tokens", 64, "--dtype", "e4m3"
    assert manifest.loads(run(*asked).out).targets == ("sm_90a", "sm_100a", "sm_103a")
    assert manifest.loads(run(*asked, "--quantise").out).targets == ("sm_90a",)
    elsewhere = run(*asked, "--quantise", "--target", "sm_100a")
    assert elsewhere.status == 2
    assert "that kernels on sm_100a quantise tokens of; leave it out, or name another target" in elsewhere.err


def test_from_config_has_no_swiglu_of_other_activations(run: Run) -> None:
    written = manifest.loads(
        run("manifest", "from-config", ROOT / "tests/data/configs/gemma-3-27b.json", "--tokens", 1, "--in-graph").out
    )
    assert {g.signature.epilogue for g in written.gemms} == {"none"}
    assert "gate_up.weights" in {g.name for g in written.gemms}


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--fuse"], "leave --fuse out"), (["--dtype", "e4m3"], "has no qkv, o, gate_up or down in 16 bits")],
)
def test_from_config_refuses_ways_that_there_are_not(run: Run, options: list[str], said: str) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    refused = run("manifest", "from-config", config, "--tokens", 1, "--in-graph", *options)
    assert refused.status == 2
    assert said in refused.err


@pytest.fixture
def from_config(run: Run) -> Run:
    """Write the manifest of a small config."""
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    arguments = ["--tp", 1, "--tokens", 1, "--target", "sm_90a", "--dtype", "bf16"]
    return lambda *options: run("manifest", "from-config", config, *arguments, *options)


def test_from_config_replaces_a_file_only_by_force(from_config: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("mine")
    refused = from_config("-o", path)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == f"error: {path}: is there already; --force replaces it, or name another output\n"
    assert path.read_text() == "mine"
    assert from_config("-o", path, "--force").status == 0
    assert manifest.load(path).model == "llama-3.1-8b"
    assert os.listdir(tmp_path) == ["m.yaml"]


def test_from_config_leaves_the_file_that_was_there_when_writing_fails(
    from_config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("mine")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("aot.problem.manifest.writer.os.replace", full)
    result = from_config("-o", path, "--force")
    assert (result.status, result.out) == (2, "")
    assert "cannot be written (No space left on device)" in result.err
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["m.yaml"]


def test_from_config_prints_where_the_output_is_a_dash(
    from_config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_config("-o", "-").out == from_config().out != ""
    assert os.listdir() == []


def test_from_config_spreads_experts_over_ranks(run: Run) -> None:
    config = ROOT / "tests/data/configs/qwen3-30b-a3b.json"
    result = run("manifest", "from-config", config, "--tp", 2, "--ep", 4, "--tokens", 1, "--dtype", "bf16")
    written = manifest.loads(result.out)
    assert (result.status, result.err, written.model) == (0, "", "qwen3-30b-a3b-tp2-ep4")
    assert {use.signature.groups for use in written.uses if use.signature.operation == "grouped_gemm"} == {32}


def test_from_config_warns_of_experts_on_standard_error(run: Run) -> None:
    config = ROOT / "tests/data/configs/qwen3-30b-a3b.json"
    result = run("manifest", "from-config", config, "--no-experts", "--tokens", 1, "--dtype", "bf16")
    assert (result.status, manifest.loads(result.out).layers) == (0, 48)
    assert result.err.startswith("warning: qwen3-30b-a3b.json: the experts are left out")
    assert result.err.count("\n") == 1
