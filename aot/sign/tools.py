"""What the compiler consists of: the one on this machine, for the provenance of an archive that was built here, and the
one that a signature names."""

from __future__ import annotations

from pathlib import Path

from runtime.container.archive import Archive
from runtime.errors import SignatureError
from runtime.signing.check import accepted
from runtime.signing.keys import TrustedKeys

from ..compile.cache import Cache
from ..compile.toolchain import toolchain
from ..pack import build_table
from .unverified import Unverified, read


def installed_contents(archive: Archive) -> dict[str, str]:
    """The SHA-256, hexadecimal, of the contents of each distribution that generates code, by name, as installed here.

    `aot.compile.toolchain` says which files those are. It reads them all, in about a second.

    Raises:
        SignatureError: the archive was built with another version of one.
        ToolchainError: the compiler is not installed.
    """
    tools, found = build_table.read(archive).tools, {}
    for name, words in toolchain(Cache(None)).wheels.items():
        version, _, digest = words.rpartition(" ")
        if tools.get(name) != version:
            raise SignatureError(
                f"{archive.path}: was built with {name} {tools.get(name, 'unknown')}, {version} is installed here; "
                "sign it where it was built, or without --built-here"
            )
        found[name] = digest
    return found


def signed_contents(archive: Archive, path: Path, trusted: TrustedKeys | None) -> dict[str, str]:
    """The contents of tools, by name, that the signature at `path` names for an archive; none where it was made without
    `--built-here`. Without keys it counts whoever signed it: a wrong one makes no wrong archive right.

    Raises:
        SignatureError: it is malformed, of another archive, or, with keys, not to be trusted.
    """
    release = read(path).release if trusted is None else accepted(str(path), trusted).release
    if release.index_digest != archive.digest:
        raise SignatureError(
            f"{path}: is of an archive with the digest {release.index_digest}, {archive.path} has {archive.digest}; "
            "give the signature of this one"
        )
    return Unverified(release, ()).contents
