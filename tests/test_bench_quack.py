"""quack as a peer of scripts/bench_grouped.py: what it is given, when it compiles, and which candidates are timed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_grouped
import peers
from peers import quack_grouped

from aot.tune import measure
from aot.tune.grouped_gemm.measures import GroupedMeasures, OperandSet, Weights
from runtime.grouped_gemm import Signature

PLAIN = Signature("bf16", "bf16", "bf16", 5, 128, 256)


@dataclass(frozen=True)
class Config:
    """As much of a configuration of quack's as a launch and its name look at."""

    tile_n: int = 128
    swap_ab: bool = False
    device_capacity: int = 9
    tile_m: int = 128
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = True
    split_k: int = 1


class CompilePending(BaseException):
    """What a first call raises while a pool is there."""


class StandIn:
    """quack's modules, whose GEMM computes by the reference and takes two calls to compile a kernel in a pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.pool = False
        self.compiled: dict[Any, int] = {}
        configs = [Config(128), Config(192), Config(128, swap_ab=True), Config(256, device_capacity=10)]
        modules: dict[str, dict[str, Any]] = {
            "quack": {},
            "quack.cache": {},
            "quack.cache.async_compile": {"pool_scope": self.pool_scope, "CompilePending": CompilePending},
            "quack.gemm_config": {
                "get_all_configs": lambda epilogue: configs,
                "config_supports": lambda c, varlen_m: not (varlen_m and c.swap_ab),
            },
            "quack.gemm_interface": {"gemm_tuned": SimpleNamespace(fn=self.gemm)},
        }
        made = {name: ModuleType(name) for name in modules}
        for name, content in modules.items():
            made[name].__dict__.update(content)
            above, _, last = name.rpartition(".")
            if above:
                setattr(made[above], last, made[name])
            monkeypatch.setitem(sys.modules, name, made[name])
        for variable in ("QUACK_COMPILE_WORKERS", "QUACK_ARCH", "CUTE_DSL_ARCH"):
            monkeypatch.setenv(variable, "")

    @contextlib.contextmanager
    def pool_scope(self) -> Iterator[None]:
        """Where calls do not compile themselves."""
        self.pool = True
        yield
        self.pool = False

    def gemm(self, a: Any, b: Any, out: Any, *, cu_seqlens_m: Any, dynamic_scheduler: bool, config: Config) -> None:
        """gemm_tuned, as far as its validation says what it takes."""
        key = (config, dynamic_scheduler, a.dtype)
        waited = self.compiled[key] = self.compiled.get(key, 0) + 1
        if self.pool and waited < 3:
            raise CompilePending
        assert not config.swap_ab, "Variable-length sequences not supported with swap_ab"
        assert (cu_seqlens_m.dtype, cu_seqlens_m.shape, int(cu_seqlens_m[0])) == (torch.int32, (len(b) + 1,), 0)
        assert out.shape == (len(a), b.shape[2])
        assert a.stride(-1) == b.stride(-2) == out.stride(-1) == 1
        self.calls.append(f"{config.tile_n} {dynamic_scheduler}")
        s = replace(PLAIN, groups=len(b), n=b.shape[2], k=b.shape[1])
        out.copy_(GroupedMeasures().reference(s, OperandSet(a, b.mT, cu_seqlens_m[1:], out))["d"])


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def peer() -> quack_grouped.GroupedQuack:
    return quack_grouped.GroupedQuack(peers.Settings(Path("unused"), 3, "cpu"))


def test_it_is_right_by_the_check_of_tuning(quack: StandIn) -> None:
    launches = peer().launches(PLAIN, 9)
    found = measure.check(PLAIN, 9, Weights(PLAIN, 9, 0, 3, "cpu"), launches)
    assert all(isinstance(error, float) and error < 5e-3 for error in found.values()), found


def test_candidates_are_hopper_configurations_for_groups_with_either_scheduler(quack: StandIn) -> None:
    assert list(peer().launches(PLAIN, 9)) == [
        f"tile 128x{n} cluster 2x1 pingpong {scheduler}" for n in (128, 192) for scheduler in ("static", "dynamic")
    ]


def test_candidates_compile_once_for_all_shapes_of_a_type(quack: StandIn) -> None:
    opened = peer()
    opened.launches(PLAIN, 9)
    every = ["128 False", "128 True", "192 False", "192 True"]
    assert sorted(quack.calls) == every
    assert not quack.pool
    opened.launches(replace(PLAIN, n=256, groups=3, overlap="launch"), 70)
    assert sorted(quack.calls) == every
    opened.launches(replace(PLAIN, a="f16", b="f16", d="f16"), 9)
    assert sorted(quack.calls) == sorted(2 * every)


def test_where_groups_begin_is_made_once_for_an_operand_set(quack: StandIn) -> None:
    launches = [*peer().launches(PLAIN, 9).values()]
    one, other = (Weights(PLAIN, 9, 0, seed, "cpu").operands(9)[0] for seed in (1, 2))
    made = [launch._begins(one) for launch in launches]  # type: ignore[attr-defined]
    assert len({id(rows) for rows in made}) == 1
    assert made[0].tolist() == [0, *one.ends.tolist()]
    assert launches[0]._begins(other).tolist() == [0, *other.ends.tolist()]  # type: ignore[attr-defined]


def test_it_refuses_what_it_is_not_compared_for(quack: StandIn) -> None:
    others = (
        replace(PLAIN, epilogue="swiglu"),
        replace(PLAIN, rows="masked"),
        replace(PLAIN, rows="gathered"),
        replace(PLAIN, k=252),
        Signature("e4m3", "e4m3", "bf16", 5, 128, 256, scaling="row_column"),
    )
    assert all(peer().refuse(s) for s in others)
    assert peer().refuse(PLAIN) is None


# --- of many candidates the fastest are kept ---


def finalists(monkeypatch: pytest.MonkeyPatch, launches: dict[str, Any]) -> list[str]:
    """Of candidates named by their microseconds."""

    def time_interleaved(able: Any, *_: Any) -> dict[str, Any]:
        return {name: measure.Timing(float(name.split()[1]), 0.01) for name in able}

    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    operands = Weights(PLAIN, 9, 0, 3, "cpu").operands(9)
    return list(bench_grouped.Bench(None, {}, 0, 1)._fastest(launches, operands, 1.0))


def failing(o: OperandSet) -> None:
    raise ValueError("no such tile")


def test_the_fastest_that_launch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = {f"quack {us}": (failing if us == 11 else lambda o: None) for us in (30, 11, 12, 40, 13, 14, 15)}
    assert finalists(monkeypatch, launches) == [f"quack {us}" for us in (12, 13, 14, 15, 30)]


def test_few_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(finalists(monkeypatch, {f"quack {us}": failing for us in range(5)})) == 5


def test_of_those_that_all_fail_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finalists(monkeypatch, {f"quack {us}": failing for us in range(7)}) == ["quack 0"]
