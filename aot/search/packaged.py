"""What the archive in the package would choose for a signature: its cost program is corrected by measured times, which
estimates are not, and it has kernels that `likely` ones of few and of many tokens leave to each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import runtime
from runtime.container.archive import Archive
from runtime.device.gpus import H200
from runtime.gemm.signature import Signature
from runtime.gemm.universal import Universal

from .targets import target as target_named

_TABLE = "universal"


def chosen(signature: Signature, ms: Sequence[int], target: str) -> dict[int, str]:
    """The name of the function at each of `ms` rows; none where the archive has no function for the signature on
    `target`.

    Raises:
        ArchiveError: the package's archive is damaged or of another version.
    """
    entry = _table().entry(signature, target_named(target).compute_capability, H200)
    return {} if entry is None else {m: entry.best(m) for m in ms}


@lru_cache(maxsize=1)
def _table() -> Universal:
    with Archive.open(runtime.universal()) as archive:
        return Universal.from_json(archive.table(_TABLE), archive.functions.targets_by_name())
