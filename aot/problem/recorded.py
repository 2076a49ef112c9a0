"""From the files of workers of vLLM or SGLang, as the plugins record them, to the manifest of the GEMMs that they ran.

Each file has one worker's layers, by name with the keys of their signatures, and how many steps had which M. Ranks that
run the same are one; what only some have, as the stages of a pipeline do, is in the manifest once. Knows no server;
`runtime/plugin/record.py` writes the files.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from runtime.gemm.signature import Signature
from runtime.program.operation import operation
from runtime.rmsnorm import Signature as Norm

from ..search import traffic
from ..search.targets import TARGETS
from ..search.unserved import variants, why_none
from .manifest import MAX_COUNT, MAX_TOKENS, Gemm, Manifest, ManifestError, Use, read_text, signature_problem
from .model_config import model_name
from .norms import of_norms
from .unquantised import no_layer, of_unquantised, with_few_in_blocks
from .ways import NO_PART, all_ways

SCHEMA = 1  # of the files
MAX_BYTES = 8 << 20  # of one file: a thousand layers are 150 KB
MOST_TOKENS, MOST_LOGITS_TOKENS = 12, 6  # M to tune for, of layers and of the head

_AGAIN = "record again, in a folder of its own"
_SAME = ("model", "tensor_parallel", "pipeline_parallel", "capability")
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


class Worker(NamedTuple):
    """One file: whose it is, its layers and heads by name, the layers that have no signature by the reason, steps by M,
    of layers and of the head, and the norms between layers by name."""

    path: str
    written_by: str
    model: str
    tensor_parallel: int
    pipeline_parallel: int
    capability: tuple[int, int] | None
    engine: int
    rank: int
    layers: dict[str, Signature]
    heads: dict[str, Signature]
    left: dict[str, int]
    tokens: dict[int, int]
    logits: dict[int, int]
    norms: dict[str, Norm]


def manifest_from_workers(
    folder: str | os.PathLike[str],
    *,
    targets: Sequence[str] | None = None,
    model: str | None = None,
    in_graph: bool = False,
    quantise: bool | None = None,
    on_warning: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """The GEMMs that the workers of `folder` ran, with `traffic`.

    `targets` are by default those of the workers' GPUs, `model` the name of theirs. `in_graph` adds the other ways to
    compute the layers that `aot tune --in-graph` chooses for, and with an activation where a layer was called so;
    `quantise` adds what quantises the tokens of layers in e4m3, or, if it is None, few tokens of those with scales of
    blocks. `on_warning` is told what a reader of the manifest may not expect.

    Raises:
        ManifestError: there are no files, one is damaged or of another schema, they are not of one run, or nothing ran;
            or nothing that `aot tune --in-graph` chooses for, or whose tokens would be quantised.
    """
    workers = _workers(os.fspath(folder))
    first = workers[0]
    tokens, logits = _merged(workers, "tokens"), _merged(workers, "logits")
    if not tokens:
        raise ManifestError(
            f"{folder}: no worker counted a step; send requests to the server, and wait for ten seconds"
        )
    found = _targets(first, targets)
    layers = _distinct(workers, "layers")
    depth = _depth(layers)
    gemms = [*_gemms(layers, depth, tokens, MOST_TOKENS, found)]
    if logits:
        heads = _distinct(workers, "heads")
        gemms += _gemms([("lm_head", s) for _, s in heads], 0, logits, MOST_LOGITS_TOKENS, found)
    if not gemms:
        raise ManifestError(f"{folder}: the model has no layer that a manifest can hold; {_lines(workers, 3)}")
    _warn(os.fspath(folder), workers, gemms, found, on_warning)
    of_file = next(iter(gemms))
    named = [dataclasses.replace(gemm, name=name) for gemm, name in zip(gemms, _named(gemms), strict=True)]
    if in_graph:
        named = [*all_ways(named, gated=any(gemm.signature.parts.gated for gemm in named))]
        if len(named) == len(gemms):
            raise ManifestError(f"{folder}: {NO_PART}")
    uses: list[Use] = []
    if quantise:
        every, uses = of_unquantised(named, found)
        if len(every) == len(named) and not uses:
            raise ManifestError(f"{folder}: {no_layer(found)}")
        named = every
    elif quantise is None:
        named = with_few_in_blocks(named, found)
    if in_graph or quantise:
        uses += _norms(workers, gemms, of_file.tokens, found, uses)
    return Manifest(
        model or model_name(first.model, first.tensor_parallel, "bf16"),
        f"{first.model} at tp {first.tensor_parallel}, {sum(tokens.values())} steps, recorded by {len(workers)} "
        f"worker{'s'[: len(workers) > 1]} of {first.written_by}",
        of_file.tokens,
        tuple(found),
        tuple(named),
        depth,
        tuple(uses),
        traffic=of_file.traffic,
    )


# --- the files ---


def _workers(folder: str) -> list[Worker]:
    """The workers, in the order of engines and ranks."""
    if not os.path.isdir(folder):
        raise ManifestError(f"{folder}: is no folder; name the one that `record` of the server's setting names")
    paths = sorted(Path(folder).glob("worker-*.json"))
    if not paths:
        raise ManifestError(
            f'{folder}: holds no worker-*.json; serve with the setting {{"cute_aot": {{"record": "FOLDER"}}}}, which '
            "docs/vllm.md and docs/sglang.md have in a command, and name that folder"
        )
    workers = sorted(map(_worker, map(str, paths)), key=lambda worker: (worker.engine, worker.rank))
    for worker in workers[1:]:
        for field in _SAME:
            ours, first = getattr(worker, field), getattr(workers[0], field)
            if ours != first:
                raise ManifestError(
                    f"{worker.path}: {field} is {_short(ours)}, and {_short(first)} in {workers[0].path}: these are of "
                    f"different runs; {_AGAIN}, or remove one of them"
                )
    return workers


def _worker(path: str) -> Worker:
    text = read_text(path, "a worker's record", MAX_BYTES)
    try:
        obj = json.loads(text)
    except json.JSONDecodeError as error:
        raise ManifestError(f"{path}:{error.lineno}: not JSON: {error.msg}; {_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: not the JSON of a worker's record: {error}; {_AGAIN}") from None
    if not isinstance(obj, dict) or "schema" not in obj:
        raise ManifestError(f"{path}: is no worker's record; remove it from the folder")
    if obj["schema"] != SCHEMA:
        raise ManifestError(
            f"{path}: is of schema {_short(obj['schema'])}, and this version reads {SCHEMA}; use the cute-aot that "
            f"recorded it ({_short(obj.get('written_by'))}), or {_AGAIN}"
        )
    return _Reader(path, obj).worker()


class _Reader:
    """The fields of one file, each checked."""

    def __init__(self, path: str, obj: Mapping[str, Any]) -> None:
        self._path, self._obj = path, obj

    def worker(self) -> Worker:
        """All of them."""
        capability = self._obj.get("capability")
        if capability is not None:
            is_pair = isinstance(capability, list) and len(capability) == 2 and all(type(x) is int for x in capability)
            capability = tuple(capability) if is_pair else self._fail("capability", "two numbers")
        return Worker(
            self._path,
            self._text("written_by"),
            self._text("model"),
            self._number("tensor_parallel", 1),
            self._number("pipeline_parallel", 1),
            capability,
            self._number("engine", 0),
            self._number("rank", 0),
            self._signatures("layers"),
            self._signatures("heads"),
            self._counts("left", str),
            self._counts("tokens", self._m),
            self._counts("logits", self._m),
            self._norms(),
        )

    def _fail(self, field: str, wanted: str) -> NoReturn:
        found = _short(self._obj.get(field))
        raise ManifestError(f"{self._path}: {field!r} must be {wanted}, found {found}; {_AGAIN}")

    def _text(self, field: str) -> str:
        found = self._obj.get(field)
        if not isinstance(found, str) or not found.strip() or len(found) > 500 or not found.isprintable():
            self._fail(field, "a line of text")
        return found.strip()

    def _number(self, field: str, least: int) -> int:
        found = self._obj.get(field)
        if type(found) is not int or not least <= found <= MAX_TOKENS:
            self._fail(field, f"an integer from {least}")
        return found

    def _m(self, word: str) -> int:
        if not re.fullmatch("[1-9][0-9]{0,6}", word) or int(word) > MAX_TOKENS:
            raise ValueError
        return int(word)

    def _counts(self, field: str, key: Callable[[str], Any]) -> dict[Any, int]:
        found = self._obj.get(field)
        try:
            if not isinstance(found, dict) or not all(type(n) is int and 0 < n < 1 << 53 for n in found.values()):
                raise ValueError
            return {key(word): count for word, count in found.items()}
        except ValueError:
            self._fail(field, "an object of counts")

    def _norms(self) -> dict[str, Norm]:
        """Those of a file that has any; earlier ones have not."""
        found, read = self._obj.get("norms", []), dict[str, Norm]()
        for item in found if isinstance(found, list) else self._fail("norms", "a list"):
            name = item.get("name") if isinstance(item, dict) else None
            key = item.get("signature") if isinstance(item, dict) else None
            signature = operation(Norm.operation).of_key(key) if isinstance(key, str) else None
            if not isinstance(name, str) or signature is None:
                raise ManifestError(f"{self._path}: 'norms' has {_short(item)}, no norm's signature; {_AGAIN}")
            read[name] = signature
        return read

    def _signatures(self, field: str) -> dict[str, Signature]:
        found, read = self._obj.get(field), dict[str, Signature]()
        for item in found if isinstance(found, list) else self._fail(field, "a list"):
            name = item.get("name") if isinstance(item, dict) else None
            key = item.get("signature") if isinstance(item, dict) else None
            signature = Signature.of_key(key) if isinstance(key, str) else None
            if not isinstance(name, str) or signature is None:
                raise ManifestError(f"{self._path}: {field!r} has {_short(item)}, no layer's signature; {_AGAIN}")
            read[name] = signature
        return read


# --- what they have together ---


def _merged(workers: Iterable[Worker], field: str) -> dict[int, int]:
    """Steps by M: those of one engine's ranks are the same steps, and engines run each their own."""
    engines: dict[int, Counter[int]] = {}
    for worker in workers:
        counts: Counter[int] = Counter(getattr(worker, field))
        engines[worker.engine] = engines.get(worker.engine, Counter()) | counts
    return dict(sum(engines.values(), Counter[int]()))


