"""`aot prune`: an archive without a part of itself."""

from __future__ import annotations

from ..arguments import ArchivePath, Force, Json, Layers, Output, States, Targets, examples
from ..inputs import open_archive, refuse_outputs
from ..output import require_replaceable
from ..repacked import print_written

EXAMPLES = examples(
    "aot prune model.aot -o hopper.aot --target sm_90a", "aot prune model.aot -o tuned.aot --state tuned --gemm qkv"
)


def command(
    archive: ArchivePath,
    output: Output,
    target: Targets = None,
    gemm: Layers = None,
    state: States = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a part of an archive. Some targets, layers or states, with the functions that these need; functions in no
    table stay unless layers or states are named."""
    from ...pack.filter import Filter
    from ...repack import RepackError, contents, pruned, write

    wanted = Filter(target or (), gemm or (), state or ())
    if not any(wanted):
        raise RepackError("nothing says what to keep; give --target, --gemm or --state")
    refuse_outputs(output, [archive])
    require_replaceable(output, force, keep_tuned=True)
    with open_archive(archive) as opened:
        left = pruned(str(archive), contents(opened), wanted)
        write(output, [(opened, left)], left)
        before = len(opened.functions), opened.file_bytes
    print_written(output, before, as_json)
