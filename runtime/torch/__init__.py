"""An archive inside torch: a custom operator, linear layers that call it, and a pass for torch.compile.

Imported by name only (`import runtime.torch`), since it needs torch. `gemm` is `Library.gemm` as the operator
`cute_aot::gemm`, and `call` is `Library.call` as an operator of each operation's name, but that of RMSNorm with a
residual, which gives two tensors, is `add_rmsnorm`; `replace_linears` puts GEMMs into a model; `inductor_options` lets
Inductor put them into what it compiles, and `autotune_choices` lets Inductor measure the archive's kernels beside its
own. `moe` is the experts of a mixture, around `grouped_gemm`, and `register_experts` puts it into models of
transformers, of which some need `transpose_experts`. `quantise_nvfp4` and its like make tensors with scales of blocks.
Knows nothing of kernels: all that is computed is computed by the library.
"""

from .autotune import GemmChoices, autotune_choices
from .experts import grouped_gemm, moe
from .inductor import GemmPass, inductor_options
from .layers import Layer, Report
from .linears import replace_linears, restore_linears
from .norms import add_rmsnorm
from .operations import call
from .operator import gemm, register
from .quantise import Quantised, quantise_mxfp4, quantise_mxfp8, quantise_nvfp4
from .transformers_experts import register_experts, transpose_experts
from .weights import PreparedWeight, prepare_weight

__all__ = [
    "GemmChoices",
    "GemmPass",
    "Layer",
    "PreparedWeight",
    "Quantised",
    "Report",
    "add_rmsnorm",
    "autotune_choices",
    "call",
    "gemm",
    "grouped_gemm",
    "inductor_options",
    "moe",
    "prepare_weight",
    "quantise_mxfp4",
    "quantise_mxfp8",
    "quantise_nvfp4",
    "register",
    "register_experts",
    "replace_linears",
    "restore_linears",
    "transpose_experts",
]
