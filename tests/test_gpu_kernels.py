"""Every GEMM function of an archive on a real GPU, also those that dispatch prefers nowhere: pytest -m gpu --archive=X.

Archives that were not tuned hold all candidates: tests/data/coverage.yaml has a problem of every form.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runtime
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.device.launch import PROGRAMMATIC_STREAM_SERIALIZATION
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALE_BLOCK, SCALINGS, TILES
from runtime.numbers.weights import BLOCK_ROWS, FORMATS
from runtime.program.record import Record, TensorArgument
from runtime.tables.dispatch import Dispatch

pytestmark = pytest.mark.gpu

REPEATS = 5
EXAMPLES = 300
CHAIN_K, CHAIN_LENGTH = 1024, 7
DEEP_K = 28_672  # the deepest of the models in manifests/ but two, and a multiple of everything


@pytest.fixture(scope="module")
def library(tuned_archive: Path) -> Iterator[Library]:
    torch = pytest.importorskip("torch")
    with runtime.load(tuned_archive) as library:
        yield library
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def functions(tuned_archive: Path) -> list[tuple[str, Signature]]:
    """Each GEMM function that this GPU runs, with a signature that names it."""
    with Archive.open(tuned_archive) as archive:
        table = Dispatch.from_json(archive.table("gemm"), GEMM)
    found: dict[str, Signature] = {}
    for entry in table.entries_for(Driver().compute_capability):
        for m in (1, *(m for m, _ in entry.candidates)):
            for name in entry.functions(m):
                found.setdefault(name, entry.signature)
    if not found:
        pytest.skip("the archive has no GEMM for this GPU")
    return sorted(found.items())


def steps(record: Record, s: Signature) -> tuple[int, int]:
    """What N and K must be multiples of for a function that serves `s`, which may take fewer N than its form has: with
    swapped gates multiples of 128."""
    if s.scaling in FORMATS:  # of 4-bit weights
        return BLOCK_ROWS, FORMATS[s.scaling].multiple
    if SCALINGS[s.scaling].layout == TILES:
        return 32, 32
    k = 16 if s.b == "e4m3" else 8
    n = 16 if s.d == "e4m3" else 8
    if s.parts.gated:
        n *= 2
        if s.scaling == "block" and not s.parts.interleaved:  # a block of B holds gates or what they gate
            n = 2 * SCALE_BLOCK
    (rows,) = (a.shape[-2] for a in record.arguments if isinstance(a, TensorArgument) and a.name == "b")
    of_record = record.symbols[rows].divisibility if isinstance(rows, str) else 1
    assert n % of_record == 0 or (s.parts.gated and of_record == 128), "but for swapped gates all take what forms take"
    return math.lcm(n, of_record), k


def launcher(library: Library, name: str) -> Callable[[Any], None]:
    import torch

    function = library.functions[name]
    return lambda o: function(*o.arguments(), stream=torch.cuda.current_stream())


def failures(library: Library, name: str, s: Signature, m: int) -> str | None:
    """What is wrong with a function at these extents, on random operands, poisoned output and guard rows.

    Ours move sums of 8-bit products to f32 registers whatever the scales are, so none may err by more.
    """
    from aot.tune import measure
    from aot.tune.gemm.operands import Weights

    found = measure.check(s, m, Weights(s, m, 0, m + s.n + s.k), {name: launcher(library, name)})[name]
    if isinstance(found, float) and name.startswith("own.") and s.d != "e4m3" and found > DTYPES[s.d].tolerance:
        found = f"relative error {found:.2e}, more than rounding and order make"
    return None if isinstance(found, float) else f"{name} at M = {m}, N = {s.n}, K = {s.k}: {found}"


@given(data=st.data())
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize=True)
def test_functions_are_right_at_any_extents(
    library: Library, functions: list[tuple[str, Signature]], data: st.DataObject
) -> None:
    name, s = data.draw(st.sampled_from(functions))
    n_step, k_step = steps(library.functions[name].record, s)
    m = data.draw(st.integers(1, 700) | st.sampled_from((1, 8, 64, 65, 128, 2049)))
    n = n_step * data.draw(st.integers(1, max(1, 1400 // n_step)))
    k = data.draw(st.integers(1, 2000 // k_step).map(lambda i: i * k_step) | st.just(DEEP_K))
    found = failures(library, name, dataclasses.replace(s, n=n, k=k), m)
    if k == DEEP_K and s.a == "e4m3" and not name.startswith("own."):
        # NVIDIA's kernels leave all sums to the tensor core, which is short for so deep a K: the check may refuse a few
        # elements, as it does when such a kernel is tuned, but no more.
        assert found is None or re.search(r": relative error [1-9]\.\d\de-03 \(limit", found), found
    else:
        assert found is None


def test_every_function_is_right_at_its_own_extents(library: Library, functions: list[tuple[str, Signature]]) -> None:
    wrong = [failures(library, name, s, m) for name, s in functions for m in (1, 65, 333)]
    assert [w for w in wrong if w] == []


def test_every_function_is_right_where_extents_fill_no_tile(
    library: Library, functions: list[tuple[str, Signature]]
) -> None:
    """Both of the tails that each dimension may have: a bit more than tiles, and a bit less."""
    wrong = []
    for name, s in functions:
        n_step, k_step = steps(library.functions[name].record, s)
        for m, n, k in ((77, 2 * 256 + n_step, 1024 + k_step), (255, 3 * 256 - n_step, 1024 - k_step)):
            ragged = dataclasses.replace(s, n=-(-n // n_step) * n_step, k=k)
            wrong.append(failures(library, name, ragged, m))
    assert [w for w in wrong if w] == []


def test_what_shared_memory_held_before_reaches_no_row_of_d(
    library: Library, functions: list[tuple[str, Signature]]
) -> None:
    """Rows past M may keep what the launch before left there: NaN, of a full tile."""
    import torch

    from aot.tune.gemm.operands import Weights

    wrong = []
    for name, s in functions:
        for m in (1, 77, 200, 333):
            o = Weights(s, 1024, 0, seed=m).operands(1024)[0]
            o.a.view(torch.uint8).fill_(0xFF)
            launcher(library, name)(o)
            wrong.append(failures(library, name, s, m))
    assert [w for w in wrong if w] == []


def test_tiles_that_move_to_other_clusters_are_taken_once_each(
    library: Library, functions: list[tuple[str, Signature]]
) -> None:
    """With fewer tiles than clusters, as many, and waves of them that are full or not."""
    moved = [(name, s) for name, s in functions if ".quads." in name]
    if not moved:
        pytest.skip("the archive has no function that places tiles by GPC")
    wrong = []
    for name, s in moved:
        found = re.search(r"\.tile(\d+)x(\d+)\.cluster1x2\.", name)
        assert found is not None, name
        tile_m, tile_n = map(int, found.groups())
        for rows, columns in ((5, 7), (6, 6), (7, 9), (8, 8), (6, 11), (1, 67), (10, 13), (12, 11), (10, 20)):
            wide = dataclasses.replace(s, n=columns * 2 * tile_n, k=128)
            wrong.append(failures(library, name, wide, rows * tile_m - 3))
    assert [w for w in wrong if w] == []


def test_sums_of_8_bit_products_are_kept_in_f32_where_k_is_deep(
    library: Library, functions: list[tuple[str, Signature]]
) -> None:
    """Over so many columns the tensor core's own sums err by 4.6e-3, more than the tolerance; ours err by 1.7e-3."""
    ours = [(name, s) for name, s in functions if s.a == "e4m3" and name.startswith("own.")]
    wrong = [failures(library, name, dataclasses.replace(s, k=DEEP_K), 65) for name, s in ours]
    assert [w for w in wrong if w] == []


