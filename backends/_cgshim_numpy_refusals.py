"""NumPy: what is refused only when somebody asks for a derivative of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from _cgshim_numpy_boxes import Array, as_array
from autograd.core import defjvp_argnums
from autograd.extend import defvjp_argnums, primitive


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
