"""A grad_fn with its form: flat upstream gradients in, flat and checked gradients out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cgshim._errors import CustomGradientTypeError, count, function_name, sentence
from cgshim._forms import FORMS, convention_of
from cgshim._gradients import (
    Arguments,
    gradients_of_arguments,
    gradients_of_variables,
    without_gradients_of_variables,
)
from cgshim._protocol import Tensor
from cgshim._trees import ONE_TENSOR, TreeSpec, combine_each


class Rule:
    """The rule of one run of f."""

    __slots__ = ("_arguments", "_form", "_variables", "dtypes", "grad_fn", "output", "shapes")

    output: TreeSpec
    """the spec of what f returned"""
    shapes: Sequence[Any]
    dtypes: Sequence[Any]
    """what a gradient must fit; not the inputs, which the rule would keep alive"""

    def __init__(
        self, arguments: Arguments, grad_fn: Callable[..., Any], output: TreeSpec, inputs: Sequence[Tensor]
    ) -> None:
        self._form, self._variables = convention_of(grad_fn, len(arguments.specs), output.count)
        if self._form is None:
            raise CustomGradientTypeError(_no_form(arguments, grad_fn, output))
        self._arguments = arguments
        self.grad_fn = grad_fn
        self.output = output
        self.shapes, self.dtypes = [x.shape for x in inputs], [x.dtype for x in inputs]

    @property
    def needs_inputs(self) -> bool:
        """True if grad_fn is called with f's arguments; if not, they need not be kept for it."""
        return self._form == "arguments"

    @property
    def takes_variables(self) -> bool:
        """True if grad_fn has a parameter for the variables that f read."""
        return self._variables is not None

    def with_grad_fn(self, grad_fn: Callable[..., Any]) -> Rule:
        """Return the same rule with another grad_fn of the same signature: one whose residuals were replaced."""
        rule = Rule.__new__(Rule)
        rule._arguments, rule._form, rule._variables = self._arguments, self._form, self._variables
        rule.output, rule.shapes, rule.dtypes, rule.grad_fn = self.output, self.shapes, self.dtypes, grad_fn
        return rule

    def with_shapes_of(self, inputs: Sequence[Tensor]) -> Rule:
        """Return the same rule for inputs of other shapes: f may have changed its inputs."""
        rule = self.with_grad_fn(self.grad_fn)
        rule.shapes = [x.shape for x in inputs]
        return rule

    def __call__(
        self, inputs: Sequence[Tensor], upstreams: Sequence[Tensor], variables: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs and of the variables; if not needs_inputs, inputs may be empty.

        upstreams holds one gradient per tensor output: zeros if the output was not used, never None.
        """
        keywords = {"variables": list(variables)} if variables or self._variables else {}
        if self._form == "flat":
            result = self.grad_fn(*upstreams, **keywords)
        else:
            upstream = upstreams[0] if self.output is ONE_TENSOR else self.output.without_static().combine(upstreams)
            if self._form == "structured":
                result = self.grad_fn(upstream, **keywords)
            else:
                result = self.grad_fn(*combine_each(self._arguments.specs, inputs), upstream=upstream, **keywords)
        if not keywords:
            if self._variables is not None:
                result = _without_no_variables(result)
            return gradients_of_arguments(self._arguments, result, self.shapes, self.dtypes), []
        of_arguments, of_variables = without_gradients_of_variables(self._arguments, result)
        return (
            gradients_of_arguments(self._arguments, of_arguments, self.shapes, self.dtypes),
            gradients_of_variables(self._arguments, of_variables, variables),
        )


def _without_no_variables(result: Any) -> Any:
    """Return the gradients of the arguments, also from a rule with `variables=None` that returns a pair."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    return result[0] if is_pair and isinstance(result[1], (list, tuple)) and not result[1] else result


def spelled(grad_fn: Callable[..., Any]) -> str:
    """Return a grad_fn for messages: its name and its parameters."""
    try:
        return f"{function_name(grad_fn)}{inspect.signature(grad_fn)}"
    except ValueError:
        return function_name(grad_fn)


def _no_form(arguments: Arguments, grad_fn: Callable[..., Any], output: TreeSpec) -> str:
    given = len(arguments.specs)
    return sentence(
        arguments.op, must=f"grad_fn must take its upstream gradients as {FORMS}",
        got=f"{spelled(grad_fn)} for {count(given, 'argument')} and {count(output.count, 'tensor output')}",
        do="write it in one of these forms",
    )  # fmt: skip
