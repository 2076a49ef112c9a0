"""What a universal table serves on a real GPU, at N and K that nobody named:
pytest -m gpu tests/test_gpu_universal.py --archive universal.aot."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from aot.tune import measure
from aot.tune.gemm.operands import OperandSet, Weights, gemm_options, put_zeros
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.gemm.signature import Signature
from runtime.gemm.universal import PREDICTED, Universal, UniversalForm
from runtime.tables.dispatch import serves

from .gpu_library import library_of_module as library_of_module

pytestmark = pytest.mark.gpu

CASES = 12  # of each form
MOST_FLOPS = 2**37


@pytest.fixture(scope="module")
def forms(tuned_archive: Path) -> list[UniversalForm]:
    with Archive.open(tuned_archive) as archive:
        if "universal" not in archive.tables:
            pytest.skip("the archive has no universal table")
        table = Universal.from_json(archive.table("universal"), archive.functions.targets_by_name())
    capability = Driver().compute_capability
    return [form for _, form in table.forms if serves(form.target, capability)]


def drawn(form: UniversalForm, seed: int) -> Iterator[tuple[Signature, int]]:
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


def test_predicted_functions_compute_what_was_asked_for(library: Library, forms: list[UniversalForm]) -> None:
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


LEAST_FOR_SEVERAL = 512  # N and K for which the fastest function depends on M


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether they are equal, negative zeros and what is no number too."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_a_row_has_the_same_bits_whatever_the_batch(tuned_archive: Path, forms: list[UniversalForm]) -> None:
    """And several functions take turns where there are several that give equal bits."""
    with runtime.load(tuned_archive, batch_invariant=True) as library:
        for place, form in enumerate(forms):
            every = (signature for seed in itertools.count(100 + place) for signature, _ in drawn(form, seed))
            signature = next(s for s in every if min(s.n, s.k) >= LEAST_FOR_SEVERAL)
            if signature.batch > 1 or signature.scaling == "tensor":
                continue
            most = 700
            (o, *_) = Weights(signature, most, 0, seed=place).operands(most)
            put_zeros(o)
            given: dict[str, Any] = dict(gemm_options(signature, o)) | {"dtype": o.d.dtype}
            whole, entry, used = library.gemm(o.a, o.b, **given), library.entry(signature), set[str]()
            for rows in (1, 2, 17, 64, 130, 333, 512):
                by_row = {name: x[:rows] for name, x in given.items() if name in ("scale_a", "residual")}
                part = library.gemm(o.a[:rows], o.b, **given | by_row)
                used.add(entry.best(rows))
                assert same_bits(part, whole[:rows]), f"{signature.key()}: {rows} rows by {entry.best(rows)}"
            assert len(used) > 1 or len(entry.names) < 4, f"{signature.key()}: only {used} of {entry.names}"


def test_functions_of_one_number_give_equal_bits(tuned_archive: Path, forms: list[UniversalForm]) -> None:
    """At N and K that are ragged against every tile, whichever of them is the fastest."""
    stream = torch.cuda.current_stream()
    with runtime.load(tuned_archive) as library:
        for place, form in enumerate(forms):
            for signature, m in itertools.islice(drawn(form, 200 + place), 4):
                o = Weights(signature, m, 0, seed=m).operands(m)[0]
                put_zeros(o)
                first: dict[int, torch.Tensor] = {}
                for f in form.functions:
                    if f.equal_bits == 0 or signature.n % f.n_multiple or signature.k % f.k_multiple:
                        continue
                    o.d.view(torch.uint8).fill_(0xFF)
                    library.functions[f.name](*o.arguments(), stream=stream)
                    expected = first.setdefault(f.equal_bits, o.d.clone())
                    assert same_bits(o.d, expected), f"{signature.key()} M={m}: {f.name}"
        torch.cuda.synchronize()


@pytest.mark.usefixtures("forms")
def test_a_new_m_is_served_in_the_time_of_few_calls_of_torch(library: Library) -> None:
    """Medians of this thread's time on the host: of M values whose function was called for the same N and K before, and
    of `torch.mm` called again for the same shape. Hosts differ by a factor of two and more, from minute to minute."""
    b = torch.randn(3136, 2112, device="cuda", dtype=torch.bfloat16)
    a, d = (torch.randn(4096, n, device="cuda", dtype=torch.bfloat16) for n in (2112, 3136))
    transposed = b.t()
    library.preload()
    entry = library.entry(Signature("bf16", "bf16", "bf16", "f32", "none", 3136, 2112))
    seen, ours, of_torch = set[str](), list[float](), list[float]()
    for m in range(2, 4096, 37):
        rows, out = a[:m], d[:m]
        torch.mm(rows, transposed, out=out)
        torch.cuda.synchronize()
        start = time.thread_time()
        library.gemm(rows, b, out=out)
        between = time.thread_time()
        torch.mm(rows, transposed, out=out)
        end, name = time.thread_time(), entry.best(m)
        if name in seen:
            ours.append(between - start)
            of_torch.append(end - between)
        seen.add(name)
    us, torch_us = (statistics.median(samples) * 1e6 for samples in (ours, of_torch))
    print(f"{len(ours)} new M: {us:.1f} us, torch.mm again: {torch_us:.1f} us")
    assert us < 4 * torch_us
