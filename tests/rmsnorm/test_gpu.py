"""RMSNorm on a real GPU: what tuning finds of an archive's functions, and calls of them. pytest -m gpu --archive=X."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runtime
from aot.pack import ranges, tables
from aot.pack.compatibility import refusal
from aot.pack.write import Package
from aot.tune.options import TuneOptions
from aot.tune.run import tune_archive
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.numbers.quantised import SCALINGS_OF_ROWS
from runtime.program.record import Record
from runtime.rmsnorm import Signature
from runtime.tables.dispatch import serves

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.operation import tuning  # noqa: E402

from ..gpu_library import library_of_module as library_of_module  # noqa: E402

pytestmark = pytest.mark.gpu

EXTENTS = 8, 128, 4096, 5376, 16_384
M_VALUES = 1, 3, 17, 333, 2048
TOKENS = 1, 64, 512
ROUNDED = "torch.compile'd rms_norm, amax, quotient and rounding"  # the end of a baseline's name


@pytest.fixture(scope="module")
def norms(tuned_archive: Path) -> dict[Signature, list[str]]:
    """The functions of this GPU that compute RMSNorm, by signatures of N = 4096, with a residual and without, and with
    scales and without."""
    found: dict[Signature, list[str]] = {}
    with Archive.open(tuned_archive) as archive:
        for name in archive.functions:
            if serves(archive.functions[name].target, Driver().compute_capability):
                record = Record.from_json(archive.record(name))
                for dtype in ("bf16", "f16"):
                    for s in signatures(dtype):
                        if refusal(record, s) is None:
                            found.setdefault(s, []).append(name)
    if not found:
        pytest.skip("the archive has no RMSNorm for this GPU; build it with --function rmsnorm")
    return found


def signatures(dtype: str) -> list[Signature]:
    found = [Signature(dtype, dtype, dtype, 4096, of) for of in ("none", dtype)]
    return found + [replace(of, y="e4m3", scaling=word) for of in found for word in SCALINGS_OF_ROWS]


def launcher(library: Library, name: str) -> Callable[[Any], None]:
    return lambda o: library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())


def waiting(archive: Path, norms: dict[Signature, list[str]], path: Path) -> Path:
    """An archive of these functions with entries that wait to be tuned."""
    package, rows = Package(), []
    with Archive.open(archive) as opened:
        package.add_archive(opened, sorted({name for names in norms.values() for name in names}))
        targets = opened.functions.targets_by_name()
    for signature, names in norms.items():
        target = targets[names[0]]
        alike = [name for name in names if targets[name] == target]
        serving = ranges.ranges([(m, alike[0]) for m in TOKENS])
        rows.append(tables.Row(signature, target, None, "ranked", serving, candidates=[(m, alike) for m in TOKENS]))
    for name, table in tables.operation_tables(rows, targets).items():
        package.set_table(name, table)
    package.write(path)
    return path


def test_rmsnorm_is_right_by_the_check_of_tuning(norms: dict[Signature, list[str]], library: Library) -> None:
    for of, names in norms.items():
        for n in EXTENTS if of.scaling == "none" else EXTENTS[1:]:
            s = replace(of, n=n)
            for m in M_VALUES:
                weights = tuning(s).measures().weights(s, m, 0, m + n)
                found = measure.check(s, m, weights, {name: launcher(library, name) for name in names})
                assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (s.key(), m)


def test_check_notices_what_a_launch_leaves_out(norms: dict[Signature, list[str]], library: Library) -> None:
    s, (name, *_) = next(of for of in norms.items() if of[0].residual == of[0].scaling == "none")
    function = library.functions[name]
    launches: dict[str, measure.Launch] = {
        "nothing": lambda o: None,
        "half": lambda o: function(o.x[:8], o.weight, o.y[:8], o.eps, stream=torch.cuda.current_stream()),
        "another eps": lambda o: function(o.x, o.weight, o.y, 1e-6, stream=torch.cuda.current_stream()),
    }
    found = measure.check(s, 17, tuning(s).measures().weights(s, 17, 0, 0), launches)
    assert all(isinstance(why, str) for why in found.values()), found


def test_rmsnorm_is_tuned_beside_torch(tuned_archive: Path, norms: dict[Signature, list[str]], tmp_path: Path) -> None:
    """All of `aot tune`, on entries that wait for it: the archive's functions with nothing chosen yet."""
    waiting(tuned_archive, norms, tmp_path / "ranked.aot")
    report = tune_archive(tmp_path / "ranked.aot", tmp_path / "tuned.aot", TuneOptions())
    assert (report.rejected, report.unserved, report.unknown) == ({}, [], [])
    with Archive.open(tmp_path / "tuned.aot") as archive:
        found = tables.operation_entries(archive)
    assert len(found) == len(norms)
    for entry in found:
        assert entry.state == "tuned"
        assert {timing["m"] for timing in entry.timings} >= {TOKENS[0], TOKENS[-1]}
        scaled = entry.signature.scaling != "none"
        for timing in entry.timings:
            assert timing["baseline"].endswith(("torch.nn.functional.rms_norm", ROUNDED)[scaled])
            assert 0 < timing["us"] < 1e4
            assert 0 < timing["baseline_us"] < 1e4
    with runtime.load(tmp_path / "tuned.aot", require="tuned") as tuned:
        s = next(e.signature for e in found if e.signature.residual == e.signature.scaling == "none")
        operands = tuning(s).measures().weights(s, 33, 0, 0).operands(33)[0]
        x, weight, y, eps = operands.arguments()
        tuned.call("rmsnorm", x, weight, out=y, eps=eps)
        wanted = tuning(s).measures().reference(s, operands)["y"]
        assert float((y.double() - wanted).norm() / wanted.norm()) < measure.tolerance(s.y)


