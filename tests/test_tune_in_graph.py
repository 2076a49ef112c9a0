"""Layers chosen where they run: what the archive says of times that a script gives, and the steps themselves."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aot.pack import build_table
from aot.pack.write import Package
from aot.problem.ways import PARTS
from aot.tune import in_graph
from aot.tune.block import Block, Choice, blocks, described
from aot.tune.in_graph import GraphReport, Site, tune_in_graph
from aot.tune.options import GraphOptions, TuneError
from aot.tune.timing import Timing
from aot.verify import archive as verify
from runtime.container.archive import Archive
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.tables.dispatch import Dispatch, Entry

from .command_line import Run
from .recording_driver import entry, operands_record, signature, write_archive
from .simulated_gpu import ENVIRONMENT, GPU

HIDDEN, INNER, QKV = 512, 1024, 1024  # 4 heads of 128, 2 pairs of key and value
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
PLAIN = {part: Signature.from_json(signature(n, k)) for part, (n, k) in SHAPES.items()}
FUSED = dataclasses.replace(PLAIN["gate_up"], epilogue="swiglu")
ALL = [*PLAIN.values(), FUSED]

Us = Callable[[int, str, Signature], float]  # of a part's way at an M


def early(of: Signature) -> Signature:
    return dataclasses.replace(of, overlap="weights")


def made(path: Path, signatures: list[Signature], names: Mapping[str, Signature] = PLAIN, **more: Any) -> Path:
    """An archive in which each signature has a function for few rows and one for many, tuned at M = 1 to 64, or those
    that overlap at less."""
    records, rows = [], []
    for s in signatures:
        few, many = (f"{word}.{s.key()}" for word in ("few", "many"))
        records += [operands_record(name, s.to_json()) for name in (few, many)]
        timings = [{"m": m, "function": f, "us": 1.0, "baseline_us": 1.0} for m, f in ((1, few), (64, many))]
        row = entry(s.to_json(), [(20, few), (None, many)], gpu=GPU, **more)
        tuned = {"timings": timings, "tuned_to": 64 if s.overlap == "serial" else 32}
        rows.append(row | (tuned if row["state"] == "tuned" else {}))
    write_archive(path, records, rows)
    problems = [build_table.Problem(name, s.key(), 1) for name, s in names.items()]
    package = Package()
    with Archive.open(path) as archive:
        package.add_archive(archive)
        package.set_table("gemm", archive.table("gemm"))
    package.set_table("build", build_table.Build([build_table.Model("m", None, None, problems)]).to_json())
    package.write(path)
    return path


class Scripted:
    """A replay in which each part takes its own time, and what it was asked."""

    def __init__(self, us: Us) -> None:
        self.us, self.asked = us, list[tuple[int, int]]()

    def times(self, m: int, choices: Mapping[str, Choice], repeats: int) -> dict[str, Timing]:
        self.asked.append((m, len(choices)))
        found = {}
        for name, choice in choices.items():
            us = sum(self.us(m, part, way) for part, way in zip(self.block.ways, choice, strict=True))
            if math.isfinite(us):
                found[name] = Timing(us, 0.01)
        return found

    def of(self, archive: Path, block: Block, options: GraphOptions) -> Scripted:
        self.block = block
        return self


def chosen(source: Path, us: Us, **more: Any) -> tuple[GraphReport, Scripted]:
    replay = Scripted(us)
    site = Site((9, 0), more.pop("gpu", GPU), lambda: dict(ENVIRONMENT), replay.of)
    return tune_in_graph(source, source.with_name("served.aot"), site=site, **more), replay


def served(source: Path) -> dict[Signature, Entry]:
    with Archive.open(source.with_name("served.aot")) as archive:
        wrong = [found for found in verify.verify(archive) if not found.ok]
        assert [found for found in wrong if "ELF" not in found.detail] == []  # cubins are made up
        table = archive.table("gemm")
        return {e.signature: e for e in Dispatch.from_json(table, GEMM, archive.functions.targets_by_name()).entries}


def costs(m: int, part: str, way: Signature) -> float:
    """Overlap pays from M = 8 up but in o; the activation apart pays at M = 1 and 2, where it costs 3."""
    us = 10.0 if way.overlap == "serial" or part == "o" else 12.0 - 3.0 * (m >= 8)
    if part == "o" and way.overlap == "weights":
        us += 1.0
    return us + (3.0 if part == "gate_up" and way.parts.gated == (m <= 2) else 0.0)


EVERY = [s for of in ALL for s in (of, early(of))]


def test_entry_that_promises_overlap_is_served_by_what_won(tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    chosen(source, costs)
    found = served(source)
    qkv, of = early(PLAIN["qkv"]).key(), PLAIN["qkv"].key()
    # Half way between 4 and 8 in the logarithm is 5; above 64, where nothing was looked at, nothing overlaps.
    few, many = [(5, f"few.{of}"), (20, f"few.{qkv}")], [(64, f"many.{qkv}"), (None, f"many.{of}")]
    assert found[early(PLAIN["qkv"])].ranges == (*few, *many)
    assert [row["function"] for row in found[early(PLAIN["qkv"])].timings] == [f"few.{of}", f"many.{qkv}"]
    assert found[early(PLAIN["qkv"])].tuned_to == 64, "above all M that steps were timed at it is the serial entry"
    o = PLAIN["o"].key()
    assert found[early(PLAIN["o"])].ranges == ((20, f"few.{o}"), (None, f"many.{o}"))
    assert {s: found[s].ranges for s in ALL} == {s: ((20, f"few.{s.key()}"), (None, f"many.{s.key()}")) for s in ALL}


def test_entry_of_an_activation_says_where_it_was_faster_apart(tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    chosen(source, costs)
    found = served(source)
    assert found[FUSED].apart == found[early(FUSED)].apart == ((1, 2),)
    assert {s: e.apart for s, e in found.items() if e.apart} == {FUSED: ((1, 2),), early(FUSED): ((1, 2),)}


def test_way_that_was_not_chosen_overlaps_as_the_best_of_its_kind(tmp_path: Path) -> None:
    """The product alone serves MLPs that cannot leave their activation, also where that fused won."""
    source = made(tmp_path / "tuned.aot", EVERY)
    chosen(source, costs)
    alone = early(PLAIN["gate_up"])
    assert served(source)[alone].best(16) == f"few.{alone.key()}"
    assert served(source)[alone].best(4) == f"few.{PLAIN['gate_up'].key()}"


def test_best_of_all_choices_wins_though_parts_depend_on_each_other(tmp_path: Path) -> None:
    """An overlapping down pays only behind a fused gate_up, which alone pays nowhere: no step at a time finds both."""

    class Together(Scripted):
        def times(self, m: int, choices: Mapping[str, Choice], repeats: int) -> dict[str, Timing]:
            found = {}
            for name, choice in choices.items():
                fused, follows = choice[2].parts.gated, choice[3].overlap == "weights"
                found[name] = Timing(10.0 + (fused != follows) - 0.5 * (fused and follows), 0.0)
            return found

    source, replay = made(tmp_path / "tuned.aot", EVERY), Together(costs)
    report = tune_in_graph(
        source, tmp_path / "served.aot", site=Site((9, 0), GPU, lambda: dict(ENVIRONMENT), replay.of)
    )
    ((block, seen),) = report.seen
    assert all(at.us[at.best()] == 9.5 for at in seen)
    assert served(source)[early(PLAIN["down"])].best(16).endswith("_weights")
    assert min(described(block, seen[0])["uniform"].values()) == 9.5


def test_every_choice_is_timed_at_powers_of_two_and_what_was_asked(tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    _, replay = chosen(source, costs)
    assert [m for m, count in replay.asked if count == 32] == [1, 2, 4, 8, 16, 32, 64]
    assert all(count < 20 for _, count in replay.asked[1::2])


def test_brief_time_that_noise_made_small_does_not_win(tmp_path: Path) -> None:
    """All choices take 10 briefly and more for longer, as where the clock falls; with the activation fused least."""

    asked = list[tuple[int, int]]()

    class Drifting(Scripted):
        def times(self, m: int, choices: Mapping[str, Choice], repeats: int) -> dict[str, Timing]:
            asked.append((len(choices), repeats))
            fused = {name: choice[2].parts.gated for name, choice in choices.items()}
            return {name: Timing(10.0 if repeats < 10 else 10.3 - 0.1 * fused[name], 0.0) for name in choices}

    site = Site((9, 0), GPU, lambda: dict(ENVIRONMENT), Drifting(costs).of)
    source = made(tmp_path / "tuned.aot", EVERY)
    ((_, seen),) = tune_in_graph(source, tmp_path / "served.aot", site=site).seen
    assert [at.us[at.best()] for at in seen] == [pytest.approx(10.2)] * len(seen)
    assert served(source)[FUSED].apart == ()
    assert all(repeats >= 48 and repeats % (2 * count) == 0 for count, repeats in asked[1::2])


def test_choice_that_cannot_be_launched_is_none(tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    chosen(source, lambda m, part, way: math.inf if part == "qkv" and way.overlap == "weights" else costs(m, part, way))
    assert {name for _, name in served(source)[early(PLAIN["qkv"])].ranges} == {
        f"{word}.{PLAIN['qkv'].key()}" for word in ("few", "many")
    }


def test_where_torch_was_faster_goes_with_what_serves(tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY, torch_faster=[(3, 9), (50, None)])
    chosen(source, costs)
    assert served(source)[early(PLAIN["qkv"])].torch_faster == ((3, 9), (50, None))


def test_archive_stays_as_it_is_but_for_the_rows(tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    chosen(source, costs)
    with Archive.open(source) as before, Archive.open(tmp_path / "served.aot") as after:
        assert list(before.functions) == list(after.functions)
        assert before.table("build") == after.table("build")
        (environment,) = after.table("tuning")["environments"]
        assert environment["candidates"] == before.digest


# --- which archives ---


def test_layers_without_a_choice_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="aot manifest from-config --in-graph"):
        chosen(made(tmp_path / "tuned.aot", list(PLAIN.values())), costs)


def test_layers_that_were_not_tuned_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="were not tuned; run `aot tune` without --in-graph first"):
        chosen(made(tmp_path / "tuned.aot", EVERY, state="ranked"), costs)
    with pytest.raises(TuneError, match=r"were not tuned on a .*H20.*; run `aot tune` here"):
        chosen(made(tmp_path / "tuned.aot", EVERY), costs, gpu=GPU._replace(name="NVIDIA H20", multiprocessors=78))


def test_block_is_made_of_the_parts_that_are_there() -> None:
    names = {f"{part}_proj": of for part, of in PLAIN.items()}
    problems = [build_table.Problem(name, s.key()) for name, s in names.items()]
    model = build_table.Model("m", None, None, problems)
    (block,) = blocks([model, model], EVERY)
    assert tuple(block.ways) == PARTS
    assert (block.hidden, block.heads and tuple(dataclasses.astuple(block.heads))) == (HIDDEN, (4, 2, 128))
    assert list(block.uniform()) == ["all serial", "all overlap", "all fused", "all fused, overlap"]
    (half,) = blocks([model], [FUSED, *PLAIN.values()])
    assert [len(ways) for ways in half.ways.values()] == [1, 1, 2, 1]
    assert list(half.uniform()) == ["all serial", "all fused"]
    (mlp,) = blocks([model], [FUSED, PLAIN["gate_up"], PLAIN["down"], PLAIN["o"]])
    assert tuple(mlp.ways) == ("gate_up", "down")
    assert mlp.heads is None
    assert blocks([model], [FUSED, PLAIN["gate_up"]]) == []


def test_attention_whose_heads_do_not_follow_is_left_out() -> None:
    odd = PLAIN | {"qkv": dataclasses.replace(PLAIN["qkv"], n=QKV + 8)}
    model = build_table.Model("m", None, None, [build_table.Problem(name, s.key()) for name, s in odd.items()])
    (block,) = blocks([model], [x for s in odd.values() for x in (s, early(s))])
    assert tuple(block.ways) == ("gate_up", "down")


def test_fp8_and_other_epilogues_are_no_part() -> None:
    fp8 = {p: dataclasses.replace(s, a="e4m3", b="e4m3", scaling="block") for p, s in PLAIN.items()}
    gelu = PLAIN | {"gate_up": dataclasses.replace(PLAIN["gate_up"], epilogue="geglu")}
    for names in (fp8, gelu):
        model = build_table.Model("m", None, None, [build_table.Problem(n, s.key()) for n, s in names.items()])
        found = blocks([model], [x for s in names.values() for x in (s, early(s))])
        assert all("gate_up" not in block.ways for block in found)


# --- the steps ---


def test_step_gives_the_same_whatever_way_its_gemms_are_computed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.replay import Layer, Neighbours, Step
    from aot.tune.replay import run as run_step
    from runtime.numbers.epilogue import Epilogue

    from .torch_stand_in import library, near

    residuals = [dataclasses.replace(PLAIN[p], epilogue=Epilogue(residual=True).word()) for p in ("o", "down")]
    every = [s for of in [*ALL, *residuals] for s in (of, early(of))]
    model = build_table.Model("m", None, None, [build_table.Problem(n, s.key()) for n, s in PLAIN.items()])
    (block,) = blocks([model], every, residual=True)
    lib = library(tmp_path, [s.to_json() for s in every])
    layers = [Layer(block, "cpu", torch.Generator().manual_seed(i)) for i in range(2)]
    step = Step(block, layers, 3, GraphOptions(context=7), Neighbours())
    first, *others = (run_step(step, lib, choice) for choice in block.choices()[::9])
    assert len(others) == 14
    assert first.isfinite().all()
    assert not near(first, torch.zeros_like(first))
    for other in others:  # sums are rounded elsewhere
        assert (other.float() - first.float()).norm() < 0.02 * first.float().norm()
    assert torch.equal(run_step(step, lib, block.choices()[0]), first)


def test_step_attends_to_what_it_wrote_to_the_cache(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.replay import Layer, Neighbours, Step
    from aot.tune.replay import run as run_step

    from .torch_stand_in import library

    model = build_table.Model("m", None, None, [build_table.Problem(n, s.key()) for n, s in PLAIN.items()])
    (block,) = blocks([model], EVERY)
    layer = Layer(block, "cpu", torch.Generator().manual_seed(0))
    step = Step(block, [layer], 3, GraphOptions(context=5), Neighbours())
    before = step.caches[0].clone()
    run_step(step, library(tmp_path, [s.to_json() for s in EVERY]), block.choices()[0])
    assert torch.equal(step.caches[0][:, :, :, :-1], before[:, :, :, :-1])
    normed = step.x.float() * torch.rsqrt(step.x.float().square().mean(-1, keepdim=True) + 1e-5)
    qkv = (normed.bfloat16().float() @ layer.weights["qkv"].float().T).view(3, 8, 128)
    assert (step.caches[0][1, :, :, -1].float() - qkv[:, 6:]).abs().max() < 0.05
    # At an angle of nothing keys are as they were, and lengths are the same at every angle.
    keys = step.caches[0][0, :, :, -1].float()
    assert (keys.norm(dim=-1) - qkv[:, 4:6].norm(dim=-1)).abs().max() < 0.1
    assert (keys[..., 0] - qkv[:, 4:6, 0]).abs().max() < 0.05


# --- the command ---


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a GPU that takes what `costs` says."""
    site = Site((9, 0), GPU, lambda: dict(ENVIRONMENT), Scripted(costs).of)
    monkeypatch.setattr(in_graph, "this_site", lambda: site)


