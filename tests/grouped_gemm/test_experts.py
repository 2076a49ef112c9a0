"""Experts in manifests: tokens of the model make M, experts of a rank the groups; mistakes are told with their line."""

from __future__ import annotations

import pytest

from aot.problem import manifest
from aot.search.shorthand import Experts
from aot.selection import select
from runtime.grouped_gemm import Signature

MANIFEST = """format: 1
model: experts
source: made up
tokens: [1, 4, 64, 1024]
targets: [sm_90a]
operations:
  grouped_gemm:
    - {name: all, a: bf16, b: bf16, d: bf16, n: 512, k: 256, experts: {count: 128, top_k: 8}}
    - {name: some, a: bf16, b: bf16, d: bf16, n: 64, k: 64, experts: {count: 128, top_k: 8, local: 4}, tokens: [1, 100]}
"""


def test_experts_make_groups_and_the_models_tokens_make_m() -> None:
    every, some = manifest.loads(MANIFEST).uses
    assert every.signature == Signature("bf16", "bf16", "bf16", 128, 512, 256)
    assert every.tokens == (8, 32, 512, 8192)
    assert some.signature.groups == 4
    assert some.tokens == (1, 25), "100 tokens have 800 rows, of which a 32nd is here"


def test_tokens_whose_rows_are_equally_many_are_one_m() -> None:
    (_, some) = manifest.loads(MANIFEST.replace("tokens: [1, 100]", "tokens: [1, 2, 3, 4, 5]")).uses
    assert some.tokens == (1, 2)


def test_rows_are_rounded_up_and_at_least_one() -> None:
    values = {"count": 256, "top_k": 8, "local": 8}
    assert [Experts("groups").m(values, tokens, {}) for tokens in (1, 4, 5, 8192)] == [1, 1, 2, 2048]


def test_what_is_built_is_for_the_rows() -> None:
    wanted = [manifest.loads(MANIFEST)]
    assert {problem.signature.groups for problem in select(wanted, limit=1).problems} == {4, 128}
    (found,) = (p for p in select(wanted, limit=1).problems if p.signature.groups == 128)
    assert {m for m, _ in found.by_tokens} >= {8, 8192}


def test_experts_are_written_as_they_were_read() -> None:
    found = manifest.loads(MANIFEST)
    text = manifest.dump(found)
    assert manifest.loads(text) == found
    assert "k: 64, experts: {count: 128, top_k: 8, local: 4}, tokens: [1, 100]}" in text
    assert "groups" not in text


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("top_k: 8}", "top_k: 129}", r":8: field '.*\[0\].experts': top_k must be at most count, found 129 of 128"),
        ("local: 4", "local: 256", r":9: field '.*\[1\].experts': local must be at most count, found 256 of 128"),
        ("top_k: 8}", "topk: 8}", r":8: .*experts.topk': unknown; did you mean 'top_k'\? known: count, top_k, local"),
        (", top_k: 8}", "}", r":8: field '.*experts.top_k': missing; add `top_k:`"),
        ("top_k: 8}", "top_k: many}", r":8: field '.*experts.top_k': must be a positive integer"),
        ("experts: {count: 128, top_k: 8}", "experts: 128", r":8: .*must be a mapping with the fields count, top_k"),
        ("n: 512", "groups: 128, n: 512", r":8: .*groups': follows from 'experts'; remove one of them"),
        (", experts: {count: 128, top_k: 8}", "", r":8: .*groups': missing; add `groups:`"),
        ("[1, 4, 64, 1024]", "[1048576]", r":8: .*1048576 tokens make M 8388608, which is at most 1048576"),
    ],
)
def test_mistakes_in_experts_are_told_with_their_line(before: str, after: str, match: str) -> None:
    with pytest.raises(manifest.ManifestError, match=match):
        manifest.loads(MANIFEST.replace(before, after, 1))


def test_an_operation_without_experts_has_no_such_field() -> None:
    combine = MANIFEST.replace("grouped_gemm", "moe_combine").replace(
        "a: bf16, b: bf16, d: bf16", "rows: bf16, y: bf16"
    )
    with pytest.raises(manifest.ManifestError, match=r"moe_combine\[0\]\.experts': unknown"):
        manifest.loads(combine.replace("k: 256", "top_k: 8"))


def test_m_of_masked_rows_is_what_one_expert_has() -> None:
    short = {"count": 128, "top_k": 8, "local": 16}
    assert Experts("groups").m(short, 64, {"rows": "contiguous"}) == 64
    assert Experts("groups").m(short, 64, {"rows": "masked"}) == 4
