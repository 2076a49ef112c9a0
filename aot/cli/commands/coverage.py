"""`aot coverage`: which layers of a model an archive serves, and which are missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arguments import ArchivePath, Json, OneGpu, OneTarget, count, examples, tokens_of
from ..inputs import open_archive
from ..layout import print_command, print_fitted, print_wrapped
from ..streams import print_json, printable, warn
from ..tables import cleaned, kind

if TYPE_CHECKING:
    from ...problem.manifest import Manifest
    from ...problem.model_config import Wanted

EXAMPLES = examples("aot coverage model.aot model.yaml", "aot coverage model.aot config.json --tp 8 --gpu H200")
_TOKENS = "1,16,64,256,1024,4096"


def command(
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

    wanted = Wanted(tp, tokens_of(tokens), [target] if target else None, dtype, scaling, ep=ep, experts=experts)
    of = _manifest(model, wanted)
    with open_archive(archive) as opened:
        serving = Serving(opened)
        found = coverage(serving, of, serving.everywhere(target, gpu))
    missing = sum(bool(layer["m"]["missing"]) for place in found for layer in place["layers"])
    if as_json:
        print_json({"model": of.model, "archive": str(archive), "missing": missing, "places": found})
    else:
        for i, place in enumerate(found):
            if i:
                print()
            print_place(place, _title(of, model), archive, _manifest_of(model, wanted))
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


def _title(of: Manifest, model: Path) -> str:
    """What layers are of; of a config its path too, as models are named after the folder that they are in."""
    return of.model if model.suffix != ".json" else f"{of.model} ({model})"


def _manifest_of(model: Path, wanted: Wanted) -> tuple[str, str]:
    """The command that writes a manifest of a config, empty where `model` is a manifest; and that manifest."""
    name = printable(str(model))
    if model.suffix != ".json":
        return "", name
    options = [f" --{word} {size}" for word, size in (("tp", wanted.tp), ("ep", wanted.ep)) if size != 1]
    options.append(f" --tokens {','.join(map(str, wanted.tokens))}")
    options += [f" --target {target}" for target in wanted.targets or ()]
    options += [f" --{word} {given}" for word, given in (("dtype", wanted.dtype), ("scaling", wanted.scaling)) if given]
    options += [] if wanted.experts else [" --no-experts"]
    return f"aot manifest from-config {name}{''.join(options)} -o MANIFEST", "MANIFEST"


def print_place(place: dict[str, Any], model: str, archive: Path, made_by: tuple[str, str]) -> None:
    """What `aot coverage` prints of one kind of GPU; `made_by` is what `_manifest_of` gives."""
    place = cleaned(place)
    layers = place["layers"]
    assumed = ", assumed" if place["assumed_gpu"] else ""
    print_wrapped(f"{printable(model)} on {kind(place['gpu'])}{assumed}, by M")
    print()
    rows = []
    for layer in layers:
        every = sum(map(len, layer["m"].values()))
        asked = sorted(m for of in layer["m"].values() for m in of)
        said = [_said(of, asked, every) for of in layer["m"].values()]
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
    first, manifest = made_by
    print("to add them:")
    for line in (first, f"aot build {manifest} --base {printable(str(archive))} -o OUT", "aot tune OUT -o TUNED"):
        if line:
            print_command(line, first="  ")


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
