"""A factor of the whole product for the Operator API's block-scaled kernels, which take none: NVFP4's second level.

A kernel's own `epilogue_op` is of no use for it: it sees numbers that are already rounded to D's type, which in f16
are infinite long before the factor makes them small, and only what is known when it is compiled. So the factor goes to
the kernel beside the parameters of its tile scheduler, and is multiplied in where accumulators are loaded to be
converted. Imports the DSL only when called.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any


def with_tensor_scale(impl: Any) -> Any:
    """A kernel like `impl` that multiplies all sums by the one f32 number of its attribute `tensor_scale`, a tensor
    (1), which is to be set before it is called; `multiplies` says afterwards whether the kernel, as it was traced, does
    so.

    `impl` is one of Blackwell's, whose methods store D, or of Rubin's, for which a function of the DSL does.
    """
    of = type(impl)
    kernel = copy.copy(impl)
    kernel.__class__ = _stored_by_the_dsl(of) if hasattr(of, "kernel_impl") else _stored_by_its_methods(of)
    return kernel


def _stored_by_its_methods(of: Any) -> Any:
    class Kernel(_taking_a_factor(of)):  # type: ignore[misc]
        def epilog_smem_copy_and_partition(self, *args: Any) -> tuple[Any, Any, Any]:
            """The copy from registers to shared memory, by whose `retile` the kernel sees sums before it converts."""
            tiled_copy, registers, shared = super().epilog_smem_copy_and_partition(*args)
            return _multiplying(tiled_copy, self), registers, shared

    return Kernel


def _stored_by_the_dsl(of: Any) -> Any:
    class Kernel(_taking_a_factor(of)):  # type: ignore[misc]
        def kernel_impl(self, *args: Any) -> None:
            """All that a CTA does."""
            with _multiplying_epilogue(self):
                super().kernel_impl(*args)

    return Kernel


@contextlib.contextmanager
def _multiplying_epilogue(kernel: Any) -> Iterator[None]:
    """Let the DSL's epilogue multiply by the factor of `kernel`, in this process, for as long as the context lasts."""
    from cutlass.utils.gemm import sm100

    real = sm100.epilogue_smem_copy_and_partition

    def partition(*args: Any) -> tuple[Any, Any, Any]:
        tiled_copy, registers, shared = real(*args)
        return _multiplying(tiled_copy, kernel), registers, shared

    sm100.epilogue_smem_copy_and_partition = partition
    try:
        yield
    finally:
        sm100.epilogue_smem_copy_and_partition = real


def _taking_a_factor(of: Any) -> Any:
    """A class of kernels like `of` that have the factor on the device, as `device_tensor_scale`."""
    from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values

    class Kernel(of):
        tensor_scale: Any = None
        device_tensor_scale: Any = None
        multiplies = False

        def _compute_grid(self, *args: Any) -> tuple[Any, Any]:
            scheduler, grid = of._compute_grid(*args)
            kernel, factor = self, self.tensor_scale
            of_parameters: Any = type(scheduler)

            class Parameters(of_parameters):
                """Parameters of the tile scheduler and the factor, which the kernel takes as one argument. On the
                device there are the parameters alone, and the factor is found as `device_tensor_scale`."""

                def __init__(self) -> None:
                    self.__dict__.update(scheduler.__dict__)

                def __extract_mlir_values__(self) -> list[Any]:
                    return [*extract_mlir_values(factor), *super().__extract_mlir_values__()]

                def __new_from_mlir_values__(self, values: list[Any]) -> Any:
                    count = len(extract_mlir_values(factor))
                    kernel.device_tensor_scale = new_from_mlir_values(factor, values[:count])
                    return super().__new_from_mlir_values__(values[count:])

            return Parameters(), grid

    return Kernel


def _multiplying(tiled_copy: Any, kernel: Any) -> Any:
    """A copy like `tiled_copy` out of registers, which are multiplied by the factor of `kernel` when loaded."""
    factor = kernel.device_tensor_scale[0]
    of_copy: Any = type(tiled_copy)

    class Scaled:
        """Registers of sums that are multiplied when they are loaded."""

        def __init__(self, registers: Any) -> None:
            self.registers = registers

        def load(self) -> Any:
            kernel.multiplies = True
            return self.registers.load() * factor

    class Copy(of_copy):
        # Loops make such objects anew, by their class.
        def retile(self, sums: Any) -> Scaled:
            return Scaled(super().retile(sums))

    return Copy(tiled_copy.op, tiled_copy._trait)
