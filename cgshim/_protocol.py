"""What a backend offers: the members of its module. It does not know how a rule is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Tensor = Any
"""A tensor of any framework: an array, a tracer, a Variable, a Parameter, a box."""


class Backend(Protocol):
    """A plug-in module for one framework, with eight functions."""

    __name__: str

    def is_tensor(self, x: object, /) -> bool:
        """Return True if x is a tensor of the framework, and so takes part in differentiation."""
        ...

    def tree_flatten(self, tree: Any, /) -> tuple[list[Any], Any]:
        """Return the leaves of tree and its structure; None is a leaf, and dicts are read by sorted key."""
        ...

    def tree_unflatten(self, structure: Any, leaves: Sequence[Any], /) -> Any:
        """Undo tree_flatten."""

    def convert_to_tensor(self, x: Any, /, dtype: Any = None) -> Tensor:
        """Return x (tensor, NumPy array, number, nested list) as a tensor of dtype (the framework's, or its name)."""

    def convert_to_numpy(self, x: Tensor, /) -> Any:
        """Return x as a NumPy array, detached from all that is differentiated."""

    def stop_gradient(self, x: Tensor, /) -> Tensor:
        """Return x as a constant."""

    def custom_gradient(self, call: Any, inputs: Sequence[Tensor], /) -> Any:
        """Run ``call(inputs)``, and return the output of f with tensors that get their gradients from the rule.

        call is a `cgshim.backend.Call`. ``call(inputs) -> (outputs, rule)`` runs f. ``rule(inputs, upstreams,
        variables)`` returns ``(gradients, gradients_of_variables)``, both already checked, with None for no gradient;
        ``rule.output.combine(tensors)`` is f's output around other tensors, and is what this function returns.
        """

    def vjp(
        self, fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /
    ) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
        """Return fn's outputs at inputs, all differentiable, and its pullback: upstream gradients to gradients."""
        ...


REQUIRED = tuple(name for name in vars(Backend) if not name.startswith("_"))
"""the names of these functions"""
