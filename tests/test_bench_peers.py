"""scripts/bench_peers.py, as far as it needs no GPU: which cases there are, what a result says, and absent peers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_peers
import peers
import reduce_results
from peers import quack_kernels
from report import write

from aot.tune import measure
from runtime.errors import AotError, KernelMiss


@dataclasses.dataclass(frozen=True)
class Config:
    """As much of a configuration of quack's as split-K looks at."""

    tile_m: int = 128
    tile_n: int = 128
    pingpong: bool = True
    swap_ab: bool = False
    split_k: int = 1


MANIFESTS = Path(__file__).parent.parent / "manifests"
SETTINGS = peers.Settings(Path("unused"), 1, "cpu")


def a_result(layer: str, m: int, ours: float, others: dict[str, Any]) -> dict[str, Any]:
    timed = {
        name: {"us": us, "spread": 0.01, "variant": "v", "error": 1e-3} if isinstance(us, float) else us
        for name, us in {"ours": ours, **others}.items()
    }
    return {"kind": "bf16", "layer": layer, "signature": "s", "m": m, "contenders": timed, "noise": 1.01}


RESULTS = [
    a_result("8B qkv", 16, 10.0, {"cublas": 12.0, "quack": 20.0, "triton": {"unsupported": "no"}}),
    a_result("8B o", 16, 10.0, {"cublas": 12.0, "quack": {"wrong": {"v": "relative error 1"}}}),
    a_result("8B qkv", 512, 10.0, {"cublas": 9.0, "quack": 10.0}),
]


def test_cases_are_every_layer_at_every_m_of_each_kind() -> None:
    found = bench_peers.cases(bench_peers.KINDS, list(bench_peers.LAYERS), bench_peers.TOKENS)
    by_kind = {kind: [c for c in found if c.kind == kind] for kind in bench_peers.KINDS}
    assert {kind: len(cases) for kind, cases in by_kind.items()} == {"bf16": 80, "fp8": 80, "swiglu": 20}
    assert {c.signature.scaling for c in by_kind["fp8"]} == {"row_column"}
    assert {(c.signature.n, c.signature.columns) for c in by_kind["swiglu"]} == {(28672, 14336), (7168, 3584)}
    assert len(set(found)) == len(found)


def test_all_layers_come_before_the_next_m() -> None:
    found = bench_peers.cases(["bf16"], ["8B qkv", "8B o"], [1, 16])
    assert [(c.layer, c.m) for c in found] == [("8B qkv", 1), ("8B o", 1), ("8B qkv", 16), ("8B o", 16)]


def test_layers_of_manifests_are_cases_once_up_to_their_largest_m() -> None:
    paths = [MANIFESTS / f"{name}.yaml" for name in ("gemma-3-27b", "llama-3.1-8b", "llama-3.1-8b-fused")]
    found = bench_peers.of_manifests(paths, bench_peers.KINDS, [16, 8192])
    assert len(set(found)) == len(found)
    of_bf16 = {(c.signature.n, c.signature.k) for c in found if c.kind == "bf16" and c.m == 16}
    assert {(5376, 21504), (262208, 5376), (28672, 4096), (128256, 4096)} <= of_bf16
    at_8192 = {(c.signature.n, c.signature.k) for c in found if c.kind == "bf16" and c.m == 8192}
    assert of_bf16 - at_8192 == {(262208, 5376), (128256, 4096)}, "a lm_head has a token a sequence"
    assert {c.layer for c in found if c.kind == "swiglu"} == {"llama-3.1-8b-fused:gate_up"}
    assert not any(c.kind == "fp8" for c in found)
    assert {c.signature.epilogue for c in found} == {"none", "swiglu"}


def test_summary_compares_only_what_was_timed() -> None:
    summary = {(s["regime"], s["against"]): s for s in bench_peers.summarise(RESULTS)}
    assert summary["M = 1..64", "cublas"]["geomean"] == 1.2
    assert (summary["M = 1..64", "quack"]["cases"], summary["M = 1..64", "quack"]["geomean"]) == (1, 2.0)
    assert summary["M >= 512", "cublas"]["worst"] == 0.9
    assert ("M = 1..64", "triton") not in summary


