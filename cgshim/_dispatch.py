"""Find the backend of a call: the chosen one, or the one whose tensors the call gets."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

from cgshim._closure import SIMPLE
from cgshim._errors import BackendError, describe, refusal
from cgshim._foreign import (
    KERAS,
    KERAS_SYMBOL,
    KERAS_VARIABLES,
    TRACER,
    constant_when_traced,
    is_traced,
)
from cgshim._protocol import Backend, Tensor
from cgshim._registry import aliases, entry_points, load, name_of, require_metadata

T = TypeVar("T")
ENVIRONMENT_VARIABLE = "CGSHIM_BACKEND"


# --- Choosing one by name -------------------------------------------------------------------------

_of_process: str | None = None
# read once: a lookup in os.environ takes as long as a product of two NumPy scalars
_of_environment: str | None = os.environ.get(ENVIRONMENT_VARIABLE) or None
_of_context: ContextVar[str | None] = ContextVar("cgshim_backend", default=None)


def config_backend() -> str | None:
    """Return the name of the current backend, or None if the inputs' types decide.

    Returns
    -------
    str or None
        The name from `use_backend` in this context, else `set_backend`, else the environment
        variable CGSHIM_BACKEND when cgshim was imported. If none chooses: within f and grad_fn
        the backend of the op's call, and "torch" in code that torch.compile traces.

    Examples
    --------
    >>> with use_backend("numpy"):
    ...     config_backend()
    'numpy'
    """
    return chosen_backend() or _name_of_call()


@constant_when_traced
def chosen_backend() -> str | None:
    """Return the name of the backend that was chosen for all calls, or None."""
    return _of_context.get() or _of_process or _of_environment


@constant_when_traced
def choice_for_plans() -> str | Literal[False] | None:
    """Return chosen_backend(); False while torch.compile traces: it cannot read stored results.

    It is one function because every call uses it.
    """
    if (compiler := sys.modules.get("torch.compiler")) is not None and compiler._is_compiling_flag:
        return False
    return _of_context.get() or _of_process or _of_environment


def chosen_by() -> str:
    """Return what set the result of chosen_backend, in words for messages."""
    if _of_context.get():
        return "use_backend"
    if _of_process:
        return "set_backend"
    return ENVIRONMENT_VARIABLE if _of_environment else "the inputs' types"


def set_backend(name: str | None, /) -> None:
    """Choose the backend of every call in this process; None undoes the choice.

    Parameters
    ----------
    name : str or None
        A framework's import root, such as "jax".

    Raises
    ------
    BackendError
        If there is no such backend, or its framework cannot be imported.

    Examples
    --------
    >>> set_backend("numpy")
    >>> config_backend()
    'numpy'
    >>> set_backend(None)
    """
    global _of_process
    if name is not None:
        load(name)
    _of_process = name


@contextlib.contextmanager
def use_backend(name: str, /) -> Iterator[None]:
    """Choose the backend of the calls in a ``with`` block, only in this thread or task.

    Parameters
    ----------
    name : str
        A framework's import root, such as "jax".

    Raises
    ------
    BackendError
        If there is no such backend, or its framework cannot be imported.

    Examples
    --------
    >>> with use_backend("numpy"):
    ...     config_backend()
    'numpy'
    """
    load(name)
    token = _of_context.set(name)
    try:
        yield
    finally:
        _of_context.reset(token)


def on_numpy(function: Callable[..., T], /, *args: Any) -> T:
    """Return a function's result, computed with NumPy as the current backend."""
    with use_backend("numpy"):
        return function(*args)


# --- The op that is running -----------------------------------------------------------------------


class _Running(threading.local):
    """The innermost f or grad_fn that is running in this thread.

    Not a context variable: Dynamo cannot trace `ContextVar.set`.
    """

    call: tuple[Backend | None, Sequence[Tensor], bool] = (None, (), False)
    """the backend, the tensors of the call, and True if a grad_fn is running"""


_running = _Running()


def run_on(
    backend: Backend,
    tensors: Sequence[Tensor],
    is_rule: bool,
    function: Callable[..., T],
    /,
    *args: Any,
    **options: Any,
) -> T:
    """Return ``function(*args, **options)``, run as an f or a grad_fn of a call.

    Dynamo must not trace it: it allows no such side effect in a backward pass.
    """
    outer = _running.call
    _running.call = backend, tensors, is_rule
    try:
        return function(*args, **options)
    finally:
        _running.call = outer


def is_in_op() -> bool:
    """Return True while an f or a grad_fn runs."""
    return _running.call[0] is not None


def is_in_rule() -> bool:
    """Return True while a grad_fn runs: tensors that an op captures there are constants."""
    return _running.call[2]


def run_outside_rule(function: Callable[..., T], /, *args: Any) -> T:
    """Return ``function(*args)``, run as outside any grad_fn, because it is differentiated."""
    if is_traced() or not is_in_rule():
        return function(*args)
    backend, tensors, _ = _running.call
    return run_on(backend, tensors, False, function, *args)  # type: ignore[arg-type]


@constant_when_traced
def _name_of_call() -> str | None:
    if is_traced():  # the tracer has only one backend
        return TRACER
    backend = _running.call[0]
    return None if backend is None else name_of(backend)


def tensor_of_call() -> Tensor | None:
    """Return the first tensor of the running f or grad_fn: new tensors go to its device."""
    return None if is_traced() else next(iter(_running.call[1]), None)


