"""What calls and archives of one checkout of this project cost the host, on its tests' driver, which launches nothing:
a process that `compare_host.py` starts with that checkout on `PYTHONPATH`.

Imports nothing of the checkout that this file is in. Where modules have moved since an older one, both names are tried.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

N, K, FUNCTIONS, LAYERS = 1024, 4096, 64, 16


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((field, ctypes.c_int32) for field in ("device_type", "device_id", "ndim")),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def us(call: Callable[[], Any], calls: int) -> float:
    """Processor time of a call in microseconds, the best of a few loops."""
    found = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(calls):
            call()
        found.append((time.process_time() - start) / calls * 1e6)
    return min(found)


def opened(path: Path) -> Any:
    """An archive of this checkout's."""
    # Asked of its folder: what an older checkout has not, an import may find in another that is installed.
    moved = (Path(str(import_module("runtime").__file__)).parent / "container").is_dir()
    return import_module(".container.archive" if moved else ".archive", "runtime").Archive.open(path)


class Calls:
    """A library of made-up functions on the driver of the checkout that is on `sys.path`."""

    def __init__(self, kind: str, folder: Path) -> None:
        if kind == "python":  # as where native code was not built
            for package in ("runtime", "runtime.native"):
                sys.modules[f"{package}._native"] = None  # type: ignore[assignment]
        from tests import recording_driver as made_up

        self.made_up, self.kept = made_up, list[Any]()
        torch = made_up.FakeTorch()
        sys.modules["torch"] = torch
        code = ctypes.PyDLL(str(folder / "host_stand_in.so"))
        code.capsule.restype = ctypes.py_object
        if kind == "native":
            made_up.FakeTensor.__dlpack_c_exchange_api__ = code.capsule()  # type: ignore[attr-defined]
        records = [made_up.gemm_record(f"f{i}", tile_m=16 * (1 + i % 8)) for i in range(FUNCTIONS)]
        entries = [
            made_up.entry(made_up.signature(N * (1 + layer), K), [(64, f"f{layer}"), (None, f"f{layer + LAYERS}")])
            for layer in range(LAYERS)
        ]
        self.path = Path(tempfile.mkdtemp(dir=folder)) / "made_up.aot"
        kernels = made_up.write_archive(self.path, records, entries)
        self.driver = made_up.RecordingDriver(kernels=kernels, quiet=True)
        if kind == "native":
            self.driver._entry = ctypes.cast(code.launch, type(self.driver._entry))

    def library(self) -> Any:
        """Opened, with no kernel loaded."""
        from runtime import Library

        return Library([opened(self.path)], self.driver)

    def tensor(self, *shape: int) -> Any:
        """As torch's, and readable by `host_stand_in.c`."""
        made = self.made_up.FakeTensor(shape)
        extents = [(ctypes.c_int64 * len(shape))(*of) for of in (shape, made.stride())]
        dl = _Tensor(made.data_ptr(), 2, 0, len(shape), 4, 16, 1, *extents, 0)
        self.kept += [dl, *extents]
        made.dl = ctypes.addressof(dl)  # type: ignore[attr-defined]
        return made


def of_calls(kind: str, folder: Path) -> dict[str, float]:
    """Microseconds of a call that was planned, and of one with rows that no call had before."""
    calls = Calls(kind, folder)
    gemm = calls.library().gemm
    b = calls.tensor(N, K)
    a, d = calls.tensor(16, K), calls.tensor(16, N)
    for _ in range(2):
        gemm(a, b, out=d)
    rows: Iterator[tuple[Any, Any]] = iter([(calls.tensor(m, K), calls.tensor(m, N)) for m in range(65, 1200)])

    def other_rows() -> None:
        x, y = next(rows)
        gemm(x, b, out=y)

    other_rows()
    return {
        f"a planned launch, {kind}: us": us(lambda: gemm(a, b, out=d), 5000),
        f"a call with other rows, {kind}: us": us(other_rows, 150),
    }


def of_archives(folder: Path) -> dict[str, float]:
    """Opening and preload of 64 functions, in microseconds."""
    calls = Calls("native", folder)
    libraries = []

    def preload() -> None:
        calls.library().preload(tokens=(1, 16, 64, 256))

    preload()
    return {
        "opening 64 functions: us": us(lambda: libraries.append(calls.library()), 20),
        "opening and preloading 64 functions at 4 M: us": us(preload, 3),
    }


def of_file(folder: Path) -> dict[str, float]:
    """Bytes of a function of the folder's one archive."""
    (path,) = folder.glob("*.aot")
    functions = len(opened(path).functions)
    return {"functions of that model": functions, "bytes of each in the archive": path.stat().st_size / functions}


if __name__ == "__main__":
    kind, scratch = sys.argv[1], Path(sys.argv[2])
    whole = {"archives": of_archives, "file": of_file}
    print(json.dumps(whole[kind](scratch) if kind in whole else of_calls(kind, scratch)))
