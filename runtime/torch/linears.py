"""A model's linear layers computed by an archive: which ones, fused how, and back again.

Knows the operator, and what Hugging Face's models call their layers.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from ..program.tensor import dtype_name
from ..serve.library import Library
from .layers import Layer, Report, check_overlap, choose
from .operator import ALIGNMENT_BYTES, GEMM, refuse_gradient, register

_log = logging.getLogger(__name__)


class _Kept:
    """Keeps a library alive for a module; copies of the module share it, and it cannot be pickled."""

    def __init__(self, lib: Library) -> None:
        self.lib = lib

    def __deepcopy__(self, _memo: Any) -> _Kept:
        return self

    def __reduce__(self) -> Any:
        raise ArgumentError(
            "a model that calls an archive cannot be pickled; save its state_dict, or call "
            "runtime.torch.restore_linears first"
        )


class _Gemm:
    """One GEMM of one or more linear layers that read the same input: rows of `weight` are theirs, one after another.

    `weight` and `bias` are the memory of the layers' Parameters, which are views of them where there are several.
    """

    def __init__(self, kept: _Kept, signature: Signature, layers: tuple[nn.Linear, ...]) -> None:
        self.kept, self.number = kept, register(kept.lib)
        self.epilogue, self.overlap = signature.parts.activation_word, signature.overlap
        self.layers = layers
        self.parameters = tuple(p for layer in layers for p in (layer.weight, layer.bias))
        ends = [sum(layer.out_features for layer in layers[: i + 1]) for i in range(len(layers))]
        self.rows = tuple((end - layer.out_features, end) for layer, end in zip(layers, ends, strict=True))
        self.weight = _lay_out([layer.weight for layer in layers], signature.parts.interleaved)
        self.bias: torch.Tensor | None = None
        if layers[0].bias is not None:
            self.bias = _lay_out([layer.bias for layer in layers], signature.parts.interleaved)
        self.first = [
            (layer.weight.data_ptr(), layer.bias.data_ptr() if self.bias is not None else 0) for layer in layers
        ]
        # The input and the result of the layer that was called first, and which layers had theirs, until all had.
        self.pending: tuple[torch.Tensor, torch.Tensor, int] | None = None
        _gemms[id(self)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        self.__dict__.update(state)
        _gemms[id(self)] = self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        refuse_gradient("a layer that replace_linears took", (x, *self.parameters))
        if not _is_in_place(id(self)):
            raise ArgumentError(
                "the weights of layers that were fused were moved or replaced since; call "
                "runtime.torch.restore_linears(model) and replace_linears again"
            )
        result: torch.Tensor = GEMM(
            self.number, x.contiguous(), self.weight, bias=self.bias, epilogue=self.epilogue, overlap=self.overlap
        )
        return result

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The columns of layer `index`, of the GEMM that the first of the layers to see this very `x` has run."""
        pending, bit = self.pending, 1 << index
        if pending is None or pending[0] is not x or pending[2] & bit:
            pending = (x, self(x), 0)
        served = pending[2] | bit
        self.pending = None if served == (1 << len(self.layers)) - 1 else (x, pending[1], served)
        start, end = self.rows[index]
        return pending[1][..., start:end]


_gemms: weakref.WeakValueDictionary[int, _Gemm] = weakref.WeakValueDictionary()  # by their `id`, as `alive` is


@torch.compiler.assume_constant_result
def _is_in_place(identity: int) -> bool:
    """Whether the Parameters of the layers of the `_Gemm` with this `id` are still where they were laid out."""
    group = _gemms[identity]
    for layer, addresses in zip(group.layers, group.first, strict=True):
        own = layer._parameters  # an attribute of a module costs ten times as much
        for name, address in zip(("weight", "bias"), addresses, strict=True):
            p = own[name]
            if (0 if p is None else p.data_ptr()) != address:
                return False
    return True


def _lay_out(parameters: list[nn.Parameter], interleaved: bool) -> torch.Tensor:
    """The parameters in one tensor, of which they become views: one after another, or a row of each in turn."""
    with torch.inference_mode(False), torch.no_grad():
        if interleaved:
            whole = torch.stack([p.data for p in parameters], 1).flatten(0, 1)
        else:
            whole = torch.cat([p.data for p in parameters])
        start = 0
        for i, p in enumerate(parameters):
            end = start + p.shape[0]
            p.data = whole[i :: len(parameters)] if interleaved else whole[start:end]
            start = end
    return whole


class _AotLinear(nn.Linear):
    """A linear layer that an archive computes; what it was, `__class__` apart, it still is."""

    _aot_number: int
    _aot_overlap: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        refuse_gradient("a layer that replace_linears took", (input, weight, bias))
        result: torch.Tensor = GEMM(self._aot_number, input.contiguous(), weight, bias=bias, overlap=self._aot_overlap)
        return result


