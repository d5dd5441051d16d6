"""The errors of cgshim, the form of their messages, and notes on frameworks' errors in f."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from cgshim._dtype_names import unchecked_name

E = TypeVar("E", bound=Exception)


class CustomGradientError(Exception):
    """The base of all errors of cgshim: catch this to catch them all.

    Examples
    --------
    >>> from cgshim import op_custom_gradient
    >>> try:
    ...     op_custom_gradient(lambda x: 2 * x)(1.0)
    ... except CustomGradientError as error:
    ...     print(type(error).__name__)
    CustomGradientTypeError
    """

    ag_pass_through = True  # AutoGraph leaves an error with this attribute unchanged


class CustomGradientTypeError(CustomGradientError, TypeError):
    """Raised if cgshim does not support the form of a function or a rule."""


class CustomGradientValueError(CustomGradientError, ValueError):
    """Raised if a gradient, or an upstream gradient, does not fit its tensor."""


class BackendError(CustomGradientError, RuntimeError):
    """Raised if a backend is unknown, cannot be imported, or gets another framework's tensor."""


class TransformationError(CustomGradientError, NotImplementedError):
    """Raised if a transformation cannot use the rule."""


for _kind in (CustomGradientError, *CustomGradientError.__subclasses__()):
    _kind.__module__ = "cgshim"  # the public name, for tracebacks


def sentence(op: str, *, must: str, got: str, do: str) -> str:
    """Return a message that names the op, the requirement, the value found and the fix.

    Examples
    --------
    >>> sentence("clip", must="limit must be positive", got="-1.0", do="pass its absolute value")
    'clip: limit must be positive, got -1.0; pass its absolute value'
    """
    return f"{op}: {must}, got {got}; {do}"


def refusal(kind: type[E], op: str, *, must: str, got: str, do: str) -> E:
    """Return an error of this kind with a message of that form.

    Examples
    --------
    >>> raise refusal(BackendError, "clip", must="limit must be positive", got="-1.0", do="pass its absolute value")
    Traceback (most recent call last):
    cgshim.BackendError: clip: limit must be positive, got -1.0; pass its absolute value
    """
    return kind(sentence(op, must=must, got=got, do=do))


_LONG_NAMES = re.compile("^(?:(bf|f)loat|(c)omplex|(u)int|(i)nt)")


def describe_spec(shape: Any, dtype: object) -> str:
    """Return a tensor's shape and dtype in the form f32[2,3].

    Examples
    --------
    >>> describe_spec((2, None), "bfloat16")
    'bf16[2,?]'
    """
    name = _LONG_NAMES.sub(r"\1\2\3\4", unchecked_name(dtype))
    sizes = ["?" if n is None else "..." if n is ... else str(n) for n in shape_of(shape)]
    return f"{name}[{','.join(sizes)}]"


def shape_of(shape: Any) -> tuple[Any, ...]:
    """Return a framework's shape as a tuple: None for an unknown size, (...,) for any rank."""
    if getattr(shape, "rank", 0) is None:  # TensorFlow's shape of unknown rank has no length
        return (...,)
    return tuple(shape)


def describe(x: object) -> str:
    """Describe x in a word or two; never show the contents of an array.

    Examples
    --------
    >>> import numpy as np
    >>> describe(np.zeros((2, 3))), describe("text")
    ('f64[2,3]', 'str')
    """
    if x is None:
        return "None"
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(x, type):
        # NumPy arrays that are not tensors
        masked = "a masked " if hasattr(x, "mask") and hasattr(x, "filled") else ""
        return masked + describe_spec(shape, dtype)
    if isinstance(x, (tuple, list)) and type(x) in (tuple, list):
        return f"a {type(x).__name__} of {len(x)}"
    return type(x).__name__


def describe_tree(x: object) -> str:
    """Describe x and its contents as Python code; name only the type of a large object.

    Examples
    --------
    >>> import numpy as np
    >>> describe_tree({"w": [np.zeros(3)], "b": (None,)})
    "{'w': [f64[3]], 'b': (None,)}"
    """
    if type(x) is dict:
        words = f"{{{', '.join([f'{key!r}: {describe_tree(value)}' for key, value in x.items()])}}}"
    elif type(x) is list:
        words = f"[{', '.join(map(describe_tree, x))}]"
    elif type(x) is tuple:
        words = f"({', '.join(map(describe_tree, x))}{',' if len(x) == 1 else ''})"
    else:
        return describe(x)
    return words if len(words) <= _LONG else describe(x)


_LONG = 200


def listing(words: Sequence[str]) -> str:
    """Join words for a message: "x", "x and y", "x, y and z"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 variable", "2 variables"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def function_name(f: Any) -> str:
    """Return a function's name for messages: a partial's function's, or an object's class's."""
    while isinstance(f, functools.partial):
        f = f.func
    return str(getattr(f, "__name__", type(f).__name__))


# --- What an error of a framework means for f -----------------------------------------------------

_NOTES = (
    (
        r"TracerArrayConversion|numpy\(\) on Tensor|data pointer of Tensor|to a numpy array"
        r"|ConcretizationTypeError|calling \.item\(\)|not 'SymbolicTensor'",
        "f must run where its arguments have no values yet, or are differentiated",
        "NumPy or Python at work on a tensor",
        "call functions of cgshim.ops, or let it run on the host: op_custom_gradient(host_outputs=...), op_host",
    ),
    (
        r"TracerBoolConversion|OperatorNotAllowedInGraph|data-dependent",
        "f must run where its arguments have no values yet",
        "a branch on a tensor",
        "write ops.where for elements, op_cond for programs",
    ),
    (
        r"must be Tensor, not|as an abstract array",
        "f must call functions of the framework whose tensors it is given",
        "another framework's function",
        "call functions of cgshim.ops, such as ops.exp, which take tensors of all",
    ),
    (
        # oneDNN's message, which TensorFlow shows on some processors
        r"In\[[01]\] ndims must be >= 2|different ndims: (\[\d+\]|.* vs\. \[\d+\])|Shape must be rank 2 but is rank 1",
        "@ of TensorFlow takes matrices",
        "a vector",
        "write ops.matmul",
    ),
)
"""a framework, a pattern of its errors, and what to write in an f that runs in every framework"""


def add_origin(error: Exception, op: str, function: str, called_with: str = "") -> None:
    """Add a note to the author's error: which op raised it, in f or in grad_fn."""
    if isinstance(error, CustomGradientError) or not hasattr(error, "add_note"):  # Python 3.10
        return
    note = f"{op}: raised by {function}" + (f", called with {called_with}" if called_with else "")
    error.add_note(note)


def add_note(error: Exception, op: str) -> None:
    """Add a note to an error that f raised: what to write instead, if the error is a known one."""
    text = f"{type(error).__name__}: {error}"
    for pattern, must, got, do in _NOTES:
        if re.search(pattern, text):
            if must in "\n".join([text, *getattr(error, "__notes__", ())]):  # by an inner op
                return
            note = sentence(op, must=must, got=got, do=do)
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # Python 3.10
                error.args = (f"{error}\n{note}",)
            return
