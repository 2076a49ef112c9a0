"""Archives whose universal table has one form of four functions, a library of one, and what it launches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.pack.write import Package
from aot.verify import archive as verify
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.gemm.universal import Universal
from runtime.serve.layers import open_archives
from runtime.serve.options import Options

from .recording_driver import FakeTensor, RecordingDriver, cubin, entry, gemm_record, signature, table

K = 512
FORM_NAME = "bf16_bf16_bf16_f32_none_n*_k*"
Change = Callable[[dict[str, Any]], None]
# Microseconds: "few" 100 + M, "many" 150 + M / 10, "wide" 1, which takes N in multiples of 1024 only, and "shared" 1000
# up to M = 1000 and 1 beyond, which adds up in an order that depends on M.
PROGRAM = {
    "constants": [100, 150, 10, 1, 1000],  # from place 6, after the inputs
    "operations": "add div add select",  # from place 11
    "operands": [0, 6, 0, 8, 12, 7, 0, 10, 10, 9],
    "results": [11, 13, 9, 14],
}
FORM: dict[str, Any] = {
    "a": "bf16",
    "b": "bf16",
    "d": "bf16",
    "accumulator": "f32",
    "epilogue": "none",
    "scaling": "none",
}
FORM |= {"b_major": "k", "overlap": "serial", "batched": False}
NAMES = ("few", "many", "wide", "shared")
MOST = 2**31 - 1
ROW: dict[str, Any] = {
    "form": FORM,
    "target": "sm_90a",
    "functions": [
        ["few", 8, 8, MOST],
        ["many", 8, 8, MOST],
        ["wide", 1024, 8, 4096],
        ["shared", 8, 8, MOST],
    ],
    "equal_bits": [1, 1, 2, 0],
    "checked_on": ["NVIDIA H200"],
    "program": 0,
}
TABLE: dict[str, Any] = {"schema": 2, "forms": [ROW], "programs": [PROGRAM]}
TARGETS = dict.fromkeys(NAMES, "sm_90a")
GPU, HOPPER = Gpu("NVIDIA H200", 132, 4917), (9, 0)
RECORDS = [gemm_record(n) for n in NAMES[:3]] + [gemm_record("shared", workspaces=((4096, None, True),))]
RECORDS.append(gemm_record("other", target="sm_100a"))


def checked_on(*gpus: str) -> dict[str, Any]:
    """The table with functions that were found right on these kinds of GPU, and on no other."""
    return TABLE | {"forms": [ROW | {"checked_on": list(gpus)}]}


def of(n: int, k: int = K, **more: Any) -> Signature:
    return Signature.from_json(signature(n, k, **more))


def universal(obj: Any = TABLE) -> Universal:
    return Universal.from_json(obj, TARGETS)


def write(path: Path, rows: list[dict[str, Any]] = [], obj: Any = TABLE) -> dict[bytes, Any]:  # noqa: B006
    package = Package()
    for record in RECORDS:
        package.add_function(record, cubin(record["name"]))
    package.set_table("gemm", table(rows))
    package.set_table("universal", obj)
    package.write(path)
    kernels: dict[bytes, Any] = {}
    for r in RECORDS:
        sizes = tuple(p["size"] for p in r["program"]["launches"][0]["parameters"])
        kernels[cubin(r["name"])] = {f"kernel_{r['name']}": sizes}
    return kernels


def library(folder: Path, driver: RecordingDriver, rows: Any = (), obj: Any = TABLE, **options: Any) -> Library:
    driver.kernels |= write(folder / "universal.aot", list(rows), obj)
    return Library(open_archives([folder / "universal.aot"]), driver, Options(**options))


def launched(lib: Library, driver: RecordingDriver, n: int, m: int, **more: Any) -> str:
    lib.gemm(FakeTensor((m, K)), FakeTensor((n, K)), out=FakeTensor((m, n)), **more)
    return driver.launches[-1].symbol.removeprefix("kernel_")


def changed(folder: Path, change: Change, rows: list[dict[str, Any]] = []) -> Path:  # noqa: B006
    obj = copy.deepcopy(TABLE)
    change(obj)
    write(folder / "changed.aot", rows, obj)
    return folder / "changed.aot"


def checks(path: Path, subject: str) -> list[verify.Finding]:
    """The findings whose subjects begin so."""
    with Archive.open(path) as opened:
        return [finding for finding in verify.verify(opened) if finding.subject.startswith(subject)]


def failed(path: Path) -> list[verify.Finding]:
    """The failed checks but those of cubins, which are made up."""
    return [finding for finding in checks(path, "") if not finding.ok and not finding.subject.startswith("function ")]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """One form of four functions, and an entry served by one of them."""
    write(tmp_path / "forms.aot", [entry(signature(512, 512), [(None, "few")])])
    return tmp_path / "forms.aot"
