"""What a universal table serves on a real GPU, at N and K that nobody named:
pytest -m gpu tests/test_gpu_universal.py --archive universal.aot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from aot import measure
from aot.operands import OperandSet, Weights, gemm_options
from runtime import Library
from runtime.archive import Archive
from runtime.dispatch import serves
from runtime.driver import Driver
from runtime.signature import Signature
from runtime.universal_table import PREDICTED, Form, Universal

pytestmark = pytest.mark.gpu

CASES = 12  # of each form
MOST_FLOPS = 2**37


@pytest.fixture(scope="module")
def forms(tuned_archive: Path) -> list[Form]:
    with Archive.open(tuned_archive) as archive:
        if "universal" not in archive.tables:
            pytest.skip("the archive has no universal table")
        table = Universal.from_json(archive.table("universal"), archive.functions.targets_by_name())
    capability = Driver().compute_capability
    return [form for _, form in table.forms if serves(form.target, capability)]


@pytest.fixture(scope="module")
def library(tuned_archive: Path) -> Iterator[Library]:
    with runtime.load(tuned_archive) as library:
        yield library
        torch.cuda.synchronize()


def drawn(form: Form, seed: int) -> Iterator[tuple[Signature, int]]:
    """Random extents that some function of the form takes, ragged against every tile."""
    chance, made = random.Random(seed), 0
    n_step = min(f.n_multiple for f in form.functions)
    k_step = min(f.k_multiple for f in form.functions)
    while made < CASES:
        m = round(2 ** chance.uniform(0, 12))
        n, k = (step * max(1, round(2 ** chance.uniform(4, 13) / step)) for step in (n_step, k_step))
        signature = form.signature(n, k)
        if signature.flops(m) <= MOST_FLOPS:
            made += 1
            yield signature, m


def test_predicted_functions_compute_what_was_asked_for(library: Library, forms: list[Form]) -> None:
    wrong = []
    for place, form in enumerate(forms):
        for signature, m in drawn(form, place):
            entry = library.entry(signature)
            if entry.state != PREDICTED:
                continue

            def launch(o: OperandSet, signature: Signature = signature) -> None:
                library.gemm(o.a, o.b, out=o.d, **gemm_options(signature, o))

            result = measure.check(signature, m, Weights(signature, m, 0, seed=m), {"gemm": launch})["gemm"]
            if isinstance(result, str):
                wrong.append(f"{signature.key()} M={m} by {entry.best(m)}: {result}")
    assert not wrong


def test_a_row_has_the_same_bits_whatever_the_batch(tuned_archive: Path, forms: list[Form]) -> None:
    with runtime.load(tuned_archive, batch_invariant=True) as library:
        for place, form in enumerate(forms):
            signature, _ = next(drawn(form, 100 + place))
            if signature.batch > 1 or signature.scaling == "tensor":
                continue
            most = 700
            (o, *_) = Weights(signature, most, 0, seed=place).operands(most)
            given: dict[str, Any] = dict(gemm_options(signature, o)) | {"dtype": o.d.dtype}
            whole = library.gemm(o.a, o.b, **given)
            for rows in (1, 2, 17, 64, 130, 512):
                by_row = {name: x[:rows] for name, x in given.items() if name in ("scale_a", "residual")}
                part = library.gemm(o.a[:rows], o.b, **given | by_row)
                assert torch.equal(part, whole[:rows]), f"{signature.key()}: {rows} rows"


def test_a_new_m_is_no_slower_to_serve_than_fifty_microseconds(library: Library) -> None:
    """The median on the host, of M values whose function was called for the same N and K before."""
    import time

    b = torch.randn(3136, 2112, device="cuda", dtype=torch.bfloat16)
    a, d = (torch.randn(4096, n, device="cuda", dtype=torch.bfloat16) for n in (2112, 3136))
    library.preload()
    entry = library.entry(Signature("bf16", "bf16", "bf16", "f32", "none", 3136, 2112))
    seen, samples = set[str](), []
    for m in range(2, 4096, 37):
        torch.cuda.synchronize()
        start = time.perf_counter()
        library.gemm(a[:m], b, out=d[:m])
        if entry.best(m) in seen:
            samples.append(time.perf_counter() - start)
        seen.add(entry.best(m))
    assert sorted(samples)[len(samples) // 2] < 50e-6
