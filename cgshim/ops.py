"""NumPy's functions, by their NumPy names, on the tensors of any backend.

`ops.exp(x)`, `ops.sum(x, axis=0)`, `ops.linalg.norm(x)`: the backend is found as for every op, and autoray translates.
A function that NumPy has and a framework lacks is refused by name. Beside them stand the few functions that every rule
needs and that frameworks spell differently. `cgshim.op_<name>` is `cgshim.ops.<name>`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cgshim._backend import Backend, Tensor, backend_of, constant_when_traced, framework_of, load, name_of, unwrap
from cgshim._convention import is_differentiable
from cgshim._errors import BackendError, dtype_name, is_complex, sentence
from cgshim._tree import as_tensor


def convert_to_tensor(x: Any, dtype: Any = None) -> Tensor:
    """x as a tensor of the backend.

    Parameters
    ----------
    x : tensor, NumPy array, number or nested list of numbers
        A tensor stays what it is, gradient and all.
    dtype : str or a dtype of the framework, optional
        What to cast it to; by default what the framework makes of it.

    Returns
    -------
    tensor
        Of the chosen backend, or of x's own; a NumPy array where there is neither.

    Raises
    ------
    BackendError
        Where x is another framework's tensor than the chosen backend's.

    Examples
    --------
    >>> convert_to_tensor([1, 2], "float32")
    array([1., 2.], dtype=float32)
    """
    backend = backend_of([x])
    tensor = as_tensor("op_convert_to_tensor", backend, x)
    return backend.convert_to_tensor(x if tensor is None else tensor, dtype)


def cast(x: Any, dtype: Any) -> Tensor:
    """x, a tensor of any shape, in another dtype (a name such as "float32", or the framework's own).

    Examples
    --------
    >>> cast(np.array([1.5]), "int64")
    array([1])
    """
    return convert_to_tensor(x, dtype)


def convert_to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """x, a tensor of any framework, shape and dtype, as a NumPy array: on the host, and no longer differentiated.

    Examples
    --------
    >>> convert_to_numpy(2.5)
    array(2.5)
    """
    x = unwrap(x)
    name = framework_of(x)
    return np.asarray(x) if name is None else load(name).convert_to_numpy(x)


def stop_gradient(x: Any) -> Tensor:
    """x, a tensor of any shape, as a constant: the same value, and no gradient.

    Examples
    --------
    >>> stop_gradient(np.array([2.5]))
    array([2.5])
    """
    backend = backend_of([x])
    return backend.stop_gradient(convert_to_tensor(x))


def is_tensor(x: object) -> bool:
    """Whether x is a tensor of a framework: an array, a tracer, a Variable, a Parameter.

    Examples
    --------
    >>> is_tensor(np.zeros(2)), is_tensor(2.0)
    (True, False)
    """
    return framework_of(x) is not None


def shape(x: Any) -> tuple[Any, ...]:
    """The shape of a tensor as a tuple; None stands for a size that a graph does not know yet.

    Examples
    --------
    >>> shape(np.zeros((2, 3)))
    (2, 3)
    """
    return tuple(convert_to_tensor(x).shape)


def dtype(x: Any) -> str:
    """The name of a tensor's dtype, the same in every framework: "float32", "bfloat16", "int64".

    Examples
    --------
    >>> dtype(np.zeros(2))
    'float64'
    """
    return dtype_name(convert_to_tensor(x).dtype)


# --- NumPy's own names -------------------------------------------------------------------------------------------

# autograd.numpy is NumPy, for plain arrays and for the boxes of a derivative.
_NAMESPACES = {"numpy": "autograd"}


def _numpy_named(name: str) -> Callable[..., Any]:
    elementwise = isinstance(getattr(np, name, None), np.ufunc)

    def function(*args: Any, **kwargs: Any) -> Any:
        backend = backend_of([*args, *kwargs.values()])
        args = tuple(_tensors_of(name, backend, arg) for arg in args)
        kwargs = {key: _tensors_of(name, backend, value) for key, value in kwargs.items()}
        translated, keywords = getattr(_translations, _translate(name, name_of(backend)))
        by_position = _numbers_to_tensors(backend, args) if elementwise else args
        by_name = dict(zip(keywords, by_position))  # noqa: B905  # where autoray names none, all stay as they are
        return translated(*by_position[len(by_name) :], **by_name, **kwargs)

    function.__name__ = function.__qualname__ = name.rpartition(".")[2]
    function.__doc__ = f"numpy.{name} on the tensors of any backend."
    return function


_translations = types.SimpleNamespace()  # torch.compile reads an attribute when it comes to it, a dict as a whole


@constant_when_traced
def _translate(name: str, framework: str) -> str:
    """Find the framework's function of this NumPy name, once; the attribute of _translations that holds it."""
    attribute = f"{framework}_{name}".replace(".", "_")
    if hasattr(_translations, attribute):
        return attribute
    import autoray

    try:
        translated = autoray.get_lib_fn(_NAMESPACES.get(framework, framework), name)
    except (ImportError, AttributeError) as error:
        raise BackendError(
            sentence(f"op_{name}", f"NumPy's {name} must exist in {framework}", "nothing of that name",
                     f"call {framework}'s own function")
        ) from error  # fmt: skip
    setattr(_translations, attribute, (translated, _keywords(translated)))
    return attribute


def _keywords(translated: Callable[..., Any]) -> list[str]:
    """NumPy's names for the parameters that autoray renames; by name, for torch.compile mistakes their order."""
    closed_over = inspect.getclosurevars(translated).nonlocals if inspect.isfunction(translated) else {}
    return list(closed_over.get("translator", ()))


def _tensors_of(name: str, backend: Backend, value: Any) -> Any:
    """value with the NumPy arrays and Keras Variables in its lists made tensors of the backend."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_tensors_of(name, backend, item) for item in value)
    tensor = as_tensor(f"op_{name}", backend, value)
    return value if tensor is None else tensor


def _numbers_to_tensors(backend: Backend, args: Sequence[Any]) -> list[Any]:
    """args with tensors for the Python numbers, which bend to the dtype of the tensors beside them if they can."""
    tensors = [arg for arg in args if backend.is_tensor(arg)]
    return [_bend(backend, arg, tensors) if isinstance(arg, (int, float, complex)) else arg for arg in args]


def _bend(backend: Backend, number: complex, tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return backend.convert_to_tensor(number)
    kind = tensors[0].dtype
    fits = is_complex(kind) or (isinstance(number, (int, float)) and is_differentiable(kind))
    fits = fits or (isinstance(number, int) and dtype_name(kind) != "bool")
    return backend.convert_to_tensor(number, kind if fits else None)


class _Namespace:
    """A module within NumPy's: ops.linalg, ops.fft."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _found(f"{self._name}.{name}")


linalg = _Namespace("linalg")
fft = _Namespace("fft")


@functools.cache
def _found(name: str) -> Callable[..., Any]:
    function: Any = np
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise AttributeError(f"numpy has no function {name}, and so cgshim.ops has none")
    return _numpy_named(name)


def __getattr__(name: str) -> Callable[..., Any]:
    return _found(name)
