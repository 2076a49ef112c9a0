"""`aot manifest`: manifests written, from a model's config.json or from what a server ran."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.numbers.scaling import SCALINGS

from ...search.targets import target as target_named
from ..arguments import Targets, examples, tokens_of
from ..inputs import refuse_outputs
from ..streams import printable, warn

FROM_CONFIG = examples("aot manifest from-config config.json --tp 8 --tokens 1,16,64,1024 -o model.yaml")
FROM_SERVER = examples("aot manifest from-server records/ -o model.yaml")

ManifestOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default, and what - means: print it.")
]
ManifestForce = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]
InGraph = Annotated[
    bool, typer.Option("--in-graph", help="Add overlapping and fused layers, for `aot tune --in-graph` to choose.")
]

Quantise = Annotated[
    bool | None,
    typer.Option(
        "--quantise/--no-quantise",
        help="Whether to add what quantises the tokens of e4m3 layers, for servers that would. Default: only for up to "
        "16 tokens, and only for layers scaled by blocks that are not fused.",
    ),
]


def from_config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json.")],
    tokens: Annotated[str, typer.Option(metavar="M,M,...", help="The M values to tune for, such as 1,16,1024.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; the manifest is that of one.")] = 1,
    ep: Annotated[
        int, typer.Option(min=1, help="Ranks that a mixture's experts are spread over: 1, or a multiple of --tp.")
    ] = 1,
    experts: Annotated[
        bool, typer.Option("--experts/--no-experts", help="Whether the manifest has a mixture's experts.")
    ] = True,
    target: Targets = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, f16, e4m3 or e2m1. Default: that of the config, if it is one of these.")
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(SCALINGS)}; with --dtype bf16 one of weights alone. Default: the config's, or of e4m3 "
            "row_column, of e2m1 nvfp4."
        ),
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Take the MLP's activation into gate_up, residuals into o and down.")
    ] = False,
    in_graph: InGraph = False,
    quantise: Quantise = None,
    model: Annotated[str | None, typer.Option(help="The model's name. Default: from --source or CONFIG.")] = None,
    source: Annotated[str | None, typer.Option(help="Where the config is from. Default: the file's name.")] = None,
    output: ManifestOutput = None,
    force: ManifestForce = False,
) -> None:
    """Write the manifest of a model's linear layers and experts from its config.json.

    Without --target it is for every target that has kernels for all of them, which after --fuse, or where a layer has
    a bias or there are experts, are those with fused epilogues.
    """
    from ...problem.manifest import dump
    from ...problem.model_config import Wanted, manifest_from_config
    from ...problem.models.config import load_config

    counts = tokens_of(tokens)
    if output is not None:
        refuse_outputs(output, [config])
    text = dump(
        manifest_from_config(
            load_config(config),
            Wanted(tp, counts, target or None, dtype, scaling, fuse, ep, experts, in_graph, quantise),
            source=source or printable(config.name),
            model=model,
            named_after=source or printable(str(config.resolve())),
            on_warning=warn,
        )
    )
    _write_manifest(text, output, force)


def from_server(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What a server's workers recorded; docs/vllm.md, docs/sglang.md.")
    ],
    target: Targets = None,
    in_graph: InGraph = False,
    quantise: Quantise = None,
    model: Annotated[str | None, typer.Option(help="The model's name. Default: from the server's.")] = None,
    output: ManifestOutput = None,
    force: ManifestForce = False,
) -> None:
    """Write the manifest of the GEMMs that a server, vLLM or SGLang, ran, with the M that it ran them at and how often.

    Without --target it is for the GPU that the server ran on.
    """
    from ...problem.manifest import dump
    from ...problem.recorded import manifest_from_workers

    for name in target or ():
        target_named(name)
    found = manifest_from_workers(
        folder, targets=target, model=model, in_graph=in_graph, quantise=quantise, on_warning=warn
    )
    _write_manifest(dump(found), output, force)


def _write_manifest(text: str, output: Path | None, force: bool) -> None:
    from ...problem.manifest import write

    if output is None or str(output) == "-":
        print(text, end="")
    else:
        write(text, output, replace=force)
