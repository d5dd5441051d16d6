"""Find a NumPy function that is defined in terms of others."""

from __future__ import annotations

from types import FunctionType

from cgshim.ops._numpy import NumPyFunction


def definition(name: str) -> NumPyFunction | None:
    """Return the function in terms of others, from one of the files next to this one; else None."""
    from cgshim.ops import _algebra, _elementwise, _special, _statistics

    for module in (_statistics, _elementwise, _algebra, _special):
        function = vars(module).get(name.replace(".", "_"))
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            return function
    return _algebra.WITH_PARAMETERS.get(name)
