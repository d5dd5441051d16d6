"""Find a NumPy function in a framework, with NumPy's parameters and numbers.

The backend's functions come first, then definitions in terms of other NumPy functions. autoray
translates for a backend without functions of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from cgshim._closure import SIMPLE
from cgshim._dispatch import backend_or_numpy, choice_for_plans, framework_of_type, is_lasting
from cgshim._dtypes import is_complex
from cgshim._errors import add_origin, describe
from cgshim._foreign import KERAS, constant_when_traced, is_traced, not_converted
from cgshim._pytree import as_tensor
from cgshim._registry import load, name_of
from cgshim.backend import Backend, BackendError, dtype_name, is_differentiable, refusal

NumPyFunction = Callable[..., Any]


class Namespace:
    """NumPy's functions, or the functions with a prefix: linalg., fft. and (SciPy's) special."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def __getattr__(self, name: str) -> NumPyFunction:
        return cached_function(f"{self._prefix}{name}", vars(self))


def cached_function(name: str, namespace: dict[str, Any]) -> NumPyFunction:
    """Return the function of this NumPy name for every backend, and cache it in its namespace."""
    function = not_converted(_function_named(name))
    if not is_traced():  # torch.compile would have to undo the write
        namespace[name.rpartition(".")[2]] = function
    return function


def _function_named(name: str) -> NumPyFunction:
    name = _ALIASES.get(name, name)
    own = name.rpartition(".")[2]
    if not own.startswith("_") and (name.startswith("special.") or _is_function(name)):
        return _numpy_named(name)
    hint = ""
    if not ("." in name or own.startswith("_")):
        place = _place_in_namespace(name)
        if hasattr(np, name):  # a number, a dtype or a module
            hint = f"; write numpy.{name}"
        elif place:
            hint = f"; call ops.{place}.{name}"
    raise AttributeError(
        f"numpy has no function {name} of arrays, and so cgshim.ops has none{hint}"
    )


def _place_in_namespace(name: str) -> str | None:
    """Return linalg, fft or special: the module that has a function of this name."""
    for space in ("linalg", "fft", "special"):
        if _is_function(f"{space}.{name}"):
            return space
    scipy = importlib.util.find_spec("scipy") and importlib.import_module("scipy.special")
    return "special" if hasattr(scipy, name) else None


_ALIASES = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
    "atanh": "arctanh", "pow": "power", "concat": "concatenate", "permute_dims": "transpose", "amax": "max",
    "amin": "min", "around": "round", "bitwise_not": "invert", "bitwise_invert": "invert", "absolute": "abs",
    "bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift", "true_divide": "divide", "fix": "trunc",
    "mod": "remainder", "conjugate": "conj", "trapz": "trapezoid", "sigmoid": "special.expit",
    "logsumexp": "special.logsumexp",
    **{f"linalg.{name}": name for name in ("cross", "matmul", "matrix_transpose", "outer", "tensordot", "vecdot")},
}  # fmt: skip
"""other names of a function in NumPy, the array API standard or jax.nn"""


def _is_function(name: str) -> bool:
    function: Any = np
    for part in name.split("."):
        function = getattr(function, part, None)
    defined = callable(function) or definition(name) is not None
    return defined and not isinstance(function, (type, types.ModuleType))


def _is_elementwise(name: str) -> bool:
    """Return True if every argument is a tensor or a number that stands for one."""
    space, _, own = name.rpartition(".")
    if space == "special":
        return own not in ("softmax", "log_softmax", "logsumexp")
    return isinstance(getattr(np, name, None), np.ufunc) or name in ("relu", "softplus")


def _numpy_named(name: str) -> NumPyFunction:
    elementwise = _is_elementwise(name)

    # without helpers: many calls take only a microsecond in the framework itself
    def function(*args: Any, **options: Any) -> Any:
        chosen = choice_for_plans()
        if chosen is not False and (not options or _are_numbers(options.values())):
            way = _ways.get((name, chosen, *map(type, args)), _UNKNOWN)
            try:
                if way is _UNKNOWN:  # a list's type is the set of its items' types
                    types = [
                        frozenset(map(type, x)) if type(x) in _LISTS else type(x) for x in args
                    ]
                    key = (name, chosen, *types)
                    way = _ways[key] if key in _ways else _learnt(key, args, elementwise)
                if way is not None:
                    return way(*args, **options)
            except Exception:  # noqa: BLE001  # again below, with a note
                pass
        return _looked_at(name, elementwise, args, options)

    function.__name__ = function.__qualname__ = name.rpartition(".")[2]
    function.__doc__ = f"numpy.{name} on the tensors of any backend."
    return function


def _are_numbers(values: Collection[Any]) -> bool:
    """Return True for numbers, names, and tuples of these."""
    return SIMPLE.issuperset(map(type, values)) or all(
        SIMPLE.issuperset(map(type, x)) if type(x) is tuple else type(x) in SIMPLE for x in values
    )


_LISTS = (list, tuple)


