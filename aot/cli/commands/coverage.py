"""`aot coverage`: which layers of a model an archive serves, and which are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..arguments import ArchivePath, Json, OneGpu, OneTarget, count, examples, tokens_of
from ..inputs import InputRefused, open_archive
from ..layout import print_command, print_fitted, print_wrapped
from ..streams import print_json, printable, warn
from ..tables import cleaned, kind

if TYPE_CHECKING:
    from ...problem.manifest import Manifest
    from ...problem.model_config import Wanted

EXAMPLES = examples("aot coverage model.aot model.yaml", "aot coverage model.aot config.json --tp 8 --gpu H200")
_TOKENS = "1,16,64,256,1024,4096"
_OF_CONFIGS = ("tp", "ep", "experts", "tokens", "dtype", "scaling")  # options that a manifest leaves no room for


def command(
    context: typer.Context,
    archive: ArchivePath,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A manifest, or a Hugging Face config.json.")],
    target: OneTarget = None,
    gpu: OneGpu = None,
    tp: Annotated[int, typer.Option(min=1, help="Of a config: tensor-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Of a config: ranks that experts are spread over.")] = 1,
    experts: Annotated[
        bool, typer.Option("--experts/--no-experts", help="Of a config: whether a mixture's experts are asked for.")
    ] = True,
    tokens: Annotated[str, typer.Option(metavar="M,M,...", help="Of a config: the M values to ask for.")] = _TOKENS,
    dtype: Annotated[str | None, typer.Option(help="Of a config: bf16, f16 or e4m3. Default: the config's.")] = None,
    scaling: Annotated[str | None, typer.Option(help="Of a config: that of e4m3 layers.")] = None,
    as_json: Json = False,
) -> None:
    """Say which layers of a model are served. At which M tuned, ranked by estimates, or predicted by its forms,
    and which are missing. Exit status 1 where one is missing."""
    from ...inspect.coverage import coverage
    from ...inspect.serving import Serving
    from ...problem.model_config import Wanted

    _refuse_options_of_configs(context, model)
    wanted = Wanted(
        tp, tokens_of(tokens), [target] if target else None, dtype, scaling, ep=ep, experts=experts, quantise=False
    )
    of = _manifest(model, wanted)
    with open_archive(archive) as opened:
        serving = Serving(opened)
        places = serving.everywhere(target, gpu)  # none where functions are only called by name
        places = places or [place for each in opened.targets for place in serving.everywhere(each)]
        found = coverage(serving, of, places)
    missing = sum(bool(layer["m"]["missing"]) for place in found for layer in place["layers"])
    if as_json:
        print_json({"model": of.model, "archive": str(archive), "missing": missing, "places": found})
    else:
        for i, place in enumerate(found):
            if i:
                print()
            print_place(place, of, archive, Asked(model, wanted))
        if missing:
            if len(found) > 1:
                print()
            print_to_add(found, of, archive, Asked(model, wanted))
    if missing:
        raise typer.Exit(1)


def _manifest(path: Path, wanted: Wanted) -> Manifest:
    """What is asked for: a manifest as it is, or that of a config."""
    from ...problem.manifest import load
    from ...problem.model_config import manifest_from_config
    from ...problem.models.config import load_config

    if path.suffix != ".json":
        return load(path)
    config, source = load_config(path), printable(path.name)
    return manifest_from_config(
        config, wanted, source=source, named_after=printable(str(path.resolve())), on_warning=warn
    )


def _refuse_options_of_configs(context: typer.Context, model: Path) -> None:
    """A manifest says itself what its layers are and at which M they run: options that ask for others are refused."""
    given = [name for name in _OF_CONFIGS if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if model.suffix != ".json" and given:
        off = "no-" if given == ["experts"] and not context.params["experts"] else ""
        raise InputRefused(f"{model}: is no config.json, and --{off}{given[0]} is of configs; leave it out")


class Asked(NamedTuple):
    """What the layers are asked of: the file as it was named, and what a config was to be run with."""

    model: Path
    wanted: Wanted

    def title(self, of: Manifest) -> str:
        """What layers are of; of a config its path too, as models are named after the folder that they are in."""
        return printable(f"{of.model} ({self.model})" if self._is_config else of.model)

    @property
    def _is_config(self) -> bool:
        return self.model.suffix == ".json"

    def to_add(self, archive: Path, targets: Iterable[str], keeps: bool) -> tuple[list[list[str]], str]:
        """The commands that add layers for targets, and what must be done by hand between them. An entry gives way to
        one that is built anew, so that `keeps`, where other layers are tuned, takes a manifest of the missing alone."""
        name, on = printable(str(self.model)), [word for target in targets for word in ("--target", target)]
        build = ["--base", printable(str(archive)), "-o", "OUT"]
        tune = ["aot", "tune", "OUT", "-o", "TUNED"]
        why = ": a tuned layer that it names would be ranked again, until it is tuned again"
        if self._is_config:
            by_hand = f"keep only the missing layers in MANIFEST{why}"
            commands = [[*self._from_config(name), *on, "-o", "MANIFEST"], ["aot", "build", "MANIFEST", *build], tune]
        else:
            by_hand = f"where MANIFEST is a copy of {name} with only the missing layers{why}"
            commands = [["aot", "build", "MANIFEST" if keeps else name, *on, *build], tune]
        return commands, by_hand if keeps else ""

    def _from_config(self, name: str) -> list[str]:
        """The command that writes a manifest of a config, but for its target and where to."""
        wanted, words = self.wanted, ["aot", "manifest", "from-config", name]
        given = {
            "tp": None if wanted.tp == 1 else str(wanted.tp),
            "ep": None if wanted.ep == 1 else str(wanted.ep),
            "tokens": ",".join(map(str, wanted.tokens)),
            "dtype": wanted.dtype,
            "scaling": wanted.scaling,
        }
        words += [word for option, value in given.items() if value for word in (f"--{option}", value)]
        return [*words, *([] if wanted.experts else ["--no-experts"])]


def print_place(place: dict[str, Any], of: Manifest, archive: Path, asked: Asked) -> None:
    """What `aot coverage` prints of one kind of GPU."""
    place = cleaned(place)
    layers = place["layers"]
    assumed = ", assumed" if place["assumed_gpu"] else ""
    print_wrapped(f"{asked.title(of)} on {kind(place['gpu'])}{assumed}, by M")
    print()
    rows = []
    for layer in layers:
        every = sum(map(len, layer["m"].values()))
        every_m = sorted(m for ms in layer["m"].values() for m in ms)
        said = [_said(ms, every_m, every) for ms in layer["m"].values()]
        elsewhere = layer["tuned_on"]["name"].removeprefix("NVIDIA ") if layer["tuned_on"] else ""
        rows.append([layer["name"], layer["signature"], *said, elsewhere])
    header = ["layer", "signature", "tuned", "beyond", "ranked", "predicted", "missing", "tuned on"]
    print_fitted(header, rows)
    print()
    missing = [layer for layer in layers if layer["m"]["missing"]]
    if not missing:
        return print_wrapped(f"all {count(len(layers), 'layer')} are served")
    print_wrapped(
        f"{len(missing)} of {count(len(layers), 'layer')} are missing: {', '.join(m['name'] for m in missing)}"
    )
    if by_package := sum(layer["package"] for layer in missing):
        below = f'runtime.load([runtime.universal(), "{printable(str(archive))}"])'
        print_wrapped(f"the package's archive predicts for {by_package} of these, if it is loaded below: {below}")


def print_to_add(places: Sequence[dict[str, Any]], of: Manifest, archive: Path, asked: Asked) -> None:
    """The commands that add what kinds of GPU miss, and keep what is tuned: for the targets that have kernels for every
    layer, or where none has, all, so that the first command says what is lacking."""
    from ...problem.model_config import default_targets

    lacking = [place for place in map(cleaned, places) if any(layer["m"]["missing"] for layer in place["layers"])]
    missing: dict[str, set[str]] = {}
    for place in lacking:
        names = {layer["name"] for layer in place["layers"] if layer["m"]["missing"]}
        missing.setdefault(place["target"], set()).update(names)
    buildable = [_print_unbuildable(target, names, of) for target, names in missing.items()]
    if not any(buildable):
        return
    served = [layer["m"] for place in lacking for layer in place["layers"] if not layer["m"]["missing"]]
    named = list(dict.fromkeys(place["target"] for place in lacking if place["target"]))
    targets = default_targets([item.signature for item in of.items()], named) or named
    commands, by_hand = asked.to_add(archive, targets, any(m["tuned"] or m["beyond"] for m in served))
    print(f"to add {'them' if len(lacking) == 1 else 'what is missing'}:")
    for words in commands:
        print_command(words, first="  ")
    if by_hand:
        print_wrapped(by_hand)


def _print_unbuildable(target: str | None, missing: Collection[str], of: Manifest) -> bool:
    """Say which layers that are missing no build has for a target; whether one has any of them."""
    from ...search.unserved import variants, why_none

    signatures = {item.name: item.signature for item in of.items() if item.name in missing}
    without = [name for name, s in signatures.items() if target and not variants(target, s)]
    if target and without:
        print_wrapped(f"no build for {target} has {', '.join(without)}: {why_none(target, signatures[without[0]])}")
    return len(without) < len(missing)


def _said(of: list[int], asked: list[int], every: int) -> str:
    """M values, those that follow each other among what is asked for as a range; "all" of all."""
    if len(of) == every:
        return "all"
    runs: list[list[int]] = []
    for m in of:
        if runs and asked.index(m) == asked.index(runs[-1][-1]) + 1:
            runs[-1].append(m)
        else:
            runs.append([m])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
