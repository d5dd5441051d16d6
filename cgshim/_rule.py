"""A grad_fn with its form: flat upstream gradients in, flat and checked gradients out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from cgshim._dispatch import run_on
from cgshim._dtypes import is_differentiable
from cgshim._errors import (
    CustomGradientTypeError,
    CustomGradientValueError,
    TransformationError,
    add_origin,
    count,
    describe,
    describe_tree,
    function_name,
    refusal,
)
from cgshim._foreign import is_traced
from cgshim._gradients import (
    Arguments,
    check_gradient,
    gradients_of_arguments,
    gradients_of_variables,
    split_gradients,
)
from cgshim._protocol import Tensor
from cgshim._pytree import ONE_TENSOR, TreeSpec, combine_each
from cgshim._signature import FORMS, Form, convention_of


@dataclass(slots=True, eq=False)
class RuleSignature:
    """How to call the rules of one code object, and how to check their results.

    It holds no tensor: the calls of an op share it.
    """

    arguments: Arguments
    output: TreeSpec
    """the spec of f's output"""
    form: Form
    requires_variables: bool | None
    """None if grad_fn takes no variables, True if it requires them, else False"""
    takes_needs_input_grad: bool

    @property
    def is_plain(self) -> bool:
        """True if grad_fn takes neither variables nor needs_input_grad."""
        return self.requires_variables is None and not self.takes_needs_input_grad

    def gradients(
        self,
        grad_fn: Callable[..., Any],
        inputs: Sequence[Tensor],
        upstreams: Sequence[Tensor],
        shapes: Sequence[Any],
        dtypes: Sequence[Any],
        variables: Sequence[Tensor] = (),
        needed: Sequence[bool] | None = None,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Call grad_fn and return the checked gradients of the inputs and of the variables."""
        arguments, output = self.arguments, self.output
        with_variables = variables or self.requires_variables or arguments.variables is not None
        keywords: dict[str, Any] = {}
        if with_variables:
            keywords["variables"] = arguments.structured_variables(variables)
        if needed is not None:
            keywords["needs_input_grad"] = arguments.structured(needed)
        args: Sequence[Any] = upstreams
        if self.form != "flat":
            upstream = (
                upstreams[0] if output is ONE_TENSOR else output.without_static().combine(upstreams)
            )
            args = (upstream,)
            if self.form == "arguments":
                args, keywords["upstream"] = combine_each(arguments.specs, inputs), upstream
        if is_traced():
            result = grad_fn(*args, **keywords)
        else:
            try:
                # new tensors go to the upstreams' device; inputs may be empty
                result = run_on(
                    arguments.backend, upstreams or inputs, True, grad_fn, *args, **keywords
                )
            except Exception as error:
                add_origin(error, arguments.op, "grad_fn", self._upstream_in_words(upstreams))
                raise
        of_variables = None
        if with_variables:
            result, of_variables = split_gradients(arguments, result)
        elif self.requires_variables is not None:
            result = _without_empty_variables(result)
        try:
            of_inputs = gradients_of_arguments(arguments, result, shapes, dtypes, needed)
        except CustomGradientValueError as error:
            if self.form != "flat" and output.count > 1:
                error.args = (f"{error} ({self._upstream_in_words(upstreams)})",)
            raise
        return (
            of_inputs,
            gradients_of_variables(arguments, of_variables, variables) if with_variables else [],
        )

    def _upstream_in_words(self, upstreams: Sequence[Tensor]) -> str:
        """Return how grad_fn gets its upstream gradients, for messages."""
        if self.form == "flat":
            return f"{count(len(upstreams), 'upstream gradient')}: {', '.join(map(describe, upstreams))}"
        tree = describe_tree(self.output.without_static().combine(upstreams))
        if self.output.count < 2:
            return f"upstream structured as the output: {tree}"
        several = f"{self.arguments.op} has {self.output.count} outputs"
        return f"{several}: upstream is {tree}; write grad(d1, d2) for one upstream each"


@dataclass(slots=True, eq=False)
class Rule:
    """The rule of one run of f. It holds only the tensors that grad_fn holds."""

    signature: RuleSignature
    needed: Sequence[bool] | None
    """None if grad_fn has no needs_input_grad, else its value, unless the backend knows a better
    one
    """
    shapes: Sequence[Any]
    """the shapes of the inputs, which their gradients must have"""
    dtypes: Sequence[Any]
    """the dtypes of the inputs' gradients"""
    grad_fn: Callable[..., Any]
    is_transpose: ClassVar[bool] = False
    """True if the rule is the transpose of jvp_fn: a backend that transposes need not call it"""

    @property
    def arguments(self) -> Arguments:
        """The part that all runs of the call share."""
        return self.signature.arguments

    @property
    def output(self) -> TreeSpec:
        """The spec of f's output."""
        return self.signature.output

    @property
    def needs_inputs(self) -> bool:
        """True if grad_fn gets f's arguments; otherwise the backend need not save them."""
        return self.signature.form == "arguments"

    @property
    def takes_variables(self) -> bool:
        """True if grad_fn has a parameter for the variables."""
        return self.signature.requires_variables is not None

    @property
    def jvp_fn(self) -> Callable[..., Any] | None:
        """The jvp_fn that f returned; None if forward mode transposes grad_fn."""
        return getattr(self.grad_fn, _JVP_FN, None)

    @property
    def jvp_takes_needs_input_grad(self) -> bool:
        """True if there is a jvp_fn with a parameter needs_input_grad."""
        arity = len(self.arguments.specs)
        return self.jvp_fn is not None and convention_of(self.jvp_fn, arity, arity)[-1]

    def tangents(
        self,
        tangents: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
    ) -> list[Tensor | None]:
        """Return the outputs' tangents, checked, by jvp_fn from the inputs' tangents; None is zero.

        ``outputs`` have the outputs' shapes and dtypes; ``zeros(at)`` is the zero tangent of an
        input. Only forward mode calls this, and only with a jvp_fn.
        """
        jvp_fn, arguments, output = self.jvp_fn, self.arguments, self.output.without_static()
        assert jvp_fn is not None
        op, specs, needed = arguments.op, arguments.specs, [t is not None for t in tangents]
        given = [t for t in tangents if t is not None]
        full = [
            zeros(at) if t is None and is_differentiable(dtype) else t
            for at, (t, dtype) in enumerate(zip(tangents, self.dtypes, strict=True))
        ]
        keywords: dict[str, Any] = {}
        if self.jvp_takes_needs_input_grad:
            keywords = {"needs_input_grad": arguments.structured(needed)}
        if not arguments.are_tensors:
            full = combine_each([spec.without_static() for spec in specs], full)
        if is_traced():
            result = jvp_fn(*full, **keywords)
        else:
            result = run_on(arguments.backend, given, True, jvp_fn, *full, **keywords)
        leaves = [None] * len(outputs) if result is None else output.align(result)
        if leaves is None:
            raise refusal(CustomGradientValueError, op,
                          must="jvp_fn must return a tangent structured as the output",
                          got=describe_tree(result),
                          do=f"return {describe_tree(output.combine(outputs))}")  # fmt: skip
        return [
            check_gradient(
                op, arguments.backend, t, y.shape, y.dtype,
                functools.partial(output.path, "the output", at), "tangent",
            )
            for at, (t, y) in enumerate(zip(leaves, outputs, strict=True))
        ]  # fmt: skip

    @property
    def takes_needs_input_grad(self) -> bool:
        """True if grad_fn has a parameter needs_input_grad."""
        return self.needed is not None

    def with_grad_fn(self, grad_fn: Callable[..., Any]) -> Rule:
        """Return the same rule with other residuals: grad_fn must have the same signature."""
        return type(self)(self.signature, self.needed, self.shapes, self.dtypes, grad_fn)

    def __call__(
        self,
        inputs: Sequence[Tensor],
        upstreams: Sequence[Tensor],
        variables: Sequence[Tensor] = (),
        needed: Sequence[bool] | None = None,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs and of the variables.

        If needs_inputs is False, inputs may be empty. upstreams holds one gradient per tensor
        output: zeros for an unused output, never None. needed says for each input if its gradient
        will be used; None stands for the flags that f got.
        """
        needed = (needed or self.needed) if self.takes_needs_input_grad else None
        return self.signature.gradients(
            self.grad_fn, inputs, upstreams, self.shapes, self.dtypes, variables, needed
        )


_JVP_FN = "cgshim_jvp_fn"


def with_jvp_fn(grad_fn: Callable[..., Any], jvp_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a grad_fn that also holds jvp_fn and its residuals."""
    if is_traced():  # torch.compile traces only reverse mode
        return grad_fn

    @functools.wraps(grad_fn)
    def both(*args: Any, **keywords: Any) -> Any:
        return grad_fn(*args, **keywords)

    setattr(both, _JVP_FN, jvp_fn)
    return both


def refuse_nonlinear_jvp(op: str, what: str) -> NoReturn:
    """Raise the error for a jvp_fn that has no transpose."""
    raise refusal(TransformationError, op, must="jvp_fn must be linear in the tangents", got=what,
                  do="write it in linear operations")  # fmt: skip


def refuse_captured_tangent(op: str) -> NoReturn:
    """Raise the error for a tangent of a tensor that f captures."""
    raise refusal(TransformationError, op,
                  must="jvp_fn gets only the tangents of the arguments",
                  got="one of a captured tensor", do="pass it as an argument")  # fmt: skip


def required_convention(
    arguments: Arguments, grad_fn: Callable[..., Any], output: TreeSpec
) -> tuple[Form, bool | None, bool]:
    """Return the convention of grad_fn; raise an error if it has no known form."""
    # a grad_fn from `with_jvp_fn` is called like the original, whose code is read already
    function = getattr(grad_fn, "__wrapped__") if hasattr(grad_fn, _JVP_FN) else grad_fn  # noqa: B009
    form, variables, takes_needs_input_grad = convention_of(
        function, len(arguments.specs), output.count
    )
    if form is None:
        of = f"{count(len(arguments.specs), 'argument')} and {count(output.count, 'tensor output')}"
        raise refusal(CustomGradientTypeError, arguments.op,
                      must=f"grad_fn must take its upstream gradients as {FORMS}",
                      got=f"{spelled(grad_fn)} for {of}", do="write it in one of these forms")  # fmt: skip
    return form, variables, takes_needs_input_grad


def _without_empty_variables(result: Any) -> Any:
    """Return the arguments' gradients, also from a pair whose gradients of variables are empty."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    return (
        result[0] if is_pair and isinstance(result[1], (list, tuple)) and not result[1] else result
    )


def spelled(grad_fn: Callable[..., Any]) -> str:
    """Return grad_fn's name and parameters, for messages."""
    try:
        return f"{function_name(grad_fn)}{inspect.signature(grad_fn)}"
    except ValueError:
        return function_name(grad_fn)
