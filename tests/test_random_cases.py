"""scripts/random_cases.py: what is drawn, from which layers, and what a file of layers may not say."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import draw_manifest
import random_cases
import report
import yaml

from aot.problem import manifest
from aot.problem.manifest import ManifestError, signature_problem
from runtime.gemm.signature import Signature

from .published_layers import layers

SEED = "f40e4c7de3b0d1b9f3b6a3d6f5a2a9f8e7c6b5a4"


def layer(n: int, k: int = 64, most_tokens: int = 8192) -> random_cases.Layer:
    return random_cases.Layer(Signature("bf16", "bf16", "bf16", "f32", "none", n, k), (f"n{n}",), most_tokens)


def test_a_seed_always_draws_the_same() -> None:
    """Literally: another Python, machine or order of layers must not change it."""
    found = random_cases.cases(SEED, 6, [layer(64 * i) for i in range(1, 9)])
    assert [(c.layer.signature.n, c.m) for c in found] == [
        (192, 3),
        (320, 110),
        (192, 80),
        (320, 1),
        (320, 36),
        (256, 154),
    ]
    again = random_cases.load_layers(random_cases.default_paths()[::-1])
    drawn = [random_cases.cases(SEED, 50, layers) for layers in (layers(), again)]
    assert [c.key for c in drawn[0]] == [c.key for c in drawn[1]]


def test_more_cases_begin_with_the_fewer_and_none_comes_twice() -> None:
    found = [c.key for c in random_cases.cases(SEED, 400, layers())]
    assert found[:100] == [c.key for c in random_cases.cases(SEED, 100, layers())]
    assert len(set(found)) == len(found) == 400


def test_seeds_differ() -> None:
    first, second = ({c.key for c in random_cases.cases(seed, 100, layers())} for seed in (SEED, SEED[:-1] + "5"))
    assert len(first & second) < 10


def test_the_seed_is_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, seed in (("abc", "abc"), ("abc+changes", "abc")):
        monkeypatch.setattr(report, "commit", lambda told=told: told)
        assert random_cases.seed_of_commit() == seed
    monkeypatch.setattr(report, "commit", lambda: "unknown")
    with pytest.raises(ManifestError, match="give --seed"):
        random_cases.seed_of_commit()


def test_the_logarithm_of_m_is_uniform() -> None:
    """Chi-square over the thirteen octaves, with what each has when 8193 ** u is rounded down; 32.9 is 0.1%."""
    count = 20_000
    draw = random_cases.Draw(SEED)
    ms = [draw.tokens() for _ in range(count)]
    found = Counter(min(int(math.log2(m)), 12) for m in ms)
    edges = [math.log(1 << i, 8193) for i in range(13)] + [1.0]
    expected = [count * (b - a) for a, b in itertools.pairwise(edges)]
    assert sum((found[i] - e) ** 2 / e for i, e in enumerate(expected)) < 32.9
    assert min(ms) == 1
    assert 8000 < max(ms) <= 8192


def test_each_m_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random_cases.Draw(SEED)
    for m in (1, 2, 333, 8191, 8192):
        low, high = (math.log(x, 8193) for x in (m, m + 1))
        monkeypatch.setattr(draw._random, "random", lambda middle=(low + high) / 2: middle)
        assert draw.tokens() == m
    monkeypatch.setattr(draw._random, "random", lambda: 1 - 2**-53)
    assert draw.tokens() == 8192


def test_every_regime_occurs() -> None:
    found = Counter(regime(c.m) for c in random_cases.cases(SEED, 100, layers()))
    assert set(found) == {name for name, _, _ in random_cases.REGIMES}
    assert min(found.values()) >= 15
    assert [regime(m) for m in (64, 65, 511, 512)] == ["M <= 64", *["M = 65..511"] * 2, "M >= 512"]


def regime(m: int) -> str:
    """The name of the one range of M that `m` is in."""
    (found,) = (name for name, low, high in random_cases.REGIMES if low <= m <= high)
    return found


def test_a_layer_sees_no_more_rows_than_it_may() -> None:
    small, large = layer(64, most_tokens=16), layer(1 << 20, 1 << 10)
    found = random_cases.cases(SEED, 60, [small, large])
    assert max(c.m for c in found if c.layer == small) <= 16
    assert all(c.layer.signature.bytes(c.m) <= random_cases.MOST_BYTES for c in found)
    assert large.fits(64)
    assert not large.fits(8192)
    logits = [f for f in layers() if all(name.endswith(":lm_head") for name in f.names)]
    assert len(logits) > 20
    assert {f.most_tokens for f in logits} == {256}


def test_a_draw_ends_where_nothing_is_left() -> None:
    assert len(random_cases.cases(SEED, 9, [layer(64, most_tokens=4)])) == 4
    assert random_cases.cases(SEED, 9, []) == []


def test_a_few_layers_are_looked_at_closely() -> None:
    found = random_cases.few_layers(SEED, 3, 20, layers())
    assert Counter(Counter(c.layer for c in found).values()) == {20: 3}
    assert len({c.key for c in found}) == 60
    assert not any("lm_head" in c.layer.label for c in found)


def test_the_layers_are_distinct_legal_and_of_many_models() -> None:
    signatures = [found.signature for found in layers()]
    assert len(set(signatures)) == len(signatures) > 300
    assert [signature_problem(s) for s in signatures if signature_problem(s)] == []
    models = {name.split(":")[0] for found in layers() for name in found.names}
    assert {path.stem for path in (random_cases.ROOT / "manifests").glob("*.yaml")} <= models
    assert len({model.split("-")[0] for model in models}) >= 20
    names = {name.split(":")[1] for found in layers() for name in found.names}
    assert {"qkv", "q", "kv", "gate_up", "gate", "gate_up-swiglu", "o", "down", "lm_head", "router"} <= names
    assert {s.scaling for s in signatures} == {"none", "row_column", "block"}
    assert {s.b_major for s in signatures} == {"k", "n"}
    assert {s.overlap for s in signatures} == {"serial"}


def test_what_is_merged_is_taken_apart() -> None:
    found = {name: f.signature for f in layers() for name in f.names if name.startswith("qwen2.5-0.5b:")}
    shapes = {name.split(":")[1]: (s.n, s.k, s.epilogue) for name, s in found.items()}
    assert shapes == {
        "qkv": (1152, 896, "bias"),
        "q": (896, 896, "bias"),
        "kv": (128, 896, "bias"),
        "o": (896, 896, "none"),
        "gate_up": (9728, 896, "none"),
        "gate": (4864, 896, "none"),
        "down": (896, 4864, "none"),
        "lm_head": (151936, 896, "none"),
    }


def test_layers_that_are_written_out_follow_from_their_source() -> None:
    """Those whose source names plain fields: what a decoder's layers are made of them, over `tp` GPUs."""
    checked = 0
    for model in yaml.safe_load(random_cases.MODELS.read_text())["models"]:
        words = model["source"].translate(str.maketrans("", "", ",;:")).split()
        fields = {w: int(v) for w, v in itertools.pairwise(words) if v.isdigit()}
        if "layers" not in model or "lora" in model["source"] or "num_key_value_heads" not in fields:
            continue
        hidden, tp = fields["hidden_size"], model.get("tp", 1)
        head = fields.get("head_dim", hidden // fields["num_attention_heads"])
        q, kv = (fields[f] * head // tp for f in ("num_attention_heads", "num_key_value_heads"))
        inter = fields.get("intermediate_size", 0) // tp
        vocabulary = -(-fields.get("vocab_size", 0) // 64) * 64 // tp
        expected = {"q": (q, hidden), "kv": (kv, hidden), "qkv": (q + 2 * kv, hidden), "o": (hidden, q)}
        expected |= {"gate": (inter, hidden), "gate_up": (2 * inter, hidden), "down": (hidden, inter)}
        expected |= {"fc1": (inter, hidden), "fc2": (hidden, inter), "lm_head": (vocabulary, hidden)}
        expected |= {"router": (fields.get("num_local_experts", 8), hidden)}
        same = {"wqkv": "qkv", "wo": "o", "w1": "gate", "w2": "down", "c_fc": "fc1", "c_proj": "fc2"}
        for found in model["layers"]:
            name = found["name"].split("-")[0]
            assert (found["n"], found["k"]) == expected[same.get(name, name)], (model["model"], name)
            checked += 1
    assert checked > 60


GOOD = {"model": "a", "source": "somewhere", "layers": [{"name": "x", "n": 64, "k": 64}]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layers": [{"name": "x", "n": 63, "k": 64}]}, "layer 'x': field 'n': must be a positive multiple of 8"),
        ({"layers": [{"name": "x", "n": 64, "k": "64"}]}, "field 'k' must be an integer"),
        ({"layers": [{"name": "x", "n": 64, "k": 64, "epilogue": "tanh"}]}, "unknown 'tanh'"),
        ({"layers": [{"name": "x", "n": 64, "k": 64, "rows": 1}]}, "unknown field 'rows'"),
        ({"layers": [{"name": "x", "n": n, "k": 64} for n in (64, 128)]}, "two layers are called 'x'"),
        ({"config": {}}, "needs a config, or layers"),
        ({"layers": ["x"]}, "must be a mapping"),
        ({"source": ""}, "needs a name of its own and a source"),
        ({"layers": None, "config": {"model_type": "qwen3"}, "forms": ["split"]}, "forms must be some of"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    path = tmp_path / "models.yaml"
    model = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    path.write_text(yaml.safe_dump({"models": [model]}))
    with pytest.raises(ManifestError, match=complaint) as refused:
        random_cases.load_layers([path])
    assert str(path) in str(refused.value)


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [GOOD, GOOD]}))
    with pytest.raises(ManifestError, match="a name of its own"):
        random_cases.load_layers([path])


def test_drawing_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'scripts'); import random_cases"
    subprocess.run([sys.executable, "-c", program], cwd=random_cases.ROOT, check=True)


# --- a manifest of what is drawn ---


def test_a_manifest_has_one_layer_of_each_model_that_is_drawn() -> None:
    found = draw_manifest.drawn(SEED, 24, ("16 bits", "16 bits, fused"), layers())
    assert len({x.signature for x in found}) == len(found) == 24
    assert {random_cases.group(x.signature) for x in found} <= {"16 bits", "16 bits, fused"}
    assert found == draw_manifest.drawn(SEED, 24, ("16 bits", "16 bits, fused"), layers()[::-1])
    assert found != draw_manifest.drawn(SEED + "5", 24, ("16 bits", "16 bits, fused"), layers())
    assert len(draw_manifest.drawn(SEED, 1000, ("e4m3 row_column",), layers())) < 1000


def test_the_manifest_of_layers_is_one_and_asks_for_no_more_tokens_than_a_layer_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "drawn.yaml"
    arguments = ["draw_manifest.py", "--seed", SEED, "--models", "5", "--block", "2", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert draw_manifest.main() == 0
    found = manifest.load(path)
    own = random_cases.load_layers(random_cases.default_paths()[:-1])
    assert {x.signature for x in own if x.signature.a != "e4m3"} < {gemm.signature for gemm in found.gemms}
    assert sum(gemm.signature.scaling == "block" for gemm in found.gemms) == 2
    assert all(max(gemm.tokens) <= 256 for gemm in found.gemms if gemm.name.endswith("lm_head"))
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], str(tmp_path)])
    assert draw_manifest.main() == 2
