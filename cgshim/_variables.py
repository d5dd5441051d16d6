"""Captured state: the trainable tensors that f closes over, declared to the op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from cgshim._dtypes import is_differentiable
from cgshim._errors import CustomGradientTypeError, describe_tree, refusal
from cgshim._protocol import Backend, Tensor
from cgshim._pytree import TreeSpec, partition
from cgshim._registry import name_of


def current_variables(f: Callable[..., Any], variables: Any) -> Any:
    """Return the tree of the declared variables.

    A callable is called for each call of the op, because a module may replace its parameters; for a
    method it gets the instance.
    """
    if not callable(variables):
        return variables
    instance = f.args[0] if isinstance(f, functools.partial) else getattr(f, "__self__", None)
    return variables() if instance is None else variables(instance)


def declared_variables(
    op: str, backend: Backend, variables: Any
) -> tuple[Sequence[Tensor], TreeSpec]:
    """Return the tensors of the declared variables, and their structure."""
    if not getattr(backend, "supports_variables", False):
        raise refusal(CustomGradientTypeError, op,
                      must="the backend must support declared variables",
                      got=f"{name_of(backend)}, which does not yet",
                      do="pass each one as an argument")  # fmt: skip
    tensors, spec = partition(op, backend, variables)
    if not tensors or not all(is_differentiable(t.dtype) for t in tensors):
        raise refusal(CustomGradientTypeError, op,
                      must="variables must be a pytree of float or complex tensors",
                      got=describe_tree(variables),
                      do="leave out what has no gradient")  # fmt: skip
    for at, t in enumerate(tensors):
        if any(t is other for other in tensors[:at]):
            raise refusal(CustomGradientTypeError, op, must="variables must be different tensors",
                          got=f"{spec.paths('variables')[at]} twice", do="declare it once")  # fmt: skip
    return tensors, spec
