"""Functions and methods of a server that a plugin wraps: named, looked up, and marked once they are wrapped.

Knows names and parameters, and neither a server nor what wrappers do. Nothing is imported until a hook is looked up.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError

_MARK = "_cute_aot_hook"
Make = Callable[[Callable[..., Any]], Callable[..., Any]]  # of what a method was, its wrapper


@dataclass(frozen=True)
class Hook:
    """A method, of a class too, or a property of a server's, or a function where `owner` is empty; `parameters` are the
    names that it must have, `self` or `cls` among them."""

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.method)))


def look_up(wanted: Iterable[Hook]) -> list[tuple[Any, Callable[..., Any]]]:
    """The class or module, and the method or function, of each of these.

    Raises:
        ArgumentError: the server lacks one, or it has other parameters; the message names each.
    """
    missing, found = [], []
    for hook in wanted:
        try:
            module = importlib.import_module(hook.module)
            owner = getattr(module, hook.owner) if hook.owner else module
            method = vars(owner)[hook.method]
            of: Any = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            parameters = tuple(inspect.signature(of).parameters)
        except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
            missing.append(f"{hook} is not there ({type(error).__name__}: {error})")
            continue
        if parameters != hook.parameters:
            missing.append(f"{hook} has the parameters {', '.join(parameters)}, not {', '.join(hook.parameters)}")
        found.append((owner, method))
    if missing:
        raise ArgumentError("; ".join(missing))
    return found


def wrapped(method: Callable[..., Any], make: Make, hook: Hook) -> Callable[..., Any]:
    """What `make` makes of a method, under its name, marked as this plugin's."""
    wrapper = functools.wraps(method)(make(method))
    mark(wrapper, hook)
    return wrapper


def mark(method: Any, hook: object = True) -> None:
    """Note that a method, or a class, is the plugin's."""
    setattr(method, _MARK, hook)


def is_marked(method: Any) -> bool:
    """Whether it is the plugin's, or wraps what is and took its attributes over."""
    return getattr(method, _MARK, None) is not None


def is_hooked(owner: type, method: str) -> bool:
    """Whether `owner.method`, inherited or not, is one of the plugin's wrappers, and not a method that hides it."""
    return is_marked(getattr(owner, method, None))