class _AotPart(nn.Linear):
    """A linear layer whose GEMM is that of others too."""

    _aot_gemm: _Gemm
    _aot_index: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._aot_gemm.part(self._aot_index, input)


class _AotGated:
    """Mixed into the class of an MLP, before it: gate, up and what joins them are one GEMM, as long as these are what
    they were and nobody watches them; else the class's own forward computes, with Parameters that are views."""

    _aot_gemm: _Gemm
    _aot_parts: tuple[Any, ...]  # of the GEMM: gate_proj, up_proj and act_fn, which is None where it is no module
    down_proj: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        mlp: Any = self
        gate, up, act = self._aot_parts
        same = mlp.gate_proj is gate and mlp.up_proj is up and mlp._modules.get("act_fn") is act
        if not same or _watched(self._aot_parts) or len(args) + len(kwargs) != 1:
            result: torch.Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
            return result
        (x,) = (*args, *kwargs.values())
        return cast(torch.Tensor, self.down_proj(self._aot_gemm(x)))


def _watched(modules: Iterable[nn.Module | None]) -> bool:
    """Whether one of these does more than its class says: hooks see it run, or it has a forward of its own."""
    return any(
        module is not None and ("forward" in module.__dict__ or any(getattr(module, hooks) for hooks in _HOOKS))
        for module in modules
    )


@functools.lru_cache(None)
def _gated_class(cls: Any) -> Any:
    return type(cls.__name__, (_AotGated, cls), {"__module__": cls.__module__, "_aot_class": cls})


def replace_linears(model: nn.Module, lib: Library, *, fuse: bool = True, overlap: str = "serial") -> Report:
    """Let `lib` compute the nn.Linear layers of `model` that it has a checked kernel for, in place.

    Checked are kernels of tuned entries, and those that a table predicts whose functions were checked.

    Modules and Parameters stay the same objects (only modules' classes change), so hooks, ties and the keys of the
    state_dict do. With `fuse`, where the archive has that signature:

    - gate_proj and up_proj of a module whose children are these, down_proj and act_fn, and which is seen to compute
      down_proj(act_fn(gate_proj(x)) * up_proj(x)), become one gated GEMM;
    - q_proj, k_proj and v_proj of a module that also has o_proj become one GEMM, which the first of them runs for all
      that are given the same tensor; they return views of its columns. x may not be written between.

    Their weights are laid out once in one tensor, of which the Parameters become views; other memory is not taken.
    `overlap` is what is promised of kernels before each layer (`runtime.program.operation.OVERLAPS`): "weights" is
    right for layers whose weights are written by nothing that may still run. A model that was done is left as it is.

    Raises:
        ArgumentError: `lib` is no open library, `overlap` is unknown, or the model has layers of another library.
        DeviceError: the archive has nothing for this GPU.
    """
    check_overlap(overlap)
    register(lib)
    return _Replacement(model, lib, overlap).run(fuse)


@torch.inference_mode(False)
@torch.no_grad()
def restore_linears(model: nn.Module) -> int:
    """Undo `replace_linears`, and say for how many layers.

    Each is an nn.Linear again, and Parameters that were views of one tensor are in memory of their own.
    """
    count = 0
    for module in model.modules():
        state = vars(module)
        if isinstance(module, _AotGated):
            module.__class__ = type(module)._aot_class  # type: ignore[attr-defined]
        elif "_aot_layer" in state:
            count += 1
            module.__class__ = nn.Linear
            if state["_aot_layer"].fused_with:
                for p in module.parameters(recurse=False):
                    p.data = p.data.clone(memory_format=torch.contiguous_format)
        for name in [name for name in state if name.startswith("_aot_")]:
            del state[name]
    return count


