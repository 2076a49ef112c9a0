"""Write an archive's universal table anew: today's estimates, corrected by the times in its own history and in files.

    python scripts/correct_universal.py runtime/universal.aot --times benchmarks/drawn_h200.json.xz \
        --times benchmarks/drawn_h100.json.xz -o better.aot

For when estimates have become better since the archive was tuned, or there are more times. Its functions, which were
checked on a GPU, and its other tables stay as they are. Needs no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import report  # also puts the checkout on the path

from aot.pack.forms import read
from aot.pack.write import Package
from aot.search.universal import Measured
from aot.tune import history, times
from aot.tune.forms import TunedForm, table
from runtime.container.archive import Archive
from runtime.device.gpus import H200, Gpu
from runtime.errors import AotError
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature


def corrected(archive: Archive, gpu: Gpu, besides: Sequence[tuple[Signature, Measured]] = ()) -> Package:
    """The archive with such a table; `gpu` is what the history is of, and `besides` are other times.

    Raises:
        AotError: it has no universal table, or no times.
    """
    universal = read(archive)
    rows = [
        row for row in history.tunings(archive) if history.operation_of(row) == GEMM.name and row["gpu"] == gpu.name
    ]
    if universal is None or not rows:
        raise AotError(f"{archive.path}: has no forms with times of {gpu.name}; tune it there first")
    tuned = {}
    for place, (_, form) in enumerate(universal.forms):
        one = tuned[place] = TunedForm()
        for row in rows:
            signature = times.signature_of(row["signature"])
            if row["target"] == form.target and form.signature(signature.n, signature.k) == signature:
                one.times += [(signature, history.measured(row["names"], point)) for point in row["points"]]
    package = Package()
    package.add_archive(archive)
    for name in archive.tables:
        package.set_table(name, archive.table(name), alone=name == history.TABLE)
    found = table(archive, tuned, (), gpu, besides)
    assert found is not None  # nothing is rejected
    package.set_table("universal", found)
    return package


def main() -> int:
    """Correct and write."""
    parser = report.options_to_write(__doc__, "the archive to write")
    parser.add_argument("archive", type=Path)
    parser.add_argument("--times", action="append", type=Path, default=[], help="a file of times, on any kind of GPU")
    options = parser.parse_args()

    def work() -> None:
        besides = [at for path in options.times for at in times.load(path, "sm_90a")]
        with Archive.open(options.archive) as archive:
            corrected(archive, H200, besides).write(options.output)

    return report.ends(work)


if __name__ == "__main__":
    sys.exit(report.ends(main))
