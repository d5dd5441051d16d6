"""NumPy: what is refused because autograd cannot differentiate it, or only when somebody asks for its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from autograd.core import defjvp_argnums
from autograd.extend import defvjp_argnums, primitive

from cgshim_numpy._boxes import Array, as_array, plain

if TYPE_CHECKING:
    from cgshim._call import Call


def boxable(call: Call, x: Array) -> Array:
    """An array as autograd differentiates it; refused where it is of a class derived from NumPy's."""
    array = plain(x)
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        call.refuse("autograd differentiates plain arrays alone", f"a {type(array).__name__}",
                    "make it one with np.asarray")  # fmt: skip
    return array


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def without_derivative(function: Callable[..., Any], refuse: Callable[[], NoReturn], *values: Any) -> Any:
    """function of what is in the boxes among values, and connected with these: whoever differentiates it is refused."""
    return function(*map(as_array, values))


def _vjp_refused(
    argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    refuse = args[1]
    return lambda upstream: refuse()


defvjp_argnums(without_derivative, _vjp_refused)
defjvp_argnums(without_derivative, lambda argnums, tangents, ans, args, kwargs: args[1]())
