"""`runtime.load`: archives opened as one library. Its docstring is what a user reads of options."""

from __future__ import annotations

import os

from ..device.driver import Driver
from ..device.ordinal import Device, ordinal_of
from .layers import Paths, opener, paths_of
from .library import Library
from .options import Options


def load(
    path: Paths,
    device: Device | None = None,
    on_miss: str = "error",
    *,
    require: str | None = None,
    on_slower: str = "never",
    batch_invariant: bool = False,
    capture_workspaces: str = "own",
    on_damage: str = "error",
    require_signed: str | os.PathLike[str] | None = None,
) -> Library:
    """Open the archive at `path` for one device; nothing but the archive is touched before the first use.

    Of several paths the first is the base, and each after it a layer: its gemm entries take the place of those of
    earlier files for the same signature and target, or are new. Entries keep to the functions of their own file.

    `device` is an ordinal, such as 1, or as torch has it, "cuda:1" or a `torch.device`; None and "cuda" are the device
    that is current at the first use. `on_miss` says what happens when the archive cannot serve a GEMM of torch tensors,
    because it has no kernel or because of how a tensor lies in memory (alignment, strides): "error" raises `KernelMiss`
    or `LayoutError`, "torch" lets torch compute it, counted in `Library.misses` and logged once for each signature.
    Calls that are wrong (shapes that do not fit, another device, shared or missing memory) raise `ArgumentError` in any
    case, and 8-bit floats, which torch.matmul does not take, never fall back.

    `require="tuned"` treats entries of the archive that were never tuned on a GPU as missing; by default the first that
    is used is logged as a warning.

    `on_slower="torch"` lets torch compute a GEMM of torch tensors where `aot tune` measured torch's own kernel to be
    faster at that number of rows, counted in `Stats.given_to_torch`: the very call that was measured, one of mm, bmm,
    addmm and _scaled_mm. By default, "never", the archive serves all that it can.

    `batch_invariant=True` serves each signature with functions that all give equal bits, so that a row's result has the
    same bits however many other rows there are; entries that name no such functions are missing. It leaves nothing to
    torch, so `on_miss` and `on_damage` must be "error" and `on_slower` "never".

    `capture_workspaces="shared"` promises that no two CUDA graphs which hold launches of this library ever run at the
    same time, as where a server replays them one after the other on one stream. Their captures then share workspaces,
    64 MiB at most, which `Library.preload` allocates; by default, "own", each capture has its own. A kernel that needs
    more than that for one launch gives way to the runner-up of its entry. A broken promise is not noticed, and makes
    wrong results. Streams that launch outside captures have workspaces of their own in any case.

    `on_damage="torch"` goes on where a kernel's bytes in the file are not as they were written, which shows when it is
    first loaded, or in `preload`: another function of its entry serves, or torch, where the call is of torch tensors
    and torch computes it, 8-bit floats too where it has one call for them. The functions are in `Stats.damaged`, the
    calls among `Library.misses` as "damaged", and the first is logged as a warning. By default, "error", that call
    raises an `ArchiveError`. An index, table or signature that is damaged is refused in any case, and so are files in
    `reload`, after which the old ones serve.

    `require_signed` is a folder of public keys, or one key: each archive must then have a signature by one of them in a
    file beside it (model.aot.sig), here and in each `reload`, which read keys and policy anew (docs/security.md).

    A library may be opened before a fork and used after it by every child, but its first use (any call that needs the
    device) must come after the fork, as with CUDA itself.

    Raises:
        ArchiveError: a file is not an archive that can be trusted.
        ArgumentError: an option is unknown, two do not go together, there is no path, or `device` names no CUDA device.
        SignatureError: an archive is not signed as `require_signed` asks, or nothing here can tell.
    """
    options = Options(on_miss, require, on_slower, batch_invariant, capture_workspaces, on_damage).check()
    driver = Driver(ordinal_of(device))
    open_files = opener(require_signed)
    return Library(open_files(paths_of(path)), driver, options, open_files=open_files)