def beside(backend: Backend, tensor: Tensor | None, function: Callable[..., T], /, *args: Any) -> T:
    """Return a function's result, run on the device of a tensor if there is one."""
    if tensor is None or is_traced():
        return function(*args)
    return run_on(backend, (tensor,), is_in_rule(), function, *args)


# --- Finding one by the types of the inputs -------------------------------------------------------

_framework_of_type: dict[type, str | None] = {}


@constant_when_traced
def framework_of_type(kind: type) -> str | None:
    """Return the name of the backend whose framework defines a class, a subclass or a tracer."""
    try:
        return _framework_of_type[kind]
    except KeyError:
        name = _find_framework(kind)
    if is_lasting(kind):
        _framework_of_type[kind] = name
    return name


def is_lasting(kind: type) -> bool:
    """Return True if a module has a class under its name.

    Others may be made in a loop, so cgshim must not keep them alive.
    """
    if kind.__module__ == "builtins":  # it lacks some names, such as `function`
        return True
    named: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        # read __dict__: a module's __getattr__ may warn
        named = getattr(named, "__dict__", {}).get(name)
    return named is kind


def _find_framework(kind: type) -> str | None:
    require_metadata()
    # Keras 3, Keras 2, and Keras within TensorFlow
    if any(base.__name__ == KERAS_SYMBOL and KERAS in base.__module__ for base in kind.__mro__):
        raise refusal(BackendError, "cgshim", must="an op is called with tensors of a framework",
                      got="a symbolic KerasTensor",
                      do="call the op in the call method of a keras.Layer")  # fmt: skip
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root == KERAS and base.__name__ in KERAS_VARIABLES:
            return KERAS
        name = aliases().get(root, root)
        if name in entry_points() and root in sys.modules:
            return name
    return None


def value_of(leaf: Any) -> Any:
    """Return the value of a Keras Variable; return anything else unchanged."""
    return leaf.value if framework_of_type(type(leaf)) == KERAS else leaf


def is_numpy_array(leaf: object) -> bool:
    """Return True if leaf is a plain NumPy array or scalar of numbers (an autograd box is not)."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(leaf, (numpy.ndarray, numpy.generic))
        # torch.compile shows no dtype of an array, and supports only arrays of numbers
        and (is_traced() or load("numpy").is_tensor(leaf))
    )


def framework_of(leaf: Any) -> str | None:
    """Return the name of the backend of a tensor or Keras Variable; None for any other leaf."""
    name = framework_of_type(type(leaf))
    if name == KERAS:
        return framework_of(leaf.value)
    if name == "numpy" and is_traced():
        return name if is_numpy_array(leaf) else None
    return name if name is not None and load(name).is_tensor(leaf) else None


def backend_for(arguments: Sequence[Any]) -> Backend | None:
    """Return the chosen backend, or the backend of the arguments' tensors; None without tensors."""
    name = chosen_backend() or _name_of_framework(arguments)
    return None if name is None else load(name)


def _name_of_framework(arguments: Sequence[Any]) -> str | None:
    """Return the framework of the tensors in the arguments; NumPy if they hold only its arrays."""
    name = _first(arguments)
    if name not in (None, "numpy"):
        return name
    leaves = load(TRACER if is_traced() else "numpy").tree_flatten(arguments)[0]
    name = _first(leaves)  # arrays are constants beside a tree of tensors
    if name not in (None, "numpy") or all(type(x) in SIMPLE or framework_of(x) for x in leaves):
        return name
    return _first_registered(arguments) or name


def backend_or_numpy(arguments: Sequence[Any]) -> Backend:
    """Return the backend for the arguments; without tensors the running op's, else NumPy."""
    return backend_for(arguments) or load(_name_of_call() or "numpy")


def backend_to_convert_to(x: Any) -> Backend:
    """Return the backend that converts x; a NumPy array goes to the running op's backend."""
    backend = backend_or_numpy([x])
    is_free = name_of(backend) == "numpy" and chosen_backend() is None
    return load(_name_of_call() or "numpy") if is_free else backend


def _first(leaves: Iterable[Any]) -> str | None:
    """Return the first framework among the leaves.

    NumPy comes last: its arrays are constants for every framework.
    """
    fallback = None
    for name in map(framework_of, leaves):
        if name not in (None, "numpy"):
            return name
        fallback = fallback or name
    return fallback


def _first_registered(arguments: Sequence[Any]) -> str | None:
    """Return the framework whose own pytree registry finds a tensor in a container."""
    imported = (
        [TRACER]
        if is_traced()
        else [name for name in sorted(entry_points(), key="numpy".__eq__) if _is_loaded(name)]
    )
    return next(
        (name for name in imported if _first(load(name).tree_flatten(arguments)[0]) == name), None
    )


def _is_loaded(name: str) -> bool:
    """Return True if the framework is imported and its backend loads."""
    with contextlib.suppress(BackendError):  # the error is raised only when the backend is used
        return name in sys.modules and load(name) is not None
    return False


def of_another_framework(op: str, backend: Backend, leaf: object) -> BackendError:
    """Return the error for a tensor of one framework in a call of another framework."""
    name = name_of(backend)
    named = (
        f"{chosen_by()} chooses {name}"
        if chosen_backend()
        else f"other tensors of this call are {name}'s"
    )
    return refusal(BackendError, op, must=f"tensors of one call belong to one framework ({named})",
                   got=f"{describe(leaf)} of {framework_of(leaf)}",
                   do=f"convert it to {name} or choose another backend")  # fmt: skip
