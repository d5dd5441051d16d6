"""NumPy: what is refused because autograd cannot differentiate it, or only when somebody asks for its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from autograd.extend import Box, defjvp_argnums, defvjp_argnums, primitive

from cgshim_numpy._arrays import Array, as_arrays, without_file
from cgshim_numpy._private import box_types

if TYPE_CHECKING:
    from cgshim.backend import Call


BOXABLE = frozenset(Box.type_mappings) - box_types
"""the classes of which autograd makes a box: NumPy's own array, and its scalars of floats"""


def boxable(call: Call, xs: Sequence[Array]) -> Sequence[Array]:
    """Return arrays as autograd differentiates them; refuse those of a class derived from NumPy's."""
    return [_boxable(call, x) for x in xs]


def _boxable(call: Call, x: Array) -> Array:
    array = without_file(x)
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        call.refuse("autograd differentiates plain arrays alone", f"a {type(array).__name__}",
                    "make it one with np.asarray")  # fmt: skip
    return array


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def without_derivative(*values: Any, function: Callable[..., Any], refuse: Callable[[], NoReturn]) -> Any:
    """Return function of what is in the boxes, connected with these; whoever differentiates the result is refused."""
    return function(*as_arrays(values))


def _vjp_refused(
    argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    refuse = kwargs["refuse"]
    return lambda upstream: refuse()


defvjp_argnums(without_derivative, _vjp_refused)
defjvp_argnums(without_derivative, lambda argnums, tangents, ans, args, kwargs: kwargs["refuse"]())