def test_command_says_what_won_and_by_how_much(run: Run, here: None, tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    found = run("tune", source, "-o", tmp_path / "served.aot", "--in-graph")
    assert found.status == 0, found.err
    (line,) = [line.split() for line in found.out.splitlines() if line.split()[:1] == ["16"]]
    assert line == [
        "16",
        "37.0",
        "weights",
        "serial",
        "weights",
        "swiglu",
        "weights",
        "1.162",
        "1.108",
        "1.081",
        "1.027",
    ]
    shown = run("show", tmp_path / "served.aot", early(FUSED).key()).out
    assert "faster with the activation in a kernel of its own at M = 1-2" in shown
    assert "apart" in run("diff", source, tmp_path / "served.aot").out


def test_command_prints_json(run: Run, here: None, tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    (of,) = json.loads(run("tune", source, "-o", tmp_path / "served.aot", "--in-graph", "--json").out)["in_graph"]
    assert [at["m"] for at in of["steps"]] == [1, 2, 4, 8, 16, 32, 64]
    assert of["steps"][0]["parts"]["gate_up"] == "serial"


def test_command_takes_no_spec_besides(run: Run, here: None, tmp_path: Path) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    (tmp_path / "spec.py").touch()
    found = run("tune", source, "-o", tmp_path / "o.aot", "--in-graph", "--spec", tmp_path / "spec.py")
    assert (found.status, "do not go together" in found.err) == (2, True)
