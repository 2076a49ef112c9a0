"""Write an archive's universal table anew: today's estimates, corrected by the times in its own history and in files.

    python scripts/correct_universal.py runtime/universal.aot --times benchmarks/drawn_h200.json.xz \
        --times benchmarks/drawn_h100.json.xz -o better.aot

For when estimates have become better since the archive was tuned, or there are more times, or `aot merge` has put forms
together that were tuned apart. Its functions, which were checked on a GPU, and its other tables stay as they are. Needs
no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import report  # also puts the checkout on the path

from aot.pack.forms import TABLE, read
from aot.pack.write import Package
from aot.tune import forms, times
from runtime.container.archive import Archive
from runtime.errors import AotError

TARGET = "sm_90a"


def corrected(archive: Archive, besides: Sequence[forms.Time] = ()) -> Package:
    """The archive with such a table; `besides` are other times than its own.

    Raises:
        AotError: it has no universal table, or no times.
    """
    universal, own = read(archive), times.load(Path(archive.path), TARGET)
    if universal is None or not own:
        raise AotError(f"{archive.path}: has no forms with times of {TARGET}; tune it first")
    package = Package()
    package.add_archive(archive)
    for name in archive.tables:
        package.set_table(name, archive.table(name))
    package.set_table(TABLE, forms.corrected([form for _, form in universal.forms], [*own, *besides]))
    return package


def main() -> int:
    """Correct and write."""
    parser = report.options_to_write(__doc__, "the archive to write")
    parser.add_argument("archive", type=Path)
    parser.add_argument("--times", action="append", type=Path, default=[], help="a file of times, on any kind of GPU")
    options = parser.parse_args()

    def work() -> None:
        besides = [at for path in options.times for at in times.load(path, TARGET)]
        with Archive.open(options.archive) as archive:
            corrected(archive, besides).write(options.output)

    return report.ends(work)


if __name__ == "__main__":
    sys.exit(report.ends(main))