def _looked_at(name: str, elementwise: bool, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call the framework's function of this name, with arguments whose types do not decide."""
    backend = backend_or_numpy([*args, *options.values()])
    args = [_tensors_of(name, backend, arg) for arg in args]
    options = {key: _tensors_of(name, backend, value) for key, value in options.items()}
    in_framework = function_of(backend, name)
    try:
        args = _numbers_to_tensors(backend, args) if elementwise else args
        return in_framework(*args, **options)
    except Exception as error:
        framework = name_of(backend)
        for key in options:
            if "keyword argument" in str(error) and f"'{key}'" in str(error):
                known_to = "numpy and autograd" if framework == "numpy" else framework
                do = _SPELLED.get(key, f"leave it out, or call {framework}'s own function")
                raise refusal(BackendError, f"op_{name}",
                              must=f"a keyword must be a parameter of NumPy's {name} known to {known_to}",
                              got=key, do=do) from error  # fmt: skip
        called_with = ", ".join(map(describe, args))
        if "?" in called_with:
            called_with += "; it may need sizes that this graph leaves open: declare them"
        add_origin(error, f"op_{name}", f"{framework}'s {name}", called_with)
        raise


_SPELLED = {"dim": "write axis", "keepdim": "write keepdims"}
"""PyTorch's names of NumPy's parameters"""


_ways: dict[Any, NumPyFunction | None] = {}
_MOST = 10_000
"""the most types that are cached"""
_UNKNOWN: Any = object()


def _learnt(key: tuple[Any, ...], args: Sequence[Any], elementwise: bool) -> NumPyFunction | None:
    """Return and cache the framework's function for argument types; None if they do not decide.

    The types decide for tensors of the chosen framework (or of one framework if none is chosen) and
    for numbers, also in lists and tuples. A list's type is the set of its items' types.
    """
    name, chosen, *types = key
    leaves = [leaf for arg in args for leaf in (arg if type(arg) in _LISTS else (arg,))]
    tensors = [leaf for leaf in leaves if type(leaf) not in SIMPLE]
    frameworks = {framework_of_type(type(tensor)) for tensor in tensors}
    (framework,) = frameworks if len(frameworks) == 1 else (None,)
    way = None
    if framework not in (None, KERAS) and chosen in (None, framework):
        backend = load(framework)
        if all(map(backend.is_tensor, tensors)):
            offers = getattr(backend, "numpy_function_of", None)
            way = offers and offers(name, tuple(types))
            if way is None:
                way = function_of(backend, name)
                if elementwise and len(tensors) < len(args):
                    way = functools.partial(_with_numbers, way, backend)
    if len(_ways) < _MOST and all(is_lasting(type(leaf)) for leaf in leaves):
        _ways[key] = way
    return way


def _with_numbers(function: NumPyFunction, backend: Backend, *args: Any, **kwargs: Any) -> Any:
    return function(*_numbers_to_tensors(backend, args), **kwargs)


ops = Namespace()
"""the namespace that definitions call"""
linalg, fft, special = Namespace("linalg."), Namespace("fft."), Namespace("special.")

definition: Callable[[str], NumPyFunction | None] = lambda name: None
"""returns such a definition, or None; cgshim.ops sets it, because definitions import this module"""

# torch.compile reads an object's attributes lazily, but a whole dict
_functions = types.SimpleNamespace()


def function_of(backend: Backend, name: str) -> NumPyFunction:
    """Return the framework's function of this NumPy name, or cgshim's definition."""
    return getattr(_functions, _place_of(name, name_of(backend)))  # type: ignore[no-any-return]


@constant_when_traced
def _place_of(name: str, framework: str) -> str:
    """Find the framework's function of this NumPy name; return its attribute in _functions."""
    place = f"{framework}_{name}".replace(".", "_")
    if not hasattr(_functions, place):
        setattr(_functions, place, _function_of(name, framework))
    return place


def _function_of(name: str, framework: str) -> NumPyFunction:
    backend = load(framework)
    function = own_function(backend, name) or definition(name)
    if function is None and not hasattr(backend, "numpy_function"):
        import autoray

        with contextlib.suppress(ImportError, AttributeError):
            function = autoray.get_lib_fn(framework, name)
    if function is None:
        raise refusal(BackendError, f"op_{name}", must=f"NumPy's {name} must exist in {framework}",
                      got="nothing that gives its numbers", do=f"call {framework}'s own function")  # fmt: skip
    return function


def own_function(backend: Backend, name: str) -> NumPyFunction | None:
    """Return the backend's function of this name; None if it has none."""
    lookup: Callable[[str], NumPyFunction | None] | None = getattr(backend, "numpy_function", None)
    return lookup(name) if lookup else None


def _tensors_of(name: str, backend: Backend, value: Any) -> Any:
    """Return value, with NumPy arrays and Keras Variables as the backend's tensors."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_tensors_of(name, backend, item) for item in value)
    tensor = as_tensor(f"op_{name}", backend, value)
    return value if tensor is None else tensor


def _numbers_to_tensors(backend: Backend, args: Sequence[Any]) -> list[Any]:
    """Return args with Python numbers as tensors, in the dtype of the other tensors if possible."""
    dtype = next((arg.dtype for arg in args if backend.is_tensor(arg)), None)
    return [
        backend.convert_to_tensor(arg, dtype if _can_hold(dtype, type(arg)) else None)
        if isinstance(arg, (int, float, complex))
        else arg
        for arg in args
    ]


def _can_hold(dtype: Any, number: type) -> bool:
    """Return True if the dtype of a tensor can hold a Python number of this type."""
    if dtype is None or issubclass(number, complex):
        return dtype is not None and is_complex(dtype)
    is_integer = issubclass(number, int) and dtype_name(dtype) != "bool"
    return is_integer or is_differentiable(dtype)