# What joins gate and up, by the activation of gate alone.
_GATES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": nn.functional.silu,
    "geglu": nn.functional.gelu,
    "geglu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
}
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_ATTENTION = ("q_proj", "k_proj", "v_proj")
# What gates and what they gate are made to reach, to see a clamp; products of f16 must not overflow.
_FAR = {torch.float16: 64.0, torch.bfloat16: 1e3, torch.float32: 1e3}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Replacement:
    """One run of `replace_linears`."""

    def __init__(self, model: nn.Module, lib: Library, overlap: str) -> None:
        self.model, self.lib, self.overlap, self.kept = model, lib, overlap, _Kept(lib)
        self.names = {module: name for name, module in model.named_modules()}
        self.done: dict[nn.Module, Layer] = {}
        self.unfused: dict[nn.Module, str] = {}  # why not, of layers that looked as if they could be
        self.users: Counter[int] = Counter()  # of storages, by address: how many Parameters of modules lie there
        for module in self.names:
            for p in module.parameters(recurse=False):
                self.users[_storage(p)] += 1

    def run(self, fuse: bool) -> Report:
        linears = [module for module in self.names if isinstance(module, nn.Linear)]
        for module in linears:
            if (layer := vars(module).get("_aot_layer")) is not None:
                if vars(module)["_aot_kept"].lib is not self.lib:
                    raise ArgumentError(
                        f"{layer.name} is served by another library; call runtime.torch.restore_linears first"
                    )
                self.done[module] = layer
        for parent in list(self.names) if fuse else []:
            layers = [getattr(parent, name, None) for name in (*_ATTENTION, "o_proj")]
            if all(isinstance(layer, nn.Linear) for layer in layers):
                self._fuse(parent, tuple(layers[:3]), self._fuse_attention)
            children = {name for name, _ in parent.named_children()}
            if children in (set(_MLP), set(_MLP[:3])) and hasattr(parent, "act_fn"):
                self._fuse(parent, (parent.gate_proj, parent.up_proj), self._fuse_mlp)
        for module in linears:
            if module not in self.done:
                self.done[module] = self._replace(module)
        return Report(tuple(self.done[module] for module in linears))

    def _replace(self, module: nn.Linear) -> Layer:
        name, unfused = self.names[module], self.unfused.get(module, "")
        problem = _problem(module, self.lib)
        if problem:
            return Layer(name, reason=problem)
        parts = Epilogue(bias=module.bias is not None)
        signature, reason = choose(self.lib, self._signature(module.weight, module.out_features, parts))
        if signature is None:
            return Layer(name, reason=reason)
        module.__class__ = _AotLinear
        module._aot_number, module._aot_overlap = register(self.lib), signature.overlap
        return self._mark(module, Layer(name, signature.key(), reason=unfused and f"not fused: {unfused}"))

    def _signature(self, weight: torch.Tensor, n: int, parts: Epilogue) -> Signature:
        dtype = dtype_name(weight.dtype)
        n_major = weight.stride(1) != 1 < weight.shape[1] and weight.stride(0) == 1
        major, k = "n" if n_major else "k", weight.shape[1]
        return Signature(dtype, dtype, dtype, "f32", parts.word(), n, k, b_major=major, overlap=self.overlap)

    def _mark(self, module: nn.Linear, layer: Layer) -> Layer:
        vars(module)["_aot_layer"], vars(module)["_aot_kept"] = layer, self.kept
        self.done[module] = layer
        return layer

    def _fuse(
        self, parent: nn.Module, layers: tuple[nn.Linear, ...], way: Callable[[nn.Module, tuple[nn.Linear, ...]], str]
    ) -> None:
        if any(layer in self.done for layer in layers) or not all(isinstance(x, nn.Linear) for x in layers):
            return
        problem = self._fusing_problem(layers) or way(parent, layers)
        if problem:
            self.unfused |= dict.fromkeys(layers, problem)

    def _fusing_problem(self, layers: tuple[nn.Linear, ...]) -> str:
        for layer in layers:
            if problem := _problem(layer, self.lib):
                return f"{self.names[layer]} {problem}"
            if not layer.weight.is_contiguous():
                return f"{self.names[layer]} is not contiguous"
            if any(self.users[_storage(p)] != 1 for p in layer.parameters(recurse=False)):
                return f"{self.names[layer]} shares memory with another Parameter"
        kinds = {(x.weight.dtype, x.in_features, x.bias is None) for x in layers}
        return "" if len(kinds) == 1 else "their element types, in_features or biases differ"

    def _fuse_attention(self, _parent: nn.Module, layers: tuple[nn.Linear, ...]) -> str:
        parts = Epilogue(bias=layers[0].bias is not None)
        rows = sum(layer.out_features for layer in layers)
        signature, reason = choose(self.lib, self._signature(layers[0].weight, rows, parts))
        if signature is None:
            return reason
        group = _Gemm(self.kept, signature, layers)
        for index, layer in enumerate(layers):
            layer.__class__ = _AotPart
            layer._aot_gemm, layer._aot_index = group, index
        self._mark_fused(signature, layers)
        return ""

    def _fuse_mlp(self, parent: nn.Module, layers: tuple[nn.Linear, ...]) -> str:
        seen = (*layers, parent._modules.get("act_fn"))
        if _watched(seen):
            return "a hook is registered on a layer that would not be called"
        if layers[0].out_features != layers[1].out_features:
            return "gate_proj and up_proj differ in size"
        gate = _gate_of(parent.act_fn)
        if not gate:
            return f"act_fn is none of silu, gelu and tanh gelu but {type(parent.act_fn).__name__}"
        reason = ""
        for interleaved in (False, True):
            parts = Epilogue(gate, interleaved, bias=layers[0].bias is not None)
            wanted = self._signature(layers[0].weight, 2 * layers[0].out_features, parts)
            signature, why = choose(self.lib, wanted)
            reason = reason or why
            if signature is None:
                continue
            if problem := _not_gated(parent):
                return problem
            parent.__class__ = _gated_class(type(parent))  # type: ignore[arg-type]
            vars(parent)["_aot_gemm"], vars(parent)["_aot_parts"] = _Gemm(self.kept, signature, layers), seen
            self._mark_fused(signature, layers)
            return ""
        return reason

    def _mark_fused(self, signature: Signature, layers: tuple[nn.Linear, ...]) -> None:
        names = [self.names[layer] for layer in layers]
        for layer, name in zip(layers, names, strict=True):
            self._mark(layer, Layer(name, signature.key(), tuple(other for other in names if other != name)))


