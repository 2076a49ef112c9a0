"""Quantised rows as building knows them: all variants of their element types and scaling, which nothing puts in
order."""

from __future__ import annotations

from typing import Any

from .form import VariantForm
from .operation import Building
from .shorthand import Experts


class ScaledBuilding(Building):
    """See `aot.search.operation.Building`. Signatures say how what they write is scaled."""

    def form(self, signature: Any) -> VariantForm:
        """Element types and scaling."""
        return super().form(signature)._replace(scaling=signature.scaling)


class QuantiseBuilding(ScaledBuilding):
    """See `aot.search.operation.Building`."""

    shorthand = Experts("groups")

    def form(self, signature: Any) -> VariantForm:
        """Element types, scaling, and the activation, which variants have as an epilogue."""
        return super().form(signature)._replace(epilogue=signature.activation)


QUANTISE = QuantiseBuilding("quantise", "quantisations")
