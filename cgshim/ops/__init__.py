"""NumPy's functions, by their NumPy names, on the tensors of any backend.

``ops.exp(x)``, ``ops.sum(x, axis=0)``, ``ops.linalg.norm(x)`` find their backend as every op does.
The parameters, their defaults and the numbers are NumPy's; dtypes are the framework's own. If a
framework lacks a function, calling it raises an error. ``ops.special`` has SciPy's special
functions. There are also the few functions that every rule needs and that frameworks spell
differently. ``cgshim.op_<name>`` is ``cgshim.ops.<name>``.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from cgshim.ops import _algebra, _elementwise, _numpy
from cgshim.ops._control import cond as cond, scan as scan, while_loop as while_loop
from cgshim.ops._numpy import (
    cached_function,
    fft as fft,
    linalg as linalg,
    special as special,
)
from cgshim.ops._tensors import (
    cast as cast,
    convert_to_numpy as convert_to_numpy,
    convert_to_tensor as convert_to_tensor,
    dtype as dtype,
    index_add as index_add,
    is_tensor as is_tensor,
    shape as shape,
    stop_gradient as stop_gradient,
    sum_to_shape as sum_to_shape,
    tree_map as tree_map,
)


def _definition(name: str) -> Callable[..., Any] | None:
    """Return cgshim's own definition of this NumPy function, or None."""
    for module in (_elementwise, _algebra):
        function = vars(module).get(name.replace(".", "_"))
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            return function
    return _algebra.WITH_PARAMETERS.get(name) or _elementwise.WITH_PARAMETERS.get(name)


_numpy.definition = _definition


def __getattr__(name: str) -> Callable[..., Any]:
    return cached_function(name, globals())
