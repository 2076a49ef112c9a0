"""A small archive, its parts, and what refuses it once they are changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.pack import write as pack
from runtime.container.archive import Archive

from .fuzz_archive import (
    Parts,
    assemble,
    disassemble,
    replace_documents,
    sign_blocks,
)

Edit = Callable[[Any], Any]
CUBINS = {"alpha": b"A" * 100, "beta": b"B" * 50, "gamma": b"C" * 10, "gamma2": b"D" * 10}

TARGETS = {"alpha": "sm_90a", "beta": "sm_90a", "gamma": "sm_100a", "gamma2": "sm_103a"}


def record(name: str) -> dict[str, Any]:
    return {"name": name, "target": TARGETS[name], "cubin": hashlib.sha256(CUBINS[name]).hexdigest()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    package = pack.Package()
    for name, cubin in CUBINS.items():
        package.add_function(record(name), cubin)
    package.set_table("gemm", {"entries": [1, 2]})
    package.set_table("build", {"dsl": "4.8.1"})
    package.write(tmp_path / "model.aot")
    return tmp_path / "model.aot"


@pytest.fixture
def parts(path: Path) -> Parts:
    return disassemble(path.read_bytes())


def refuse(path: Path, data: bytes, error: type[Exception], match: str) -> None:
    """Opening `data` raises exactly `error`, whose message matches and names the file."""
    path.write_bytes(data)
    with pytest.raises(error, match=match) as caught:
        Archive.open(path)
    assert caught.type is error
    assert str(caught.value).startswith(str(path))


def block_of(parts: Parts, kind: str) -> int:
    return next(number for number, row in enumerate(parts.head["blocks"]) if row["kind"] == kind)


def replace_block(path: Path, parts: Parts, kind: str, edit: Callable[[bytes], bytes], sign: bool = True) -> Archive:
    """Open the archive with the blocks of `kind` changed by `edit`, and signed again unless told otherwise."""
    number = block_of(parts, kind)
    parts.blocks[number] = edit(parts.blocks[number])
    path.write_bytes(assemble(sign_blocks(parts) if sign else parts))
    return Archive.open(path)


def replace_document(path: Path, parts: Parts, kind: str, at: int, data: bytes) -> Archive:
    """Open the archive with one record or table changed and everything signed again."""
    number = block_of(parts, kind)
    documents = parts.documents_of(number)
    documents[at] = data
    path.write_bytes(assemble(replace_documents(parts, number, documents)))
    return Archive.open(path)


NOTHING = Parts({"blocks": [], "functions": {}, "tables": []}, [], [], [], [], [], [])