def test_a_line_says_why_a_contender_has_no_time() -> None:
    text = bench_peers.line(RESULTS[0], ["ours", "cublas", "quack", "triton"])
    assert "(1.200x)" in text
    assert "unsupported" in text
    assert "wrong" in bench_peers.line(RESULTS[1], ["ours", "cublas", "quack"])


def test_a_peer_that_is_not_installed_is_reported_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    monkeypatch.delitem(sys.modules, "quack.cache", raising=False)
    found, said = bench_peers.load_peers(["quack"], SETTINGS)
    assert found == {}
    assert "quack" in said["quack"]["absent"]


class Fake:
    """A peer with three candidates, the fastest of them wrong."""

    name, search = "fake", "three"
    us: ClassVar = {"wrong": 5.0, "good": 7.0, "slow": 9.0}

    def versions(self) -> dict[str, str]:
        return {}

    def refuse(self, signature: Any) -> str | None:
        return "no scales" if signature.scaling != "none" else None

    def prepare(self, problems: Any, expired: Any) -> None:
        pass

    def launches(self, signature: Any, m: int) -> dict[str, Any]:
        return {variant: lambda o: None for variant in self.us}


class Broken(Fake):
    """A peer whose only candidate raises."""

    def launches(self, signature: Any, m: int) -> dict[str, Any]:
        def launch(o: Any) -> None:
            raise ValueError("no such tile")

        return {"only": launch}


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that launch once and take their figures from `Fake.us`."""

    class Weights:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def operands(self, m: int) -> list[Any]:
            return [SimpleNamespace(a=None, b=None, d=None, extras={})]

    def attempt(launch: Any) -> str | None:
        try:
            launch(Weights().operands(1)[0])
        except AotError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def time_interleaved(launches: Any, *_: Any) -> dict[str, Any]:
        return {n: measure.Timing(Fake.us.get(n, 8.0), 0.0) for n, x in launches.items() if attempt(x) is None}

    def check(signature: Any, m: int, weights: Any, launches: Any) -> dict[str, float | str]:
        failed = {n: attempt(x) for n, x in launches.items()}
        return {n: failed[n] or ("it is wrong" if "wrong" in n else 1e-3) for n in launches}

    monkeypatch.setattr(measure, "check", check)
    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    monkeypatch.setattr(bench_peers, "Weights", Weights)
    monkeypatch.setattr(bench_peers, "baseline", lambda signature, example: ("torch.mm", lambda o: None))


def miss(*_: Any, **__: Any) -> None:
    raise KernelMiss("no kernel")


def run_case(kind: str, library: Any = None) -> dict[str, Any]:
    library = library or SimpleNamespace(gemm=lambda *_, **__: None, entry=miss)
    bench = bench_peers.Bench(library, {"fake": Fake(), "broken": Broken()}, 0, 3)
    return bench.run(bench_peers.cases([kind], ["8B o"], [16])[0])["contenders"]


@pytest.mark.usefixtures("without_a_gpu")
def test_the_fastest_right_candidate_is_timed_and_the_wrong_one_reported() -> None:
    found = run_case("bf16")
    assert found["fake"]["variant"] == "good"
    assert found["fake"]["wrong"] == {"wrong": "it is wrong"}
    assert found["fake"]["error"] == 1e-3
    assert found["broken"] == {"candidates": 1, "failed": "ValueError: no such tile"}
    assert {"us", "spread"} <= set(found["ours"]) & set(found["cublas"])


@pytest.mark.usefixtures("without_a_gpu")
def test_a_peer_that_refuses_says_why() -> None:
    assert run_case("fp8")["fake"] == {"unsupported": "no scales"}


@pytest.mark.usefixtures("without_a_gpu")
def test_peers_are_timed_where_the_archive_has_no_kernel() -> None:
    found = run_case("bf16", SimpleNamespace(gemm=miss, entry=miss))
    assert found["ours"] == {"failed": "no kernel"}
    assert "us" in found["fake"]


@pytest.mark.usefixtures("without_a_gpu")
def test_what_overlaps_is_a_contender_where_the_archive_has_it() -> None:
    assert "ours overlapping" not in run_case("bf16")
    calls: list[dict[str, Any]] = []
    found = run_case("bf16", SimpleNamespace(gemm=lambda *_, **words: calls.append(words), entry=lambda s: None))
    assert {"us", "spread"} <= set(found["ours"]) & set(found["ours overlapping"])
    assert {words.get("overlap") for words in calls} == {None, "weights"}


@pytest.mark.usefixtures("without_a_gpu")
def test_an_overlapping_launch_of_ours_that_is_wrong_is_no_less_precise_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(signature: Any, m: int, weights: Any, launches: Any) -> dict[str, float | str]:
        return {n: "relative error 1.0" if n.startswith("ours overlapping") else 1e-3 for n in launches}

    monkeypatch.setattr(measure, "check", check)
    monkeypatch.setattr(bench_peers._Imprecise, "error", lambda self, launch: 1e-3)
    found = run_case("bf16", SimpleNamespace(gemm=lambda *_, **__: None, entry=lambda s: None))
    assert found["ours overlapping"] == {"wrong": {"": "relative error 1.0"}}
    assert "us" in found["ours"]
    assert bench_peers.is_wrong([{"contenders": found}])
    assert not bench_peers.is_wrong([{"contenders": {"ours": found["ours"], "quack": {"wrong": {"v": "x"}}}}])


def test_overlapping_launches_have_a_summary_of_their_own() -> None:
    results = [a_result("8B qkv", 16, 10.0, {"ours overlapping": 8.0, "cublas": 12.0})]
    found = {(s["ours"], s["against"]): s["geomean"] for s in bench_peers.summarise(results) if s["regime"] == "all M"}
    assert found == {("ours", "cublas"): 1.2, ("ours overlapping", "cublas"): 1.5}


def test_split_k_is_offered_only_where_tiles_are_few() -> None:
    config = Config()
    few = bench_peers.cases(["bf16"], ["70B/8 qkv"], [16])[0].signature
    many = bench_peers.cases(["bf16"], ["8B gate_up"], [4096])[0].signature
    assert [c.split_k for c in quack_kernels._with_splits(config, few, 16)] == [1, 2, 4, 8]
    assert [c.split_k for c in quack_kernels._with_splits(config, many, 4096)] == [1]


def test_a_library_error_becomes_one_candidates_failure() -> None:
    def broken(o: Any) -> None:
        raise ValueError("no such tile\nand more")

    with pytest.raises(peers.PeerError, match=r"ValueError: no such tile$"):
        peers.guarded(broken)(None)


def test_the_result_file_is_reduced_to_ratios_by_contender_and_range_of_m(tmp_path: Path) -> None:
    said = {"quack": {"versions": {"quack-kernels": "0"}, "search": "all of them"}, "triton": {"absent": "no"}}
    path = tmp_path / "peers_bf16.json"
    write(path, {"gpu": "a GPU"}, peers=said, summary=[], left_out=[{"m": 512}], results=RESULTS)
    found = reduce_results.reduced(["whole"], [reduce_results.read(str(path))])
    assert found["peers"] == said
    (run,) = found["runs"]
    assert (run["environment"], run["left_out"], run["cases"], run["noise"]) == ({"gpu": "a GPU"}, 1, 3, 1.01)
    ratios = {(s["what"], s["over"], s["regime"]): (s["measured"], s["geomean"], s["slower"]) for s in found["summary"]}
    assert ratios == {
        ("bf16 ours", "cublas", "M <= 64"): (2, 1.2, 0.0),
        ("bf16 ours", "cublas", "M >= 512"): (1, 0.9, 1.0),
        ("bf16 ours", "cublas", "all M"): (3, round((1.2 * 1.2 * 0.9) ** (1 / 3), 5), round(1 / 3, 4)),
        ("bf16 ours", "quack", "M <= 64"): (1, 2.0, 0.0),
        ("bf16 ours", "quack", "M >= 512"): (1, 1.0, 0.0),
        ("bf16 ours", "quack", "all M"): (2, round(2**0.5, 5), 0.0),
    }