@pytest.fixture
def sharing(library: Library, functions: list[tuple[str, Signature]]) -> list[tuple[str, Signature]]:
    """The functions that keep sums in a workspace."""
    found = [(name, s) for name, s in functions if library.functions[name].record.workspace_arguments]
    if not found:
        pytest.skip("no function of the archive needs a workspace")
    return found


def four_times(library: Library, name: str, s: Signature) -> tuple[list[Any], list[Any]]:
    """Four sets of operands with poisoned outputs for extents whose tiles are few, and what they must become."""
    import torch

    from aot.tune.gemm.operands import Weights

    wide = dataclasses.replace(s, n=1280, k=4096)
    sets = [Weights(wide, 200, 0, seed=i).operands(200)[0] for i in range(4)]
    expected = []
    for o in sets:
        launcher(library, name)(o)
        expected.append(o.d.clone().view(torch.uint8))
        o.d.fill_(float("nan"))
    torch.cuda.synchronize()
    return sets, expected


def test_streams_do_not_share_a_workspace(library: Library, sharing: list[tuple[str, Signature]]) -> None:
    import torch

    for name, s in sharing:
        sets, expected = four_times(library, name, s)
        streams = [torch.cuda.Stream() for _ in range(2)]
        for i in range(100):
            with torch.cuda.stream(streams[i % 2]):
                launcher(library, name)(sets[i % 4])
        torch.cuda.synchronize()
        assert all(torch.equal(o.d.view(torch.uint8), e) for o, e in zip(sets, expected, strict=True)), name


