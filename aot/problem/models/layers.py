"""A model as its config describes it, as data: linear layers, by what tensor parallelism does to their extents, and
experts. Knows no families and no element types of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from ..manifest import ManifestError


@dataclass(frozen=True)
class Extent:
    """So many units of `width` elements, such as heads; `field` is where the config says how many. They are of `parts`
    matrices, such as gate and up, which lie one after the other.

    Of a tensor-parallel group each rank has all of them ("whole"), as many as any other ("divided"), or, of KV heads,
    as many or the same one as others, where there are fewer than ranks ("shared").
    """

    count: int
    width: int = 1
    field: str = ""
    split: Literal["whole", "divided", "shared"] = "whole"
    parts: int = 1

    def on(self, tp: int) -> int:
        """Elements on one of `tp` ranks, which `obstacle` has nothing against."""
        if self.split == "whole":
            return self.count * self.width
        return max(self.count // tp, 1) * self.width

    def obstacle(self, tp: int) -> str | None:
        """Why it cannot be split over `tp` ranks, naming the field; None when it can."""
        if self.split == "divided" and self.count % tp:
            return f"field {self.field!r}: {self.count} does not divide by tp {tp}"
        if self.split == "shared" and self.count % tp and tp % self.count:
            return f"field {self.field!r}: of {self.count} and tp {tp} neither divides the other"
        return None

    def cuts(self, tp: int, block: int) -> bool:
        """Whether one of `tp` ranks gets a part of a block of so many elements."""
        return tp > 1 and self.split != "whole" and self.on(tp) // self.parts % block != 0


@dataclass(frozen=True)
class Linear:
    """A linear layer of weight (n, k), as servers merge them, that `count` of the model's layers have.

    `n` is the sum of its extents. `gated` says that its outputs are gate and up of an MLP; `residual`, that the
    residual is added to its output, unless the model has something between; `plain`, that fp8 checkpoints keep it in 16
    bits; `may_go`, that it is left out where its rows do not fill 16 bytes; `last`, that it makes logits;
    `sequence_parallel`, that with data parallelism too each tensor-parallel rank has it whole, for its part of the
    tokens.
    """

    name: str
    n: tuple[Extent, ...]
    k: Extent
    count: int
    bias: bool = False
    gated: bool = False
    residual: bool = False
    plain: bool = False
    may_go: bool = False
    last: bool = False
    sequence_parallel: bool = False

    def whole(self) -> Linear:
        """The same layer, all of which is on every rank."""
        n = tuple(replace(extent, split="whole") for extent in self.n)
        return replace(self, n=n, k=replace(self.k, split="whole"))

    def shape(self, tp: int) -> tuple[int, int]:
        """(n, k) on one of `tp` ranks."""
        return sum(extent.on(tp) for extent in self.n), self.k.on(tp)

    @property
    def row_parallel(self) -> bool:
        """Whether ranks have different columns of the weight, so that an all-reduce adds up what they make."""
        return self.k.split == "divided"


@dataclass(frozen=True)
class Experts:
    """The experts of `layers` layers: `count` of gate and up (2 * inner, hidden) and down (hidden, inner). Each token
    goes to `top_k` of them.

    `fields` are those that say count and inner. `gate` is the epilogue of gate and up where the family has one of its
    own, else empty; `bias` is whether both have biases. With `on_input` router weights multiply what experts take, not
    what they make. `note` is what a caller has to know, in one sentence, or empty.
    """

    count: int
    top_k: int
    layers: int
    hidden: int
    inner: int
    fields: tuple[str, str]
    gate: str = ""
    bias: bool = False
    on_input: bool = False
    note: str = ""


@dataclass(frozen=True)
class Model:
    """A text model; `source` is what messages call its config.

    `depth` is how many layers it has; `used` are the numbers that shapes follow from, by field. `residuals` is whether
    o and down are added to the residual as they are, and `rms_norms` whether RMSNorm of x * weight follows.
    `activation` and `dtype` are each a field and what was found there, not yet checked: not every manifest depends on
    them. `scaling` is that of weights which are published in e4m3 or in 4 bits, else empty; `experts_in` is that of
    experts' where they alone are. `remarks` are sentences on what is left out or other than the config says.
    """

    source: str
    depth: int
    used: Mapping[str, int]
    linears: tuple[Linear, ...]
    experts: Experts | None
    residuals: bool
    rms_norms: bool
    activation: tuple[str, object]
    dtype: tuple[str, object]
    scaling: str = ""
    experts_in: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def biased(self) -> tuple[str, ...]:
        """The names of what has a bias, in the order in which a forward pass runs them."""
        experts = ("experts",) if self.experts and self.experts.bias else ()
        return (*(layer.name for layer in self.linears if layer.bias), *experts)

    def fail(self, complaint: str) -> NoReturn:
        """Raise a `ManifestError` that names the config."""
        raise ManifestError(f"{self.source}: {complaint}")
