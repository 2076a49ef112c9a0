"""Grouped GEMM, and all that a mixture's experts do, inside torch; the latter is the operator `cute_aot::moe`.

That is four operations, and no word with the host: `moe_permute` puts rows of tokens in the order of experts,
`grouped_gemm` multiplies them with gate and up and applies the gate, another with down, and `moe_combine` adds up what
the experts of each token made. With weights in e4m3 rows are quantised by `moe_permute`, and between the two GEMMs by
`quantise`, a fifth. Only the device reads which experts a token has. Knows nothing of models and routers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch

from ..errors import AotError, ArgumentError
from ..grouped_gemm import EPILOGUES_OF_GROUPS, OVERLAP_OF_EXPERTS, Signature, active_groups
from ..numbers.dtypes import DTYPES
from ..numbers.epilogue import EPILOGUES
from ..numbers.quantised import LEAST_TILES_OF_QUANTISING, MOST_ROWS_OF_A_GROUP, NARROW, scale_shape
from ..numbers.scaling import SCALE_BLOCK, SCALINGS, extent_of
from ..numbers.weights import FORMATS
from ..program.tensor import dtype_name
from ..quantise import Signature as Quantise
from ..serve.library import Library
from .operations import call
from .operator import OPERATORS, TAGS, bare, library_of, number_of, refuse_gradient, register
from .weights import PreparedWeight

if TYPE_CHECKING:
    from typing import Unpack

_GIVEN = "int library, Tensor hidden, Tensor w13, Tensor w2, Tensor topk_ids, Tensor topk_weights"
_TENSORS = "expert_map", "w13_bias", "w2_bias", "w13_scale", "w2_scale"  # by keyword
_USUAL = "swiglu"
_ON_INPUT = "apply_router_weight_on_input"
_WORDS = (
    f"{', '.join(f'Tensor? {name}=None' for name in _TENSORS)}, str activation='{_USUAL}', "
    f"str overlap='{OVERLAP_OF_EXPERTS}', bool {_ON_INPUT}=False, int global_experts=0"
)
_ID_TYPES = torch.int32, torch.int64
_MOST_ID = (1 << 31) - 1  # which no expert has
_WEIGHT_TYPES = torch.float32, torch.float16, torch.bfloat16
# By their type, the scalings of prepared weights, two elements of which are a unit of torch's.
_OF_4_BITS = {
    getattr(torch, DTYPES[of].torch): [SCALINGS[word] for word in FORMATS if of in SCALINGS[word].of_b]
    for of in dict.fromkeys(form.codes for form in FORMATS.values())
    if hasattr(torch, DTYPES[of].torch)
}
_UNIT = 2


def grouped_gemm(lib: Library, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, **more: Any) -> Any:
    """`lib.grouped_gemm(a, b, ends, ...)` as `call` does it: `out`, and the words `epilogue` and `overlap`."""
    return call(lib, "grouped_gemm", a, b, ends, **more)


class MoeOptions(TypedDict, total=False):
    """What `moe` takes by keyword besides `out`."""

    expert_map: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    activation: str
    overlap: str
    apply_router_weight_on_input: bool
    global_experts: int


OPERATORS.define(f"moe({_GIVEN}, *, {_WORDS}) -> Tensor", tags=TAGS)
OPERATORS.define(f"moe_out({_GIVEN}, Tensor(a!) out, *, {_WORDS}) -> ()", tags=TAGS)


def moe(
    lib: Library,
    hidden: torch.Tensor,
    w13: torch.Tensor | PreparedWeight,
    w2: torch.Tensor | PreparedWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    **more: Unpack[MoeOptions],
) -> torch.Tensor:
    """The experts of a mixture: out[t] = sum over j of topk_weights[t, j] * down(act(gate_up(hidden[t]))) of the expert
    topk_ids[t, j], in eager mode, inside torch.compile (fullgraph, dynamic T) and in CUDA graphs.

    hidden (..., K); w13 (experts, 2N, K), rows of gate before those of up, as vLLM and transformers store them, and w2
    (experts, K, N); topk_ids and topk_weights (..., top_k), or (T, top_k) with T rows of hidden. An id outside the
    range of experts adds nothing, and so does one that `expert_map` (global experts), i32, takes to -1: with it, ids
    are global, and the map says which of the experts here each is. Functions are chosen for the rows that these are
    expected to have, if all experts have as many; how many there are in all `global_experts` says where no map does, as
    where ids of those elsewhere are -1. `w13_bias` (experts, 2N) is added before the
    activation, its elements in the order of w13's rows, and `w2_bias` (experts, K) to what down makes, so before router
    weights; both are of hidden's type. `out`, of hidden's shape, is written and returned; without it a new tensor of
    hidden's type is.

    Weights in e4m3 come with `w13_scale` and `w2_scale`, f32, by which they are multiplied: (experts, 2N/128, K/128)
    and (experts, K/128, N/128), one for each 128 x 128 block, or (experts, 2N) and (experts, K), one for each output
    channel. Rows of hidden, and rows between both GEMMs, are then rounded to e4m3, with a scale for each 128 elements,
    or for each row, that is made of them: the largest magnitude over 448.

    Weights of 4 bits are as `prepare_weight` makes them of those of all experts: either w13 and w2 are what it returns,
    or they are `b`, and `w13_scale` and `w2_scale` are `scale_b`. Rows are multiplied as they are.

    It is four operations: moe_permute, grouped_gemm with `activation`, grouped_gemm, moe_combine; of e4m3 quantise too,
    between both GEMMs, unless the first of these writes e4m3 with scales itself (`quantises_in_gemm`). int64 ids take
    two kernels of torch's besides, and weights that are not float32 one.
    Between launches rows of hidden's type are kept: T * top_k of K, N and K; of e4m3 also of K and of N in 8 bits. Sums
    are in f32, rows of experts are rounded to hidden's type, and the top-k are added in f32 in the order of j, so equal
    calls give equal bits.

    By keyword also `activation`, "swiglu" or another gated epilogue of grouped_gemm ("swiglu_interleaved": rows of gate
    and up take turns; GPT-OSS's is "swiglu_clamped_interleaved"), or one that is not gated, with w13 (experts, N, K);
    and `overlap`, the most that functions of grouped_gemm may rely on: "launch", the usual one, lets each launch begin
    while the one before it ends, and "serial" does not. What the archive has for less serves where it has nothing for
    that.

    Raises:
        KernelMiss: the archive lacks a function of one of these; the message names it, and the nearest entries.
        ArgumentError: the tensors do not go together, or a gradient would have to be recorded.
    """
    number = number_of(lib)
    if isinstance(w13, PreparedWeight):
        w13, more["w13_scale"] = _parts(w13, more.get("w13_scale"))
    if isinstance(w2, PreparedWeight):
        w2, more["w2_scale"] = _parts(w2, more.get("w2_scale"))
    refuse_gradient("moe", (hidden, w13, w2, topk_weights, more.get("w13_bias"), more.get("w2_bias")))
    given = hidden, w13, w2, topk_ids, topk_weights
    if out is None:
        made: torch.Tensor = torch.ops.cute_aot.moe.default(number, *given, **more)
        return made
    torch.ops.cute_aot.moe_out.default(number, *given, out, **more)
    return out


def _parts(weight: PreparedWeight, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A prepared weight and its scales, which must not be given besides."""
    if scale is not None:
        raise ArgumentError("a PreparedWeight has its scales with it; leave w13_scale and w2_scale out")
    return weight.b, weight.scale_b


def columns_of(weight: torch.Tensor) -> Any:
    """How many elements a row of a weight has."""
    return weight.shape[-1] * (_UNIT if weight.dtype in _OF_4_BITS else 1)


def _check(given: Sequence[torch.Tensor], more: Mapping[str, Any]) -> None:
    """Raise ArgumentError where shapes or types do not go together; extents may be symbols. `more` is what was given by
    keyword. What no kernel takes is for the library to say."""
    (hidden, w13, w2, ids, weights), activation = given, more.get("activation", _USUAL)
    if activation not in EPILOGUES_OF_GROUPS or activation == "none":
        known = ", ".join(e for e in EPILOGUES_OF_GROUPS if e != "none")
        raise ArgumentError(f"activation must be one of {known}; found {activation!r:.50}")
    if w13.dim() != 3 or w2.dim() != 3 or hidden.dim() < 1:
        raise ArgumentError(
            f"moe takes hidden (..., K), w13 (experts, 2N, K), w2 (experts, K, N); found {tuple(hidden.shape)}, "
            f"{tuple(w13.shape)}, {tuple(w2.shape)}"
        )
    (experts, wide, _), k, per = w13.shape, columns_of(w13), 2 if EPILOGUES[activation].gated else 1
    if hidden.shape[-1] != k or (*w2.shape[:2], columns_of(w2)) != (experts, k, wide // per) or wide % per:
        raise ArgumentError(
            f"moe with {activation} takes hidden (..., K), w13 (experts, {'2N' if per == 2 else 'N'}, K) and w2 "
            f"(experts, K, N); found {tuple(hidden.shape)}, {(experts, wide, k)} and "
            f"{(*w2.shape[:2], columns_of(w2))}"
        )
    if ids.dtype not in _ID_TYPES or weights.dtype not in _WEIGHT_TYPES:
        raise ArgumentError(
            f"topk_ids must be int32 or int64 and topk_weights float32, float16 or bfloat16; found {ids.dtype} and "
            f"{weights.dtype}"
        )
    if ids.dim() < 1 or ids.shape != weights.shape or ids.numel() * k != hidden.numel() * ids.shape[-1]:
        raise ArgumentError(
            f"topk_ids and topk_weights must both be (..., top_k), of as many tokens as hidden {tuple(hidden.shape)}; "
            f"found {tuple(ids.shape)} and {tuple(weights.shape)}"
        )
    if globally := more.get("global_experts", 0):
        mapped = more.get("expert_map")
        if globally < experts or (mapped is not None and len(mapped) != globally):
            raise ArgumentError(
                f"global_experts must be 0, or at least the {experts} experts of w13 and as many as expert_map has; "
                f"found {globally}"
            )
    for of, weight in (("w13", w13), ("w2", w2)):
        _check_bias(of, weight, more, hidden)
        _check_scale(of, weight, more.get(f"{of}_scale"))
    scales = [more.get(f"{of}_scale") for of in ("w13", "w2")]
    if len({None if scale is None else scale.dim() for scale in scales}) > 1:
        raise ArgumentError("w13_scale and w2_scale come together, both for blocks or both for output channels")
    if w13.dtype != w2.dtype and not {w13.dtype, w2.dtype}.isdisjoint(_OF_4_BITS):
        raise ArgumentError(f"w13 and w2 of 4 bits must be of one type, found {w13.dtype} and {w2.dtype}")


def _check_bias(of: str, weight: torch.Tensor, more: Mapping[str, Any], hidden: torch.Tensor) -> None:
    """Raise ArgumentError where the bias of a weight (experts, N, K) is there, and is not (experts, N) in hidden's
    type."""
    bias = more.get(f"{of}_bias")
    if bias is not None and (tuple(bias.shape) != tuple(weight.shape[:2]) or bias.dtype != hidden.dtype):
        raise ArgumentError(
            f"{of}_bias must have one number for each row of each expert in {of}, {tuple(weight.shape[:2])}, in "
            f"hidden's type, {hidden.dtype}; found {tuple(bias.shape)} in {bias.dtype}"
        )


def _check_scale(of: str, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raise ArgumentError where a weight (experts, N, K) in e4m3 or in 4 bits lacks its scales, or they are not as
    `moe` says."""
    if (scale is not None) != (weight.dtype == torch.float8_e4m3fn or weight.dtype in _OF_4_BITS):
        raise ArgumentError(
            f"{of} in float8_e4m3fn or in 4 bits, and no other, comes with {of}_scale; found {weight.dtype} and "
            f"{'no scale' if scale is None else f'a scale of {tuple(scale.shape)}'}"
        )
    if scale is None:
        return
    experts, n, k = weight.shape
    if weight.dtype in _OF_4_BITS:
        scalings = _OF_4_BITS[weight.dtype]
        known = {"N": n, "K": columns_of(weight)}
        shapes = [(experts, *(extent_of(axis, known) for axis in scaling.axes("b"))) for scaling in scalings]
        dtype = getattr(torch, DTYPES[scalings[0].dtype].torch)
        if scale.dtype != dtype or tuple(scale.shape) not in shapes:
            raise ArgumentError(
                f"{of}_scale of {of} in {weight.dtype} must be {dtype} {' or '.join(map(str, shapes))}, found "
                f"{scale.dtype} {tuple(scale.shape)}; runtime.torch.prepare_weight makes both"
            )
        return
    blocks = (experts, -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
    if scale.dtype != torch.float32 or tuple(scale.shape) not in (blocks, (experts, n)):
        raise ArgumentError(
            f"{of}_scale must be float32 {blocks}, one for each block of 128 x 128, or {(experts, n)}, one for each "
            f"output channel; found {scale.dtype} {tuple(scale.shape)}"
        )


def _moe_out(library: int, *given: torch.Tensor, **more: Any) -> None:
    """The launches; `more` are `MoeOptions`."""
    hidden, w13, w2, topk_ids, topk_weights, out = map(bare, given)
    _check((hidden, w13, w2, topk_ids, topk_weights), more)
    if out.shape != hidden.shape:
        raise ArgumentError(f"out must have the shape of hidden, {tuple(hidden.shape)}, found {tuple(out.shape)}")
    lib, top_k, k = library_of(library), topk_ids.shape[-1], hidden.shape[-1]
    ids = topk_ids.reshape(-1, top_k)
    if ids.dtype == torch.int64:  # of which one beyond i32 must stay none
        ids = ids.clamp(-1, _MOST_ID)
    ids = ids.to(torch.int32).contiguous()
    weights = topk_weights.reshape(-1, top_k).to(torch.float32).contiguous()
    found = {name: bare(x) for name in _TENSORS if (x := more.get(name)) is not None}
    expected = expected_rows(ids, w13, found.get("expert_map"), more.get("global_experts", 0))
    common = {"overlap": more.get("overlap", OVERLAP_OF_EXPERTS), "expected_rows": expected}
    gates = {"epilogue": more.get("activation", _USUAL), **common, **_of_weight("w13", found)}
    downs = {**common, **_of_weight("w2", found)}
    # What is between launches is made here: a call with `out` that is like one before is launched by its plan.
    rows, inner = hidden.new_empty((ids.numel(), k)), hidden.new_empty((ids.numel(), columns_of(w2)))
    ends, positions = ids.new_empty(w13.shape[0]), torch.empty_like(ids)
    narrow: tuple[Narrow, ...] = ()
    scaling = "none"
    if w13.dtype == torch.float8_e4m3fn:
        scaling = "block" if found["w13_scale"].dim() == 3 else "row_column"
        narrow = _narrow_like(rows, scaling), _narrow_like(inner, scaling)
    sort = {"expert_map": found["expert_map"]} if "expert_map" in found else {}
    of_rows: tuple[torch.Tensor, ...] = (weights,)
    if more.get(_ON_INPUT, False):
        sort["weights"], of_rows = weights, ()
    between = Between(rows, inner, ends, positions, scaling, narrow)
    make_rows(lib, hidden.reshape(-1, k), ids, (w13, w2), between, gates, downs, sort)
    lib.call("moe_combine", rows, positions, *of_rows, out=out.view(-1, k))


def _of_weight(of: str, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What was given for a weight, as its grouped GEMM takes it."""
    names = {"bias": f"{of}_bias", "scale_b": f"{of}_scale"}
    return {name: given[said] for name, said in names.items() if said in given}


Narrow = tuple[torch.Tensor, torch.Tensor]  # rows in e4m3, and their scales


class Between(NamedTuple):
    """What the launches of experts keep between them, contiguous, for R = T * top_k rows: `rows` (R, K) and `inner` (R,
    N) of the tokens' type, `ends` (experts) and `positions` (T, top_k), i32; and, where rows are quantised, how they
    are scaled, and room for those of K and of N."""

    rows: torch.Tensor
    inner: torch.Tensor
    ends: torch.Tensor
    positions: torch.Tensor
    scaling: str = "none"
    narrow: tuple[Narrow, ...] = ()


def make_rows(
    lib: Library,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    between: Between,
    gates: Mapping[str, Any],
    downs: Mapping[str, Any],
    sort: Mapping[str, Any],
) -> None:
    """Write to `between.rows` what experts make of x (T, K), a row for each of ids (T, top_k), i32, and to
    `between.positions` where that is: three launches, or four where rows are quantised in one of their own.

    `weights` are w13 and w2; `gates`, `downs` and `sort` are words of both grouped GEMMs and of moe_permute.

    Raises:
        KernelMiss: the archive lacks a function for one of them.
        ArgumentError: the tensors do not go together.
    """
    (w13, w2), (rows, inner, ends, positions, scaling, _) = weights, between
    sort = {"experts": len(w13), **sort}
    if not between.narrow:
        lib.call("moe_permute", x, ids, out=(rows, ends, positions), **sort)
        lib.grouped_gemm(rows, w13, ends, out=inner, **gates)
        lib.grouped_gemm(inner, w2, ends, out=rows, **downs)
        return
    (tokens, scale), (narrow, scale_between) = between.narrow
    lib.call("moe_permute", x, ids, scaling=scaling, out=(tokens, ends, positions, scale), **sort)
    if quantises_in_gemm(lib, w13, gates["expected_rows"], gates, inner.dtype):
        lib.grouped_gemm(tokens, w13, ends, scale_a=scale, out=narrow, scale_d=scale_between, **gates)
    else:
        lib.grouped_gemm(tokens, w13, ends, scale_a=scale, out=inner, **gates)
        lib.call("quantise", inner, ends, scaling=scaling, out=(narrow, scale_between))
    lib.grouped_gemm(narrow, w2, ends, scale_a=scale_between, out=rows, **downs)


def quantises_in_gemm(lib: Library, w13: torch.Tensor, rows: int, words: Mapping[str, Any], wide: torch.dtype) -> bool:
    """Whether the GEMM of w13, called with these words, is to write rows in e4m3, where another would write them in
    `wide`: where the archive has a function for that, and groups have so few of `rows` that larger tiles, which hold no
    scale's columns of D, are not faster; nor smaller ones, of which GPUs have enough where there are few of these, if
    the archive also has what then quantises."""
    groups, n, k = w13.shape
    if rows > MOST_ROWS_OF_A_GROUP * groups or words["scale_b"].dim() != 3:
        return False
    gates = EPILOGUES[words["epilogue"]]
    has_bias = words.get("bias") is not None
    if has_bias and wide != torch.bfloat16:  # a bias beside D in e4m3 is in bf16
        return False
    epilogue = gates._replace(bias=has_bias).word()
    there = register(lib), lib.digest
    if not _has(*there, Signature(NARROW, NARROW, NARROW, groups, n, k, epilogue, words["overlap"], "block")):
        return False
    per = 2 if gates.gated else 1
    if active_groups(groups, rows) * (n // per) >= LEAST_TILES_OF_QUANTISING * SCALE_BLOCK:
        return True
    return not _has(*there, Quantise(dtype_name(wide), NARROW, n // per, "block", groups))


def expected_rows(
    ids: torch.Tensor, w13: torch.Tensor, expert_map: torch.Tensor | None, global_experts: int = 0
) -> int:
    """How many of all assignments fall to the experts here, if all experts that there are have as many; rounded up."""
    every = (global_experts or len(w13)) if expert_map is None else len(expert_map)
    return -(-ids.numel() * len(w13) // max(every, 1))


@functools.lru_cache(1024)
def _has(number: int, digest: str, signature: Signature) -> bool:
    """Whether the library of this number, while it serves the files with this digest, has an entry for a signature, or
    for one that relies on less."""
    try:
        library_of(number).entry(signature)
    except AotError:
        return False
    return True


def _narrow_like(rows: torch.Tensor, scaling: str) -> Narrow:
    """Room for rows (M, K) in e4m3 and their scales."""
    shape = scale_shape(scaling, *rows.shape)
    return rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn), rows.new_empty(shape, dtype=torch.float32)


def _moe(library: int, hidden: torch.Tensor, *given: torch.Tensor, **more: Any) -> torch.Tensor:
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    _moe_out(library, hidden, *given, out, **more)
    return out


# Also for the CPU, where the library itself says what is wrong.
for _key in ("CUDA", "CPU"):
    OPERATORS.impl("moe", _moe, _key)
    OPERATORS.impl("moe_out", _moe_out, _key)


@torch.library.register_fake("cute_aot::moe", lib=OPERATORS)
def _fake_moe(library: int, hidden: torch.Tensor, *given: torch.Tensor, **more: Any) -> torch.Tensor:
    _check((hidden, *given), more)
    return hidden.new_empty(hidden.shape)


@torch.library.register_fake("cute_aot::moe_out", lib=OPERATORS)
def _fake_moe_out(library: int, hidden: torch.Tensor, *given: torch.Tensor, **more: Any) -> None:
    _check((hidden, *given[:-1]), more)
