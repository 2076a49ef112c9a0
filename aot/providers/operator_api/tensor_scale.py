"""A factor of the whole product for the Operator API's block-scaled kernel, which takes none: NVFP4's second level.

The kernel's own `epilogue_op` is of no use for it: it sees numbers that are already rounded to D's type, which in f16
are infinite long before the factor makes them small, and only what is known when it is compiled. So the factor goes to
the kernel beside the parameters of its tile scheduler, and is multiplied in where accumulators are loaded to be
converted. Imports the DSL only when called.
"""

from __future__ import annotations

from typing import Any


def with_tensor_scale(impl: Any) -> Any:
    """A kernel like `impl`, a `PersistentDenseBlockScaledGemmKernel`, that multiplies all sums by the one f32 number of
    its attribute `tensor_scale`, a tensor (1), which is to be set before it is called; `multiplies` says afterwards
    whether the kernel, as it was traced, does so."""
    from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values

    class Scaled:
        """Registers of sums that are multiplied when they are loaded."""

        def __init__(self, registers: Any, factor: Any, kernel: Any) -> None:
            self.registers, self.factor, self.kernel = registers, factor, kernel

        def load(self) -> Any:
            self.kernel.multiplies = True
            return self.registers.load() * self.factor

    of: Any = type(impl)

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

        def epilog_smem_copy_and_partition(self, *args: Any) -> tuple[Any, Any, Any]:
            """The copy from registers to shared memory, by whose `retile` the kernel sees sums before it converts."""
            tiled_copy, registers, shared = super().epilog_smem_copy_and_partition(*args)
            kernel, factor = self, self.device_tensor_scale[0]
            of_copy: Any = type(tiled_copy)

            class Copy(of_copy):
                # Loops make such objects anew, by their class.
                def retile(self, sums: Any) -> Scaled:
                    return Scaled(super().retile(sums), factor, kernel)

            return Copy(tiled_copy.op, tiled_copy._trait), registers, shared

    m, n, _ = impl.mma_tiler
    return Kernel(impl.sf_vec_size, (m, n), impl.cluster_shape_mn)
