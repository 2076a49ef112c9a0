"""Small CUDA kernels that scripts ask the chip with, compiled by NVRTC where they run; needs a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

Arguments = Sequence[tuple[Any, Any]]  # values, and their types of ctypes


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the driver or the compiler returned.

    Raises:
        SystemExit: it failed.
    """
    if int(result[0]):
        raise SystemExit(f"{result[0]!r}")
    return result[1] if len(result) > 1 else None


def kernels(source: bytes, names: Sequence[str], shared_bytes: int) -> list[Any]:
    """Those of `source` called `names`, for this GPU; a CTA may have `shared_bytes` of dynamic shared memory."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}" + ("a" if major >= 9 else "")
    program = checked(nvrtc.nvrtcCreateProgram(source, b"probe.cu", 0, [], []))
    compiled = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{architecture}".encode()])
    if int(compiled[0]):
        said = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, said))
        raise SystemExit(f"{compiled[0]!r}: {said.decode()}")
    cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    library = checked(driver.cuLibraryLoadData(bytes(cubin), [], [], 0, [], [], 0))
    found = [checked(driver.cuLibraryGetKernel(library, name.encode())) for name in names]
    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for kernel in found:
        checked(driver.cuKernelSetAttribute(shared, shared_bytes, kernel, checked(driver.cuDeviceGet(0))))
    return found


def launch(kernel: Any, ctas: int, threads: int, shared_bytes: int, arguments: Arguments, cluster: int = 1) -> None:
    """Launch on torch's current stream."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, torch.cuda.current_stream().cuda_stream
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape = attribute.value.clusterDim
    shape.x, shape.y, shape.z = cluster, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    values, types = zip(*arguments, strict=True)
    checked(driver.cuLaunchKernelEx(config, driver.CUfunction(int(kernel)), (values, types), 0))


def pointer(tensor: torch.Tensor) -> tuple[int, Any]:
    """A tensor's address as an argument."""
    return tensor.data_ptr(), ctypes.c_void_p
