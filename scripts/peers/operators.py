"""NVIDIA's CUTLASS Operator API: every Hopper GEMM it has, compiled by its own `compile`, the fastest kept."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cutlass.operators as ops
import cutlass.utils
import torch
from cutlass import cute

from aot.tune.elements import TORCH_DTYPES
from aot.tune.gemm.operands import OperandSet
from aot.tune.measure import Launch
from runtime.gemm.signature import Signature

from .base import Problem, Settings, versions_of

_TARGET = "90a"
_CLASS = "Sm90StaticPersistentGemmOperator"
_FUNCTION = "gemm"
# The number of clusters of 1, 2 and 4 CTAs that an H200 holds, which the API asks the device for and compiles in. Only
# used to compile with no GPU: with one, the device's answer is part of the key under which a kernel is kept.
_H200_CLUSTERS = {1: 132, 2: 66, 4: 30}


class Operators:
    """The peer; see `base.Peer`."""

    name = "operators"
    search = f"all kernels of {_CLASS}"

    def __init__(self, settings: Settings) -> None:
        self._cache = settings.cache / self.name
        self._device = settings.device
        if settings.device == "cpu":
            cutlass.utils.HardwareInfo = _H200
            self._clusters = dict(_H200_CLUSTERS)
        else:
            torch.cuda.init()
            torch.empty(1, device="cuda")  # the API asks about the current context
            information = cutlass.utils.HardwareInfo()
            self._clusters = {n: information.get_max_active_clusters(n) for n in _H200_CLUSTERS}
        self._artifacts: dict[tuple[str, ...], dict[str, Any]] = {}

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return versions_of(
            "nvidia-cutlass-operators", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi"
        )

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        if signature.scaling != "none":
            return "its Hopper kernels take no scales"
        if signature.epilogue != "none":
            return "it fuses epilogues on Blackwell only"
        return None

    def prepare(self, problems: Sequence[Problem], expired: Callable[[], bool]) -> None:
        """Compile all kernels of the element types in `problems`: they serve any shape."""
        for signature in dict.fromkeys(s for s, _ in problems):
            if not expired():
                self._compiled(signature, expired)

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """Its candidates; the shape makes no difference."""

        def launch_of(artifact: Any) -> Launch:
            def launch(o: OperandSet) -> None:
                arguments = ops.GemmArguments(A=o.a, B=o.b.t(), out=o.d, accumulator_type=torch.float32)
                stream = torch.cuda.current_stream()
                artifact.operator_obj.run(arguments, artifact, stream=stream, assume_supported_args=True)

            return launch

        return {name: launch_of(a) for name, a in self._compiled(signature, lambda: False).items()}

    def _compiled(self, signature: Signature, expired: Callable[[], bool]) -> dict[str, Any]:
        types = signature.a, signature.d
        found = self._artifacts.setdefault(types, {})
        a, d = (TORCH_DTYPES[t] for t in types)
        arguments = ops.GemmArguments(
            A=torch.empty((256, 512), dtype=a, device=self._device),
            B=torch.empty((1024, 512), dtype=a, device=self._device).t(),
            out=torch.empty((256, 1024), dtype=d, device=self._device),
            accumulator_type=torch.float32,
        )
        for operator in ops.get_operators(arguments, target_sm=_TARGET):
            if type(operator).__name__ != _CLASS or expired():
                continue
            design = operator.metadata.design
            name = "tile {}x{} cluster {}x{}".format(*design.tile_shape[:2], *design.cluster_shape[:2])
            if name not in found:
                found[name] = self._compile(operator, arguments)
        return found

    def _compile(self, operator: Any, arguments: Any) -> Any:
        """The operator's compiled kernel, from the cache if it is there."""
        target = ops.TargetSm.ensure(_TARGET)
        path = self._path(operator)
        if path.exists():
            loaded = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]
            return ops.CompiledArtifact(compiled_obj=loaded, operator_obj=operator, compiled_for=target)
        artifact = operator.compile(arguments, target_sm=_TARGET)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        artifact.compiled_obj.export_to_c(object_file_path=str(partial), function_name=_FUNCTION)
        partial.rename(path)
        return artifact

    def _path(self, operator: Any) -> Path:
        fields = [
            operator.metadata.operator_name,
            sorted(self._clusters.items()),
            sorted(self.versions().items()),
            platform.python_version_tuple()[:2],
            platform.machine(),
        ]
        return self._cache / f"{hashlib.sha256(json.dumps(fields).encode()).hexdigest()}.o"


class _H200:
    """Stands in for the DSL's `HardwareInfo` where there is no GPU."""

    def __init__(self, device_id: int = 0) -> None:
        pass

    def get_max_active_clusters(self, cluster_size: int, stream: Any = None) -> int:
        """What an H200's driver answers."""
        return _H200_CLUSTERS[cluster_size]
