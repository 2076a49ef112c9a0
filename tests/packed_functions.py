"""Records and packages of made-up cubins."""

from __future__ import annotations

import hashlib
from typing import Any

from aot.pack.write import Package


def record(name: str, cubin: bytes, target: str = "sm_90a", **more: Any) -> dict[str, Any]:
    return {"name": name, "target": target, "cubin": hashlib.sha256(cubin).hexdigest(), **more}


def add(package: Package, name: str, cubin: bytes, target: str = "sm_90a", **more: Any) -> None:
    package.add_function(record(name, cubin, target, **more), cubin)