def _storage(p: torch.Tensor) -> int:
    """What two tensors have in common only if they share memory."""
    try:
        return p.untyped_storage().data_ptr() or id(p)
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return id(p)


def _problem(module: nn.Linear, lib: Library) -> str:
    """Why the archive cannot compute this layer, whatever its shape; empty if it can."""
    if type(module) is not nn.Linear:
        return f"is a {type(module).__name__}, not an nn.Linear"
    if "forward" in vars(module):
        return "has a forward of its own, set on the module"
    weight, bias = module.weight, module.bias
    for name, p in (("weight", weight), ("bias", bias)):
        if p is None and name == "bias":
            continue
        if name not in module._parameters or type(p) is not nn.Parameter or type(p.data) is not torch.Tensor:
            return f"has a {name} that is not a plain Parameter but {type(p).__name__}"
        if str(p.device) != lib.device:
            return f"has its {name} on {p.device}; the library serves {lib.device}"
        if module.training and p.requires_grad:
            return f"is in training; no gradient is recorded: call model.eval() or {name}.requires_grad_(False)"
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"has element type {weight.dtype}; an nn.Linear here has bfloat16, float16 or float32"
    if bias is not None and (bias.dtype != weight.dtype or not bias.is_contiguous()):
        return "has a bias of another element type, or not contiguous"
    row_bytes = max(weight.stride()) * weight.element_size()
    if min(weight.stride()) != 1 or row_bytes % ALIGNMENT_BYTES or weight.data_ptr() % ALIGNMENT_BYTES:
        return (
            f"has a weight of strides {tuple(weight.stride())} at address {weight.data_ptr():#x}: not contiguous, or "
            f"its rows do not begin at multiples of {ALIGNMENT_BYTES} bytes"
        )
    return ""


def _gate_of(act: Any) -> str:
    """The gate whose activation computes what `act` does, tried on numbers; empty if it is none."""
    far = torch.logspace(1, 4, 33, device="cpu")  # where something may be clamped
    x = torch.cat([torch.linspace(-8, 8, 1025, device="cpu"), far, -far])
    try:
        with torch.no_grad():
            found = act(x)
    except Exception as error:  # whatever somebody's module raises
        _log.debug("an activation could not be tried: %s", error)
        return ""
    if not isinstance(found, torch.Tensor) or found.shape != x.shape:
        return ""
    near = (gate for gate, known in _GATES.items() if torch.allclose(found, known(x), rtol=1e-6, atol=1e-6))
    return next(near, "")


def _not_gated(mlp: Any) -> str:
    """Why this module's own forward is not seen to compute down(act(gate(x)) * up(x)); empty if it is."""
    if "forward" in vars(mlp):
        return "the module has a forward of its own, set on it"
    weight = mlp.gate_proj.weight
    x = torch.arange(2 * weight.shape[1], device=weight.device).sin().to(weight.dtype).view(1, 2, -1)
    try:
        with torch.no_grad():
            largest = max(float(proj(x).abs().max()) for proj in (mlp.gate_proj, mlp.up_proj))
            return _differs(mlp, x) or _differs(mlp, x * (_FAR[weight.dtype] / largest if largest else 1.0))
    except Exception as error:  # whatever somebody's module raises
        return f"the module could not be tried: {error}"


def _differs(mlp: Any, x: torch.Tensor) -> str:
    """Why a forward is not seen to compute what `_not_gated` says, of `x`; empty if it is."""
    found = type(mlp).forward(mlp, x)
    wanted = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)).float()
    largest = wanted.abs().max()
    if not 0 < largest < float("inf"):
        return "the weights are zero or not finite, so what the module computes cannot be seen"
    if found.shape != wanted.shape or (found.float() - wanted).abs().max() > 0.01 * largest:
        return "the module does not compute down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    return ""
