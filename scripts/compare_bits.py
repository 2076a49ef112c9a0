"""Which functions of an archive give the same bits: those of a group may take turns at different M and a row keeps its.

For each signature, all functions that compute it run on the same random operands at several M, some rows of zeros among
them; those whose outputs are equal, bit by bit, at every M make a group. Needs a GPU. A group is what was seen; what is
promised is for `aot/providers/summation.py` to say, which rests on benchmarks/results/bits_h200.json.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import ends, out_argument, write

TOKENS = (1, 17, 64, 333, 1000)


def groups(digests: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Functions by equal digests, the largest group first; each sorted by name."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(digests):
        found.setdefault(tuple(digests[name]), []).append(name)
    return sorted(found.values(), key=lambda group: (-len(group), group))


def digests_of(library: Any, signature: Any, names: Sequence[str], tokens: Sequence[int]) -> dict[str, list[str]]:
    """For each function that can be launched at all of `tokens` a digest of its output at each."""
    import torch

    from aot.tune.gemm.operands import Weights, put_zeros
    from runtime.errors import AotError

    found: dict[str, list[str]] = {name: [] for name in names}
    for m in tokens:
        (o, *_) = Weights(signature, m, 0, seed=m).operands(m)
        put_zeros(o)
        for name in list(found):
            o.d.view(torch.uint8).fill_(0xFF)
            try:
                library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())
            except AotError:
                del found[name]
                continue
            data = o.d.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            found[name].append(hashlib.sha256(data).hexdigest())
    return found


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="with candidates, as aot build --no-tune writes it")
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    out_argument(parser)
    options = parser.parse_args()

    import runtime
    from aot.tune import measure
    from runtime.container.archive import Archive
    from runtime.errors import ArgumentError
    from runtime.gemm.operation import GEMM
    from runtime.tables.dispatch import Dispatch, serves

    environment = measure.environment()
    capability = tuple(int(x) for x in environment["compute_capability"].split("."))
    with Archive.open(options.archive) as archive:
        table = Dispatch.from_json(archive.table(GEMM.name), GEMM, archive.functions.targets_by_name())
    library = runtime.load(options.archive)
    results = []
    for entry in table.entries:
        if not serves(entry.target, (capability[0], capability[1])):
            continue
        found = groups(digests_of(library, entry.signature, entry.names, options.tokens))
        results.append({"signature": entry.signature.key(), "groups": found})
        print(f"{entry.signature.key():60s} {[len(group) for group in found]}", flush=True)
    if not results:
        raise ArgumentError("the archive has no entry for this GPU; build and tune one for it")
    write(options.out, environment, tokens=options.tokens, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
