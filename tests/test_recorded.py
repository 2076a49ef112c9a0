"""Manifests from what the workers of vLLM or SGLang recorded: `aot manifest from-server`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.pack.build_table import Model, Problem
from aot.problem import manifest, recorded
from aot.search import traffic
from aot.search.targets import TARGETS
from aot.tune.block import blocks
from runtime.plugin import record

from .command_line import Run

LLAMA = {
    "self_attn.qkv_proj": "bf16_bf16_bf16_f32_none_n6144_k4096",
    "self_attn.o_proj": "bf16_bf16_bf16_f32_none_n4096_k4096",
    "mlp.gate_up_proj": "bf16_bf16_bf16_f32_swiglu_n28672_k4096",
    "mlp.down_proj": "bf16_bf16_bf16_f32_none_n4096_k14336",
}
HEAD = {"name": "lm_head", "signature": "bf16_bf16_bf16_f32_none_n128256_k4096"}
TOKENS, LOGITS = {1: 900, 2: 10, 16: 2000, 8192: 30}, {1: 900, 16: 2040}


def layers(kinds: dict[str, str] = LLAMA, numbers: range = range(4)) -> list[dict[str, str]]:
    return [{"name": f"model.layers.{i}.{name}", "signature": key} for i in numbers for name, key in kinds.items()]


def worker(rank: int = 0, **fields: Any) -> dict[str, Any]:
    """What one of Llama's workers writes."""
    counts = {"tokens": TOKENS, "logits": LOGITS} | {f: fields.pop(f) for f in ("tokens", "logits") if f in fields}
    return {
        "schema": recorded.SCHEMA,
        "written_by": "cute-aot 0.1.0 in vLLM 0.25.0",
        "model": "meta-llama/Llama-3.1-8B",
        "engine": 0,
        "rank": rank,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "capability": [9, 0],
        "layers": layers(),
        "heads": [HEAD],
        "left": {},
        **{field: {str(m): count for m, count in found.items()} for field, found in counts.items()},
        **fields,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the files of workers into a folder."""

    def write(*workers: dict[str, Any]) -> Path:
        for each in workers:
            (tmp_path / f"worker-{each['engine']}-{each['rank']}.json").write_text(json.dumps(each))
        return tmp_path

    return write


@pytest.fixture
def read(write: Callable[..., Path], run: Run) -> Callable[..., tuple[manifest.Manifest, str]]:
    """The manifest that the command prints for workers, and its warnings."""

    def read(*workers: dict[str, Any], options: tuple[str, ...] = ()) -> tuple[manifest.Manifest, str]:
        found = run("manifest", "from-server", write(*workers), *options)
        assert found.status == 0, found.err
        return manifest.loads(found.out), found.err

    return read


def rows(found: manifest.Manifest) -> list[tuple[str, int, str]]:
    return [(gemm.name, gemm.count, gemm.per) for gemm in found.gemms]


PER_LAYER = [("qkv_proj", 1, "layer"), ("o_proj", 1, "layer"), ("gate_up_proj", 1, "layer"), ("down_proj", 1, "layer")]


def test_a_server_makes_a_manifest_of_what_it_ran(read: Any) -> None:
    found, warnings = read(worker())
    assert warnings == ""
    assert (found.model, found.layers, found.targets) == ("llama-3.1-8b", 4, ("sm_90a",))
    assert found.source == (
        "meta-llama/Llama-3.1-8B at tp 1, 2940 steps, recorded by 1 worker of cute-aot 0.1.0 in vLLM 0.25.0"
    )
    assert rows(found) == [*PER_LAYER, ("lm_head", 1, "model")]
    assert [gemm.signature.key() for gemm in found.gemms] == [*LLAMA.values(), HEAD["signature"]]
    *of_layers, head = found.gemms
    assert {gemm.tokens for gemm in of_layers} == {(1, 16, 8192)}
    assert {gemm.traffic for gemm in of_layers} == {tuple(TOKENS.items())}
    assert (head.tokens, head.traffic) == ((1, 16), tuple(LOGITS.items()))


NORM = {"name": "model.layers.0.input_layernorm", "signature": "bf16_bf16_bf16_rmsnorm_n4096_residual_bf16"}
OF_A_HEAD = {"name": "model.layers.0.self_attn.q_norm", "signature": "bf16_bf16_bf16_rmsnorm_n14336_residual_bf16"}


def test_norms_between_layers_are_there_and_those_of_heads_are_not(read: Any) -> None:
    found, _ = read(worker(norms=[NORM, OF_A_HEAD, {**NORM, "name": "model.norm"}]), options=("--in-graph",))
    assert [(use.name, use.signature.key()) for use in found.uses] == [
        ("norm", NORM["signature"]),
        ("first_norm", "bf16_bf16_bf16_rmsnorm_n4096"),
    ]
    assert found.uses[0].tokens == found.tokens
    without, _ = read(worker(norms=[NORM]))
    assert not without.uses, "where GEMMs do not overlap, norms gain nothing"


def test_norms_of_ranks_that_sum_are_left_to_the_server(read: Any) -> None:
    workers = (worker(rank, norms=[NORM], tensor_parallel=2) for rank in range(2))
    found, _ = read(*workers, options=("--in-graph",))
    assert not found.uses


def test_ranks_that_run_the_same_are_one_and_engines_add_up(read: Any) -> None:
    ranks = [worker(rank, engine=engine, tensor_parallel=2) for engine in (0, 1) for rank in (0, 1)]
    found, warnings = read(*ranks)
    assert warnings == ""
    assert rows(found) == [*PER_LAYER, ("lm_head", 1, "model")]
    assert dict(found.gemms[0].traffic) == {m: 2 * count for m, count in TOKENS.items()}
    assert found.model == "llama-3.1-8b-tp2"


def test_stages_of_a_pipeline_are_one_model(read: Any) -> None:
    first = worker(0, pipeline_parallel=2, layers=layers(numbers=range(2)), heads=[], logits={})
    second = worker(1, pipeline_parallel=2, layers=layers(numbers=range(2, 4)))
    found, _ = read(first, second)
    assert (found.layers, rows(found)) == (4, [*PER_LAYER, ("lm_head", 1, "model")])


def test_what_one_rank_adds_is_a_gemm_of_its_own(read: Any) -> None:
    biased = LLAMA | {"self_attn.o_proj": "bf16_bf16_bf16_f32_bias_n4096_k4096"}
    found, _ = read(worker(0, tensor_parallel=2, layers=layers(biased)), worker(1, tensor_parallel=2))
    names = {gemm.name: (gemm.signature.epilogue, gemm.count) for gemm in found.gemms}
    assert names["o_proj"] == ("bias", 1)
    assert names["o_proj_plain"] == ("none", 1)


def test_layers_of_one_name_and_other_shapes_are_told_apart(read: Any) -> None:
    other = {"mlp.down_proj": "bf16_bf16_bf16_f32_none_n4096_k2048"}
    found, _ = read(worker(layers=[*layers(numbers=range(3)), *layers(other, range(3, 4))]))
    assert [row for row in rows(found) if row[0].startswith("down")] == [
        ("down_proj", 3, "model"),
        ("down_proj_n4096_k2048", 1, "model"),
    ]


def test_activations_are_left_where_no_kernel_has_them(read: Any) -> None:
    for options in ((), ("--target", "sm_90a", "--target", "sm_100a")):
        found, _ = read(worker(capability=[9, 0] if options else [10, 0]), options=options)
        (gate_up,) = (gemm for gemm in found.gemms if gemm.name == "gate_up_proj")
        assert gate_up.signature.epilogue == "none"


def test_what_is_left_out_is_said(read: Any) -> None:
    odd = {"mlp.gate": "bf16_bf16_bf16_f32_none_n4_k4096"}
    found, warnings = read(
        worker(tensor_parallel=2, left={"FusedMoE computed by X": 4}, layers=[*layers(), *layers(odd)])
    )
    assert rows(found)[:4] == PER_LAYER
    assert "4 x FusedMoE computed by X" in warnings
    assert "n4_k4096 is left out: n must be a positive multiple of 8" in warnings
    assert "no file of rank 1 of engine 0" in warnings


def test_a_server_without_logits_has_no_head(read: Any) -> None:
    assert rows(read(worker(logits={}))[0]) == PER_LAYER


def test_a_build_takes_it_and_keeps_the_traffic(read: Any, write: Any, run: Run, tmp_path: Path) -> None:
    run("manifest", "from-server", write(worker()), "-o", tmp_path / "model.yaml")
    found = manifest.load(tmp_path / "model.yaml")
    assert found == read(worker())[0]
    assert run("manifest", "from-server", tmp_path, "-o", tmp_path / "model.yaml").status == 2
    assert run("manifest", "from-server", tmp_path, "-o", tmp_path / "model.yaml", "--force").status == 0


def test_it_may_have_every_way_that_is_chosen_in_a_decode_step(read: Any, write: Any, run: Run) -> None:
    found, _ = read(worker(), options=("--in-graph",))
    names = [gemm.name for gemm in found.gemms]
    gate_up = ["gate_up_proj", "gate_up_proj.weights", "gate_up_proj.swiglu", "gate_up_proj.swiglu.weights"]
    assert names[:2] == ["qkv_proj", "qkv_proj.weights"]
    assert [name for name in names if name.startswith("gate_up_proj")] == gate_up
    assert {gemm.tokens for gemm in found.gemms if gemm.name.endswith("weights")} == {(1, 16)}
    keys = [gemm.signature.key() for gemm in found.gemms]
    models = [Model("llama", None, None, [Problem(name, key) for name, key in zip(names, keys, strict=True)])]
    (block,) = blocks(models, [gemm.signature for gemm in found.gemms])
    assert {part: len(ways) for part, ways in block.ways.items()} == {"qkv": 2, "o": 2, "gate_up": 4, "down": 2}
    others = layers({"self_attn.other": LLAMA["self_attn.o_proj"]})
    assert run("manifest", "from-server", write(worker(layers=others, logits={})), "--in-graph").status == 2


def test_it_may_have_what_quantises_tokens(read: Any, write: Any, run: Run) -> None:
    block = layers({"mlp.up_proj": "e4m3_e4m3_bf16_f32_none_n512_k1024_block"})
    for options, more in (
        (("--quantise",), ["up_proj.few", "up_proj_quantise"]),
        ((), ["up_proj.few"]),
        (("--no-quantise",), []),
    ):
        found, _ = read(worker(layers=block, logits={}), options=options)
        assert [item.name for item in found.items()] == ["up_proj", *more]
    assert run("manifest", "from-server", write(worker()), "--quantise").status == 2


# --- files that are wrong ---


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"schema": 9}, "is of schema 9, and this version reads 1"),
        ({"model": 7}, "'model' must be a line of text, found 7"),
        ({"rank": -1}, "'rank' must be an integer from 0"),
        ({"tensor_parallel": True}, "'tensor_parallel' must be an integer from 1"),
        ({"capability": "9.0"}, "'capability' must be two numbers"),
        ({"layers": {}}, "'layers' must be a list"),
        ({"layers": [{"name": "a", "signature": "what"}]}, "no layer's signature"),
        ({"layers": [{"signature": HEAD["signature"]}]}, "no layer's signature"),
        ({"norms": 7}, "'norms' must be a list"),
        ({"norms": [{"name": "a", "signature": HEAD["signature"]}]}, "no norm's signature"),
        ({"tokens": {0: 7}}, "'tokens' must be an object of counts"),
        ({"tokens": {1: -7}}, "'tokens' must be an object of counts"),
        ({"tokens": {10**9: 1}}, "'tokens' must be an object of counts"),
    ],
)
def test_a_damaged_file_is_one_error_that_names_it(write: Any, run: Run, fields: dict[str, Any], says: str) -> None:
    folder = write(worker())
    (folder / "worker-0-0.json").write_text(json.dumps(worker(**fields)))
    found = run("manifest", "from-server", folder)
    assert (found.status, found.out, found.err.count("\n")) == (2, "", 1)
    assert f"{folder}/worker-0-0.json: " in found.err
    assert says in found.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": 1,', ":1: not JSON"),
        ("[]", "is no worker's record; remove it"),
        ("[" * 100_000, "record again, in a folder of its own"),
    ],
)
def test_a_file_that_is_no_record_is_one_error(write: Any, run: Run, text: str, says: str) -> None:
    folder = write(worker())
    (folder / "worker-0-1.json").write_text(text)
    found = run("manifest", "from-server", folder)
    assert found.status == 2
    assert "worker-0-1.json" in found.err
    assert says in found.err


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"model": "org/other"}, "model is 'org/other', and 'meta-llama/Llama-3.1-8B' in"),
        ({"tensor_parallel": 8}, "tensor_parallel is 8, and 1 in"),
    ],
)
def test_files_of_different_runs_are_refused(write: Any, run: Run, second: dict[str, Any], says: str) -> None:
    found = run("manifest", "from-server", write(worker(), worker(1, **second)))
    assert found.status == 2
    assert "worker-0-1.json: " + says in found.err


def test_folders_in_which_nothing_was_recorded_are_refused(write: Any, run: Run, tmp_path: Path) -> None:
    for workers, says in (
        ([], 'holds no worker-*.json; serve with the setting {"cute_aot": {"record": "FOLDER"}}'),
        ([worker(tokens={}, logits={})], "no worker counted a step; send requests"),
        ([worker(layers=[], heads=[])], "the model has no layer that a manifest can hold"),
        ([worker(capability=[7, 5])], "ran on compute capability 7.5, which no target serves; give --target"),
    ):
        found = run("manifest", "from-server", write(*workers))
        assert found.status == 2
        assert str(tmp_path) in found.err
        assert says in found.err


def test_a_path_that_is_no_folder_is_refused(run: Run, tmp_path: Path) -> None:
    found = run("manifest", "from-server", tmp_path / "none")
    assert (found.status, found.err.count("is no folder; name the one that `record`")) == (2, 1)


def test_the_plugin_and_the_command_agree_on_the_schema() -> None:
    assert record.SCHEMA == recorded.SCHEMA
    assert all(target.serves for target in TARGETS.values())


# --- which M ---


def test_tokens_are_those_of_most_time_between_the_smallest_and_the_largest() -> None:
    counts = {1: 5, 8: 10_000, 64: 500, 300: 1, 2048: 800, 8192: 1}
    assert traffic.tokens(counts, 12) == (1, 8, 64, 2048, 8192)
    assert traffic.tokens(counts, 4) == (1, 8, 2048, 8192)
    assert traffic.tokens({7: 3}, 4) == (7,)


def test_hundreds_of_sizes_are_gathered_and_none_is_lost() -> None:
    counts = {m: 1 + m % 3 for m in range(1, 8193)}
    found = traffic.gathered(counts)
    assert len(found) <= 4 * 13 + 3
    assert sum(found.values()) == sum(counts.values())
    assert (min(found), max(found)) == (1, 8192)
    assert list(found) == sorted(found)
