"""What the compiler on this machine consists of, for the provenance of an archive that was built here."""

from __future__ import annotations

from runtime.container.archive import Archive
from runtime.errors import SignatureError

from ..compile.cache import Cache
from ..compile.toolchain import toolchain
from ..pack import build_table


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
