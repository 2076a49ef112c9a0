"""Configs of published models give the layers that transformers' own modules have, at tp 1, and at tp 2 as its plans
split them.

`tests/data/model_layers.json` has what those modules are made of, and of which transformers; where that is installed
they are built anew.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from aot.problem.manifest import Gemm, Manifest, ManifestError, dump, loads
from aot.problem.models.read_model import padded
from aot.selection import select

from .model_configs import manifest
from .transformers_layers import PUBLISHED, RECORDED, VERSION, build, cut, rows

# Layers that transformers splits otherwise than servers do: it gathers what they make, and lets all ranks go on alike.
GATHERED = {"out_proj"}

WITHOUT_PLAN = {"qwen3-vl-8b"}


def given(of: Manifest) -> dict[str, list[Any]]:
    """The rows of `tests.transformers_layers` that a manifest has, by name; how many modules have experts it does not
    say. A bias that only rank 0 adds is one of the layer."""
    found: dict[str, list[Any]] = {}
    for item in of.items():
        s: Any = item.signature
        if isinstance(item, Gemm):
            name = item.name.removesuffix("_rank0")
            found[name] = [of.calls(item), 0, s.n, s.k, s.epilogue.startswith("bias")]
        elif s.operation == "grouped_gemm":
            found[item.name] = [None, s.groups, s.n, s.k, s.epilogue.startswith("bias")]
    return found


def recorded(name: str, tp: int) -> dict[str, list[Any]]:
    """What transformers has of a model, in the same way."""
    return as_servers(json.loads(RECORDED.read_text())[name][str(tp)], tp)


def as_servers(found: dict[str, list[Any]], tp: int = 1) -> dict[str, list[Any]]:
    """Rows without what a manifest does not say, and with the vocabulary padded."""
    for layer, row in found.items():
        if layer.startswith("experts_"):
            row[0] = None
    if "lm_head" in found:
        found["lm_head"][2] = padded(found["lm_head"][2] * tp) // tp
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_of_a_manifest_are_those_of_transformers_module(name: str) -> None:
    wanted = recorded(name, 1)
    left_out = set(PUBLISHED[name].get("left_out", ()))
    assert left_out <= set(wanted)
    assert given(manifest(cut(name))) == {layer: row for layer, row in wanted.items() if layer not in left_out}


@pytest.mark.parametrize("name", PUBLISHED)
def test_ranks_have_what_the_models_own_plan_gives_them(name: str) -> None:
    wanted, found = recorded(name, 2), given(manifest(cut(name), 2))
    of_plan = {layer: row for layer, row in wanted.items() if layer in found and layer not in GATHERED}
    assert {layer: found[layer] for layer in of_plan} == of_plan
    assert of_plan or name in WITHOUT_PLAN


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_rank_of_expert_parallelism_has_its_share_of_experts_each_whole(name: str, tp: int) -> None:
    whole = experts(manifest(cut(name)))
    if not whole:
        pytest.skip("it has no experts")
    wanted = {item: (groups // 2, n, k) for item, (groups, n, k) in whole.items()}
    assert experts(manifest(cut(name), tp, ep=2)) == wanted


def experts(of: Manifest) -> dict[str, tuple[int, int, int]]:
    """The groups, N and K of a manifest's grouped GEMMs, by name."""
    found: dict[str, Any] = {use.name: use.signature for use in of.uses if use.signature.operation == "grouped_gemm"}
    return {name: (s.groups, s.n, s.k) for name, s in found.items()}


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_build_has_candidates_for_every_layer_of_a_published_model(name: str, tp: int) -> None:
    written = loads(dump(manifest(PUBLISHED[name]["config"], tp, tokens=(1, 64))))
    planned = {problem.signature: problem for problem in select([written]).problems}
    for problem in written.problems():
        assert {m for m, candidates in planned[problem.signature].by_tokens if candidates} >= set(problem.tokens)


@pytest.mark.parametrize("name", PUBLISHED)
def test_record_is_what_transformers_builds(name: str) -> None:
    need_transformers()
    model = build(cut(name))
    found = json.loads(json.dumps({str(tp): rows(model, tp) for tp in (1, 2)}))
    assert found == json.loads(RECORDED.read_text())[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_config_leaves_out_is_as_transformers_takes_it_or_refused(name: str) -> None:
    """And each bias is that of the same layers."""
    need_transformers()
    given_fields = cut(name).get("text_config", cut(name))
    numbers = [field for field, value in given_fields.items() if type(value) is int and field != "num_hidden_layers"]
    flags = [field for field, value in given_fields.items() if isinstance(value, bool)]
    for field, value in [*((number, None) for number in numbers), *((flag, not given_fields[flag]) for flag in flags)]:
        config = cut(name)
        part = config.get("text_config", config)
        part.pop(field)
        part |= {} if value is None else {field: value}
        try:
            found = given(manifest(config))
        except ManifestError:
            continue
        wanted = as_servers({layer: list(row) for layer, row in rows(build(config)).items()})
        assert found == {layer: row for layer, row in wanted.items() if layer in found}, field
        assert set(wanted) - set(found) <= set(PUBLISHED[name].get("left_out", ())), field


def need_transformers() -> None:
    """Skip where the version that made the record is not installed: others make and split modules otherwise."""
    pytest.importorskip("torch")
    wanted = json.loads(RECORDED.read_text())[VERSION]
    found = pytest.importorskip("transformers", reason=f"transformers {wanted} is not installed").__version__
    if found != wanted:
        pytest.skip(f"the record is of transformers {wanted}, {found} is installed")