def _distinct(workers: Iterable[Worker], field: str) -> list[tuple[str, Any]]:
    """The layers, or norms, that some rank has, each with every signature that a rank has for it, in order."""
    return list(dict.fromkeys(item for worker in workers for item in getattr(worker, field).items()))


def _norms(
    workers: Sequence[Worker],
    gemms: Iterable[Gemm],
    tokens: Sequence[int],
    targets: Sequence[str],
    quantised: Iterable[Use],
) -> list[Use]:
    """The norms between layers, which servers' plugins take where one rank has the whole model: of an extent that GEMMs
    give and take. Others are within attention. `quantised` is as of `of_norms`."""
    given, taken = {gemm.signature.n for gemm in gemms}, {gemm.signature.k for gemm in gemms}
    found = dict.fromkeys(norm for _, norm in _distinct(workers, "norms") if norm.n in given & taken)
    if workers[0].tensor_parallel > 1 or len({norm.x for norm in found}) > 1:
        return []
    return of_norms(next((norm.x for norm in found), ""), (norm.n for norm in found), tokens, targets, quantised)


def _depth(layers: Iterable[tuple[str, Signature]]) -> int:
    """How many layers the model has: how often the most common name repeats with other numbers."""
    kinds = Counter(_NUMBER.sub("*", name) for name in {name for name, _ in layers} if _NUMBER.search(name))
    return min(max(kinds.values(), default=1), MAX_COUNT)


