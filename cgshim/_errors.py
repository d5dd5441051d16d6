"""The one family of errors, and the one sentence that they are written in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cgshim._dtypes import dtype_name


class CustomGradientError(Exception):
    """Whatever cgshim refuses: catch this to catch them all."""

    __module__ = "cgshim"  # where users find it: a traceback says so
    ag_pass_through = True  # TensorFlow's AutoGraph leaves an error that has this as it is


class CustomGradientTypeError(CustomGradientError, TypeError):
    """A function or a rule that is not written in one of the forms that cgshim knows."""

    __module__ = "cgshim"


class CustomGradientValueError(CustomGradientError, ValueError):
    """A gradient, or an upstream gradient, that does not fit what it is the gradient of."""

    __module__ = "cgshim"


class BackendError(CustomGradientError, RuntimeError):
    """A backend that is unknown, cannot be imported, or was given another framework's tensor."""

    __module__ = "cgshim"


class TransformationError(CustomGradientError, NotImplementedError):
    """A transformation under which the rule could not be applied as it is."""

    __module__ = "cgshim"


def sentence(op: str, *, must: str, got: str, do: str) -> str:
    """Return a message in the grammar of all: who, what must hold, what was there instead, and the way out."""
    return f"{op}: {must}, got {got}; {do}"


_SHORT = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))


def describe_spec(shape: Any, dtype: object) -> str:
    """Return a tensor's shape and dtype as f32[2,3]."""
    name = dtype_name(dtype)
    for long, short in _SHORT:
        if name.startswith(long):
            name = short + name.removeprefix(long)
            break
    return f"{name}[{','.join('?' if n is None else str(n) for n in shape_of(shape))}]"


def shape_of(shape: Any) -> tuple[Any, ...]:
    """Return a framework's shape as a tuple; a size that is not known yet is None, an unknown rank is (...,)."""
    if getattr(shape, "rank", 0) is None:  # TensorFlow's shape of unknown rank has no length
        return (...,)
    return tuple(shape)


def describe(x: object) -> str:
    """Return what x is, in a word or two; of an array never the contents."""
    if x is None:
        return "None"
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(x, type):
        masked = "a masked " if hasattr(x, "mask") and hasattr(x, "filled") else ""  # NumPy's, which are no tensors
        return masked + describe_spec(shape, dtype)
    if isinstance(x, (tuple, list)) and type(x) in (tuple, list):
        return f"a {type(x).__name__} of {len(x)}"
    return type(x).__name__


def describe_tree(x: object) -> str:
    """Return what x is, and one level down what it holds."""
    if type(x) in (tuple, list):
        inner = ", ".join(describe(leaf) for leaf in cast("list[object]", x))
        return f"[{inner}]" if type(x) is list else f"({inner})"
    return describe(x)


def listing(words: Sequence[str]) -> str:
    """Return words as a sentence lists them: "x", "x and y", "x, y and z"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count(number: int, noun: str) -> str:
    """Return a number of things: "1 variable", "2 variables"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def function_name(f: Any) -> str:
    """Return the name that a reader knows a function by: a partial's is its function's, an object's its class's."""
    while hasattr(f, "func"):
        f = f.func
    return str(getattr(f, "__name__", type(f).__name__))