def test_graphs_captured_on_one_stream_may_be_replayed_on_two(
    library: Library, sharing: list[tuple[str, Signature]]
) -> None:
    import torch

    for name, s in sharing:
        sets, expected = four_times(library, name, s)
        streams = [torch.cuda.Stream() for _ in range(3)]
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for i, graph in enumerate(graphs):
            with torch.cuda.graph(graph, stream=streams[2]):
                for o in sets[2 * i : 2 * i + 2] * 10:
                    launcher(library, name)(o)
        for _ in range(10):
            for graph, stream in zip(graphs, streams, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(o.d.view(torch.uint8), e) for o, e in zip(sets, expected, strict=True)), name


def test_every_function_gives_the_same_bits_every_time(
    library: Library, functions: list[tuple[str, Signature]]
) -> None:
    import torch

    from aot.tune.gemm.operands import Weights

    for name, s in functions:
        launch = launcher(library, name)
        for m in (1, 77, 333):
            o = Weights(s, m, 0, seed=m).operands(m)[0]
            launch(o)
            first = o.d.clone().view(torch.uint8)
            for _ in range(REPEATS - 1):
                o.d.fill_(float("nan"))
                launch(o)
                assert torch.equal(o.d.view(torch.uint8), first), f"{name} at M = {m}"


def test_functions_that_overlap_wait_for_each_other(library: Library, functions: list[tuple[str, Signature]]) -> None:
    """Over two buffers by turns: each launch reads what the one before wrote, and writes what that one read."""
    import torch

    from aot.tune.gemm.operands import Weights

    def overlaps(name: str) -> bool:
        launches = library.functions[name].record.program.launches
        return any(PROGRAMMATIC_STREAM_SERIALIZATION in launch.attributes for launch in launches)

    chained = [(name, s) for name, s in functions if s.batch == 1 and s.a == s.d and overlaps(name)]
    if not chained:
        pytest.skip("no function of the archive overlaps and takes what it makes")
    for name, s in chained:
        square = dataclasses.replace(s, n=2 * CHAIN_K if s.parts.gated else CHAIN_K, k=CHAIN_K)
        launch = launcher(library, name)
        for m in (16, 333):
            o = Weights(square, m, 0, seed=m).operands(m)[0]
            start = [torch.randn(m, CHAIN_K, device="cuda").to(o.a.dtype) for _ in range(2)]
            pair = [x.clone() for x in start]

            def run(
                after: Callable[[], object], pair: list[Any] = pair, o: Any = o, launch: Callable[[Any], None] = launch
            ) -> None:
                for i in range(CHAIN_LENGTH):
                    x, y = pair[i % 2], pair[1 - i % 2]
                    extras = o.extras | ({"residual": x} if "residual" in o.extras else {})
                    launch(dataclasses.replace(o, a=x, d=y, extras=extras))
                    after()

            run(torch.cuda.synchronize)
            expected = [x.clone().view(torch.uint8) for x in pair]
            assert all(bool(x.float().isfinite().all()) for x in pair), name
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(lambda: None)
            for _ in range(3):
                for x, y in zip(pair, start, strict=True):
                    x.copy_(y)
                graph.replay()
                torch.cuda.synchronize()
                same = (torch.equal(x.view(torch.uint8), e) for x, e in zip(pair, expected, strict=True))
                assert all(same), f"{name} at M = {m}"