def _gemms(
    layers: Iterable[tuple[str, Signature]], depth: int, counts: Mapping[int, int], most: int, targets: Sequence[str]
) -> list[Gemm]:
    """One for each last part of names and signature, in the order of the model, which is about that of the calls."""
    kinds = Counter[tuple[str, Signature]]()
    for name, signature in layers:
        last = re.sub(r"[^A-Za-z0-9_-]", "_", _NUMBER.sub("", name).rstrip(".").rsplit(".", 1)[-1])[:40] or "layer"
        kinds[last, _buildable(signature, targets)] += 1
    tokens, seen = traffic.tokens(counts, most), tuple(traffic.gathered(counts).items())
    found = []
    for (name, signature), count in kinds.items():
        if signature_problem(signature) is None:
            each = count % depth == 0 if depth else False
            count = min(count // depth if each else count, MAX_COUNT)
            found.append(Gemm(name, signature, count, tokens, "layer" if each else "model", traffic=seen))
    return found


def _buildable(signature: Signature, targets: Sequence[str]) -> Signature:
    """With its activation only if there are kernels with one for all targets: else servers call the product alone."""
    if signature.parts.gated and not all(variants(target, signature) for target in targets):
        return dataclasses.replace(signature, epilogue="none")
    return signature


def _named(gemms: Sequence[Gemm]) -> list[str]:
    """Their names, made different where layers of one name have different signatures."""
    names = list[str]()
    for gemm in gemms:
        s = gemm.signature
        first = next((other.signature for other in gemms if other.name == gemm.name), s)
        plain = "plain" if s.epilogue == "none" else s.epilogue.replace("+", "_")
        more = [f"_{plain}"] if (s.n, s.k) == (first.n, first.k) else [f"_n{s.n}_k{s.k}"]
        more += [f"_n{s.n}_k{s.k}", *(f"_{number}" for number in range(2, len(gemms) + 2))]
        names.append(next(name for ending in ("", *more) if (name := (gemm.name + ending)[:64]) not in names))
    return names


def _targets(worker: Worker, named: Sequence[str] | None) -> list[str]:
    found = list(dict.fromkeys(named or ())) or [t.name for t in TARGETS.values() if worker.capability in t.serves]
    if not found:
        gpu = "no GPU" if worker.capability is None else f"compute capability {'.'.join(map(str, worker.capability))}"
        raise ManifestError(
            f"{worker.path}: ran on {gpu}, which no target serves; give --target, of {', '.join(TARGETS)}"
        )
    return found


def _warn(
    folder: str,
    workers: Sequence[Worker],
    gemms: Sequence[Gemm],
    targets: Sequence[str],
    on_warning: Callable[[str], None],
) -> None:
    """Say what is left out, and who wrote nothing."""
    ranks = workers[0].tensor_parallel * workers[0].pipeline_parallel
    engines = {worker.engine for worker in workers}
    missing = {(e, r) for e in engines for r in range(ranks)} - {(worker.engine, worker.rank) for worker in workers}
    if missing:
        listed = ", ".join(f"{rank} of engine {engine}" for engine, rank in sorted(missing)[:8])
        on_warning(f"{folder}: no file of rank {listed}; copy those of other hosts into the folder")
    if lines := _lines(workers, 3):
        on_warning(f"{folder}: {lines}")
    recorded = {s for worker in workers for s in (*worker.layers.values(), *worker.heads.values())}
    for signature in sorted(recorded, key=lambda s: s.key()):
        if problem := signature_problem(signature):
            on_warning(f"{folder}: {signature.key()} is left out: {problem[0]} {problem[1]}")
    for target in targets:
        unserved = [gemm for gemm in gemms if not variants(target, gemm.signature)]
        if unserved:
            names = ", ".join(dict.fromkeys(gemm.name for gemm in unserved))
            reason = why_none(target, unserved[0].signature)
            on_warning(f"{folder}: no kernel computes {names} on {target}: {reason}; a build leaves them out there")


def _lines(workers: Sequence[Worker], most: int) -> str:
    left: Counter[str] = Counter()
    for worker in workers:
        left = left | Counter(worker.left)
    return "left out: " + "; ".join(f"{n} x {reason}" for reason, n in left.most_common(most)) if left else ""


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 80 else f"{text[:77]}..."
