"""What happens to f32 sums in registers before they are stored: the activations of `runtime.numbers.epilogue.Epilogue`.

`exp` and `1 / x` are the hardware's approximations (about 2^-22 relative), far below the rounding of a 16-bit output.
"""

from typing import Any

import cutlass
from cutlass import cute

from runtime.numbers.epilogue import CLAMPED, CLAMPED_ALPHA, CLAMPED_LIMIT, GATES

_SQRT_2_OVER_PI = 0.7978845608028654
_GELU_CUBE = 0.044715  # of the tanh form: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016
# erf(x) = 1 - (a1 t + ... + a5 t^5) exp(-x^2), t = 1 / (1 + p x), x >= 0, within 1.5e-7: Abramowitz and Stegun, 7.1.26
_ERF_P = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


@cute.jit
def activate(name: cutlass.Constexpr, x: cutlass.Float32) -> cutlass.Float32:
    """The activation `name`, one of `runtime.numbers.epilogue.ACTIVATIONS`, of one number."""
    y = x
    if cutlass.const_expr(name == "relu"):
        y = cutlass.Float32(0.0) if x < 0.0 else x  # what is no number stays none
    elif cutlass.const_expr(name == "silu"):
        y = x * _sigmoid(x)
    elif cutlass.const_expr(name == "gelu_tanh"):
        y = x * _sigmoid(2.0 * _SQRT_2_OVER_PI * (x + _GELU_CUBE * x * x * x))  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    elif cutlass.const_expr(name == "gelu"):
        y = 0.5 * x * (1.0 + _erf(x * 0.7071067811865476))
    return y


@cute.jit
def gate(name: cutlass.Constexpr, x: cutlass.Float32, up: cutlass.Float32) -> cutlass.Float32:
    """What one of `runtime.numbers.epilogue.GATED` makes of a gate and its partner."""
    if cutlass.const_expr(name == CLAMPED):
        # What is no number stays none.
        x = cutlass.Float32(CLAMPED_LIMIT) if x > CLAMPED_LIMIT else x
        up = cutlass.Float32(CLAMPED_LIMIT) if up > CLAMPED_LIMIT else up
        up = cutlass.Float32(-CLAMPED_LIMIT) if up < -CLAMPED_LIMIT else up
        y = x * _sigmoid(CLAMPED_ALPHA * x) * (up + 1.0)
    else:
        y = activate(GATES[name], x) * up
    return y


@cute.jit
def _sigmoid(x: cutlass.Float32) -> cutlass.Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-x, fastmath=True))


@cute.jit
def _erf(x: cutlass.Float32) -> cutlass.Float32:
    size = cutlass.max(x, -x)
    t = cute.arch.rcp_approx(1.0 + _ERF_P * size)
    polynomial: Any = cutlass.Float32(_ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        polynomial = polynomial * t + coefficient
    y = 1.0 - polynomial * t * cute.math.exp(-size * size, fastmath=True)
    return y if x >= 0.0 else -y