def test_operator_gives_the_very_bits_of_the_library(
    norms: dict[Signature, list[str]], tmp_path: Path, tuned_archive: Path
) -> None:
    """In eager mode, compiled with any M, and captured."""
    import runtime.torch as binding

    torch._dynamo.reset()
    with runtime.load(waiting(tuned_archive, norms, tmp_path / "ranked.aot")) as lib:
        for s in (of for of in norms if of.residual == of.scaling == "none"):
            step = torch.compile(lambda x, w, lib=lib: binding.call(lib, "rmsnorm", x, w), fullgraph=True, dynamic=True)
            for m in (3, 17, 333):
                x, weight, y, _ = tuning(s).measures().weights(s, m, 0, m).operands(m)[0].arguments()
                lib.call("rmsnorm", x, weight, out=y)
                assert torch.equal(binding.call(lib, "rmsnorm", x, weight), y)
                assert torch.equal(step(x, weight), y)
                found, graph = torch.empty_like(y), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    binding.call(lib, "rmsnorm", x, weight, out=found)
                graph.replay()
                assert torch.equal(found, y)
        torch.cuda.synchronize()


def test_operator_with_a_residual_gives_the_very_bits_of_the_library(
    norms: dict[Signature, list[str]], tmp_path: Path, tuned_archive: Path
) -> None:
    """Compiled, with any M, and where the sum takes the residual's place."""
    import runtime.torch as binding

    torch._dynamo.reset()
    with runtime.load(waiting(tuned_archive, norms, tmp_path / "ranked.aot")) as lib:
        step = torch.compile(lambda x, r, w: binding.add_rmsnorm(lib, x, r, w), fullgraph=True, dynamic=True)
        for s in (of for of in norms if of.residual != "none" == of.scaling):
            for m in (3, 17, 333):
                x, residual, weight, *_ = tuning(s).measures().weights(s, m, 0, m).operands(m)[0].arguments()
                y, total = step(x, residual, weight)
                assert torch.equal(total, x + residual)
                found, _ = lib.call("rmsnorm", x, weight, residual=residual, out=(torch.empty_like(x), residual))
                assert torch.equal(found, y)
                assert torch.equal(residual, total)
        torch.cuda.synchronize()


def test_what_a_norm_quantises_is_what_quantising_makes_of_it(
    norms: dict[Signature, list[str]], library: Library
) -> None:
    """Bit for bit, of functions with as many threads, which add squares up in the same order, if kept."""
    stream = torch.cuda.current_stream()
    compared = 0
    for s, names in norms.items():
        plain = replace(s, y=s.x, scaling="none")
        for name in names if s.scaling != "none" else ():
            alike = [of for of in norms[plain] if of.split(".")[-2:] == name.split(".")[-2:]]
            compared += len(alike[:1])
            for m in (3, 333) if alike else ():
                o: Any = tuning(s).measures().weights(s, m, 0, m).operands(m)[0]
                wide: Any = tuning(plain).measures().weights(plain, m, 0, m).operands(m)[0]
                library.functions[name](*o.arguments(), stream=stream)
                library.functions[alike[0]](*replace_inputs(wide, o).arguments(), stream=stream)
                blocks = wide.y.float().view(m, -1, 128 if s.scaling == "block" else s.n)
                amax = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-10)
                largest = torch.full_like(amax, 448.0)  # torch multiplies a number by an inverse, rounding twice
                wanted = (blocks * (largest / amax)).view(m, s.n).to(torch.float8_e4m3fn)
                assert torch.equal(o.y.float(), wanted.float()), (name, m)
                torch.testing.assert_close(o.scale.flatten(), (amax / largest).flatten(), rtol=1e-6, atol=0)
    assert compared or all(s.scaling == "none" for s in norms)
    torch.cuda.synchronize()


def replace_inputs(of: Any, given: Any) -> Any:
    """Operands with the inputs of others."""
    return replace(of, x=given.x, residual=given.residual, weight=given.weight, eps=given.eps)
