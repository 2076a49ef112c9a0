"""Cases that nobody tuned for: linear layers of many models, each at an M that is drawn at random.

Needs neither torch nor a GPU, so that what a run measures can be listed anywhere. The draw depends on its seed and the
layers alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import report
import yaml

from aot.problem import manifest as manifests
from aot.problem.manifest import ManifestError, signature_problem
from aot.problem.model_config import DTYPES, MOST_LOGITS, Wanted, manifest_from_config
from runtime.gemm.signature import MAJORS, Signature
from runtime.numbers.dtypes import DTYPES as ELEMENTS
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.scaling import SCALINGS

ROOT = report.ROOT
MODELS = ROOT / "benchmarks" / "models.yaml"
MOST_TOKENS = 8192
REGIMES = (("M <= 64", 1, 64), ("M = 65..511", 65, 511), ("M >= 512", 512, MOST_TOKENS))
# What one set of operands may take. The float32 reference of such a case takes several times as much.
MOST_BYTES = 4 << 30
FORMS = ("merged", "separate", "fused")

_TARGET = "sm_90a"
_MOST_MISSES = 10_000  # draws in a row that give nothing new, after which there is nothing left
_MODEL_FIELDS = ("model", "source", "tp", "forms", "dtype", "scaling", "config", "layers")
_LAYER_FIELDS = ("name", "n", "k", "epilogue", "b_major", "dtype", "scaling")


@dataclass(frozen=True)
class Layer:
    """A signature, the layers of models that have it, and the most rows that any of them sees."""

    signature: Signature
    names: tuple[str, ...]
    most_tokens: int

    @property
    def label(self) -> str:
        """The names in one line."""
        return " ".join(self.names)

    def fits(self, m: int) -> bool:
        """Whether the layer sees `m` rows, and one set of operands is not too large."""
        return m <= self.most_tokens and self.signature.bytes(m) <= MOST_BYTES


@dataclass(frozen=True)
class Case:
    """One layer at one M."""

    layer: Layer
    m: int

    @property
    def key(self) -> tuple[str, int]:
        """What result files tell cases apart by."""
        return self.layer.signature.key(), self.m


def group(signature: Signature) -> str:
    """What figures of a signature may be averaged with: how A is stored and scaled, and whether anything is fused."""
    if ELEMENTS[signature.a].narrow:
        return f"{signature.a} {signature.scaling}"
    return "16 bits" if signature.epilogue == "none" else "16 bits, fused"


# --- layers ---


def default_paths() -> list[Path]:
    """The files with layers of this checkout."""
    return [*sorted((ROOT / "manifests").glob("*.yaml")), MODELS]


def load_layers(paths: Sequence[Path]) -> list[Layer]:
    """The distinct layers of manifests and of files such as benchmarks/models.yaml, ordered by the signature's key.

    Raises:
        ManifestError: a file cannot be read, or a layer is none that an archive may have; the message names both.
    """
    names: dict[Signature, dict[str, None]] = {}
    most: dict[Signature, int] = {}
    for path in paths:
        for name, signature, tokens in _layers_of(path):
            names.setdefault(signature, {})[name] = None
            most[signature] = max(most.get(signature, 0), tokens)
    ordered = sorted(names, key=lambda signature: signature.key())
    return [Layer(s, tuple(names[s]), min(most[s], MOST_TOKENS)) for s in ordered]


def _layers_of(path: Path) -> Iterator[tuple[str, Signature, int]]:
    try:
        document = yaml.safe_load(manifests.read_text(str(path), "a list of models"))
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: not YAML: {error}; check the file") from None
    if not isinstance(document, dict) or "models" not in document:
        for gemm in manifests.load(path).gemms:
            yield f"{path.stem}:{gemm.name}", gemm.signature, max(gemm.tokens)
        return
    seen = set()
    for number, model in enumerate(document["models"]):
        _known(model, _MODEL_FIELDS, f"{path}: models[{number}]")
        where = f"{path}: model {model.get('model')!r}"
        if model.get("model") in seen or not model.get("source"):
            raise ManifestError(f"{where}: needs a name of its own and a source")
        seen.add(model["model"])
        found: dict[str, Signature] = {}
        for name, signature in _of_model(model, where):
            if found.setdefault(name, signature) != signature:
                raise ManifestError(f"{where}: two layers are called {name!r}; rename one")
            yield f"{model['model']}:{name}", signature, MOST_LOGITS if name == "lm_head" else MOST_TOKENS


def _of_model(model: Mapping[str, Any], where: str) -> Iterator[tuple[str, Signature]]:
    if ("config" in model) == ("layers" in model):
        raise ManifestError(f"{where}: needs a config, or layers where `aot manifest from-config` does not know it")
    if "layers" in model:
        for layer in model["layers"]:
            _known(layer, _LAYER_FIELDS, where)
            yield str(layer.get("name")), _signature({**_kind(model), **layer}, where)
        return
    forms = model.get("forms", ())
    if not forms or not set(forms) <= set(FORMS):
        raise ManifestError(f"{where}: forms must be some of {', '.join(FORMS)}, found {forms}")
    for form in forms:
        kind = _kind(model)
        types = kind["dtype"], kind["scaling"]
        wanted = Wanted(
            model.get("tp", 1), [1, MOST_TOKENS], [_TARGET], *types, fuse=form == "fused", experts=False, quantise=False
        )
        found = manifest_from_config(model["config"], wanted, source=model["source"])
        gemms = [(gemm.name, gemm.signature) for gemm in found.gemms]
        yield from _separate(gemms) if form == "separate" else _named(gemms, form)


def _named(gemms: Sequence[tuple[str, Signature]], form: str) -> Iterator[tuple[str, Signature]]:
    """Fused layers are named after what is fused."""
    for name, signature in gemms:
        fused = form == "fused" and signature.epilogue not in ("none", "bias")
        yield (f"{name}-{signature.epilogue}" if fused else name), signature


def _separate(gemms: Sequence[tuple[str, Signature]]) -> Iterator[tuple[str, Signature]]:
    """What is merged taken apart: q and one of k and v, which have one shape, and one of gate and up."""
    inputs_of_o = next(signature.k for name, signature in gemms if name == "o")
    for name, signature in gemms:
        if name == "qkv":
            yield "q", replace(signature, n=inputs_of_o)
            yield "kv", replace(signature, n=(signature.n - inputs_of_o) // 2)
        elif name == "gate_up":
            yield "gate", replace(signature, n=signature.n // 2)
        else:
            yield name, signature


def _kind(model: Mapping[str, Any]) -> dict[str, str]:
    return {"dtype": model.get("dtype", "bf16"), "scaling": model.get("scaling", "none")}


def _signature(layer: Mapping[str, Any], where: str) -> Signature:
    """The signature of a layer that is written out."""
    where = f"{where}: layer {layer.get('name')!r}"
    words = {"epilogue": "none", "b_major": "k", **layer}
    for field, known in (("dtype", DTYPES), ("scaling", SCALINGS), ("epilogue", EPILOGUES), ("b_major", MAJORS)):
        if words[field] not in known:
            _fail(where, f"field {field!r}: unknown {words[field]!r}")
    for field in ("n", "k"):
        if type(layer.get(field)) is not int:
            _fail(where, f"field {field!r} must be an integer, found {layer.get(field)!r}")
    signature = Signature(
        *DTYPES[words["dtype"]],
        "f32",
        words["epilogue"],
        words["n"],
        words["k"],
        scaling=words["scaling"],
        b_major=words["b_major"],
    )
    problem = signature_problem(signature)
    if problem:
        _fail(where, f"field {problem[0]!r}: {problem[1]}")
    return signature


def _known(found: Any, fields: Sequence[str], where: str) -> None:
    if not isinstance(found, dict):
        _fail(where, f"must be a mapping, found {found!r:.60}")
    unknown = [field for field in found if field not in fields]
    if unknown:
        _fail(where, f"unknown field {unknown[0]!r}; known: {', '.join(fields)}")


def _fail(where: str, complaint: str) -> NoReturn:
    raise ManifestError(f"{where}: {complaint}")


# --- draws ---


def seed_of_commit() -> str:
    """The hash of the current commit, so that nobody chooses what is measured.

    Raises:
        ManifestError: this is no checkout, and no file COMMIT names what was copied.
    """
    found = report.commit().removesuffix("+changes")
    if found == "unknown":
        raise ManifestError("no commit to take the seed from: this is no git checkout; give --seed")
    return found


def cases(seed: str, count: int, layers: Sequence[Layer], least_m: int = 1) -> list[Case]:
    """The first `count` cases of a seed, all different: M first, log-uniform, then a layer that sees such an M.

    Cases of fewer rows than `least_m` are drawn and left out.

    More cases of one seed begin with the fewer. There are fewer than `count` where the layers have no more.
    """
    draw = Draw(seed)
    found: dict[tuple[str, int], Case] = {}
    misses = 0
    while len(found) < count and misses < _MOST_MISSES:
        m = draw.tokens()
        case = draw.case([layer for layer in layers if layer.fits(m)], m)
        misses += 1
        if case is not None and m >= least_m and case.key not in found:
            found[case.key] = case
            misses = 0
    return list(found.values())


def few_layers(seed: str, count: int, tokens: int, layers: Sequence[Layer]) -> list[Case]:
    """Of `count` layers that are drawn, each that sees any M, `tokens` values of M each: to look closely at a few."""
    draw = Draw(f"{seed} few layers")
    left = [layer for layer in layers if layer.fits(MOST_TOKENS)]
    found = []
    for _ in range(min(count, len(left))):
        layer = left.pop(draw.below(len(left)))
        ms: dict[int, None] = {}
        while len(ms) < min(tokens, MOST_TOKENS):
            ms[draw.tokens()] = None
        found += [Case(layer, m) for m in ms]
    return found


class Draw:
    """Random numbers that are the same wherever Python runs.

    Python promises that of `random.Random(seed).random()` for an integer seed, and of none of the methods that are made
    of it.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(int.from_bytes(hashlib.sha256(seed.encode()).digest(), "big"))

    def tokens(self) -> int:
        """M from 1 to `MOST_TOKENS`, such that its logarithm is uniform, rounded down."""
        return min(int((MOST_TOKENS + 1) ** self._random.random()), MOST_TOKENS)

    def below(self, count: int) -> int:
        """An integer from 0 to `count` - 1."""
        return int(self._random.random() * count)

    def case(self, layers: Sequence[Layer], m: int) -> Case | None:
        """One of `layers` at `m`; None where there is none."""
        return Case(layers[self.below(len(layers))], m) if layers else None
