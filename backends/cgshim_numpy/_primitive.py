"""An op under autograd: a primitive whose derivative is the rule that f returned.

autograd calls a primitive's derivative once per level of derivatives. At the innermost level of the
values the arguments are arrays: f has run there for the output, and the rule is the very function
that it returned. At every other level the arguments are boxes of the levels around it. f runs again
on these, so that the residuals of its rule are functions of the arguments there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import JVPNode, VJPNode, defjvp_argnums, defvjp_argnums, primitive

from cgshim.backend import (
    Call,
    Converted,
    Rule,
    TransformationError,
    closure_convert,
    has_no_derivative,
    refuse_captured_tangent,
    subvals,
    tensors_inside,
)
from cgshim_numpy._arrays import (
    Array,
    is_box,
    is_float,
    is_tensor,
)
from cgshim_numpy._captured import captured_by, constant, search
from cgshim_numpy._private import level_of
from cgshim_numpy._vjp import (
    Reads,
    as_array,
    conjugated,
    convert_to_tensor as convert_to_tensor,
    jvp as jvp,
    read as read,
    transposed as transposed,
    value_of as value_of,
    vjp as vjp,
    vjp_of_rules as vjp_of_rules,
    without_derivative,
)

_NODES = (VJPNode, JVPNode)
_READ = "{} made of values that Python read"
Refuse = Callable[[], NoReturn]


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    """Return the output of an op that autograd may differentiate."""
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad([*map(is_box, inputs)])
    application = Application(call, inputs)
    ans = _outputs_of(*inputs, *application.variables, application=application)
    application.own = [], []  # the rule holds the tensors that it needs
    return application.first.rule.output.combine(application.each(ans))


_outputs_of: Any = primitive(lambda *values, application: application.outputs_of(values))


def _vjp_of_outputs(argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any) -> Any:
    application: Application = kwargs["application"]
    run, boxes = application.run_at_level(args, ans), [*filter(is_box, args)]
    gradients = partial(run.gradients, argnums)

    def vjp(upstream: Any) -> list[Array]:
        upstreams = conjugated(application.each(upstream))
        return conjugated(application.connected(run, gradients, upstreams, boxes))

    return vjp


def _jvp_of_outputs(
    argnums: Sequence[int], tangents: Sequence[Any], ans: Any, args: Sequence[Any], kwargs: Any
) -> Any:
    application: Application = kwargs["application"]
    run, boxes = application.run_at_level(args, ans), [*filter(is_box, args)]
    push = partial(run.tangents, argnums, application.each(ans))
    pushed = application.connected(run, push, [*map(as_array, tangents)], boxes)
    return pushed[0] if len(pushed) == 1 else tuple_of_boxes(tuple(pushed))


defvjp_argnums(_outputs_of, _vjp_of_outputs)
defjvp_argnums(_outputs_of, _jvp_of_outputs)


class Application:
    """An op applied to arguments: the inputs of f, and then its variables."""

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call, self.count = call, len(inputs)
        self.boxes, self.rebuild, self.variables = captured_by(call, inputs)
        self.is_constant = call.once_differentiable or has_no_derivative(call.f)
        """True if the gradient has no derivative, so that one run of f is enough"""

    def run(self, args: Sequence[Array]) -> tuple[list[Array], Run]:
        """Run f on arguments, and return its outputs and the run."""
        call, inputs, variables = self.call, args[: self.count], args[self.count :]
        if self.boxes:
            values = dict(zip(map(id, self.variables), variables, strict=True))
            f, *options = self.rebuild([values.get(id(x), constant(x)) for x in self.boxes])
            call = call.with_f(f, dict(zip(call.options, options, strict=True)))
        outputs, rule = call(inputs)
        return outputs, Run(call, rule, inputs, variables)

    def outputs_of(self, values: Sequence[Array]) -> Any:
        """Run f on arrays, and return its outputs in autograd's form."""
        args = [*map(_read_only, map(as_array, values))]
        outputs, self.first = self.run(args)
        self.call.require_variables(self.first.rule, self.variables)
        for y in filter(is_box, outputs):
            self.call.refuse_captured(y)
        self.are_float = [*map(is_float, outputs)]
        self.own = args, outputs
        """the arguments and outputs of this run, until the op returns"""
        plain = [self._as_autograd_takes(y) for y in outputs]
        return plain[0] if len(plain) == 1 else tuple(plain)

    def _as_autograd_takes(self, y: Array) -> Array:
        if isinstance(y, np.ndarray) and type(y) not in (np.ndarray, np.memmap):
            self.call.refuse("autograd differentiates only plain arrays", f"a {type(y).__name__}",
                             "make it one with np.asarray")  # fmt: skip
        return y if isinstance(y, np.inexact) else np.asarray(y)

    def each(self, ans: Any) -> list[Array]:
        """Return the outputs, or their gradients, one by one; integers as values."""
        each = [ans] if len(self.are_float) == 1 else ans
        return [each[at] if has else value_of(each[at]) for at, has in enumerate(self.are_float)]

    def run_at_level(self, args: Sequence[Array], ans: Any) -> Run:
        """Return the run of f for the level with these arguments, where ans is the op's output.

        It has the rule of the first run, around the arguments and outputs of this level. f runs
        again only for residuals that it makes from the arguments.
        """
        first = self.first
        if self.is_constant or not any(map(is_box, args)):
            return first
        args = [*map(as_array, args)]
        rule = again = first.converted()
        own = self._own_tensors(args, self.each(ans))
        existing = first.existing()
        made = [x for x in rule.residuals if is_float(x) and id(x) not in own.keys() | existing]
        objects = [x for x in rule.opaque if id(x) not in existing]
        nodes = [x for x in objects if isinstance(x, _NODES)]  # in a kept pullback
        refuse = None
        if made or nodes:
            again, refuse = self._made_again(args, rule, [*map(id, made)])
        for x in objects:
            floats = (
                [] if isinstance(x, _NODES) else [*filter(is_float, tensors_inside(x, is_tensor))]
            )
            if floats:
                refuse = partial(self.call.refuse_unconnected, x, "has tensors in its attributes")
        residuals = zip(rule.residuals, again.residuals, strict=True)
        tensors = [own.get(id(x), y if is_float(x) else x) for x, y in residuals]
        # the first run's rule has f's random numbers, but only the second one's nodes are live
        grad_fn = (again if nodes else rule).rebuild(tensors)
        inputs, variables = args[: self.count], args[self.count :]
        return Run(first.call, first.rule.with_grad_fn(grad_fn), inputs, variables, refuse)

    def _own_tensors(self, args: Sequence[Array], outputs: Sequence[Array]) -> dict[int, Array]:
        """Return the arguments and outputs at a level, by the ids of the first run's tensors.

        An output that f returns twice is the first one, and an argument remains an argument.
        """
        first = [x for tensors in self.own for x in tensors]
        return dict(reversed([*zip(map(id, first), [*args, *outputs], strict=True)]))

    def _made_again(
        self, args: Sequence[Array], rule: Converted, made: Sequence[int]
    ) -> tuple[Converted, Refuse | None]:
        """Return the rule of another run of f on boxes, and the error for unknown derivatives.

        The error is for residuals that f makes in a way that autograd does not record.
        """
        reads, residual = (
            Reads.count,
            next((x for x in rule.residuals if id(x) in made), rule.opaque),
        )
        unconnected = partial(self.call.refuse_unconnected, residual, _READ.format("f"))
        try:
            again = self.run(args)[1].converted()
        except TransformationError:
            raise
        except Exception:  # noqa: BLE001  # f may be compiled code, which takes only arrays
            return rule, unconnected
        if not _are_same(rule.residuals, again.residuals):
            return rule, partial(
                self.call.refuse, "a second derivative runs f again, and f must return the same",
                "other residuals", "draw random numbers outside f, and pass them as an argument")  # fmt: skip
        pairs = zip(rule.residuals, again.residuals, strict=True)
        are_boxes = all(is_box(y) for x, y in pairs if id(x) in made)
        return again, None if are_boxes or Reads.count == reads else unconnected

    def connected(
        self,
        run: Run,
        derivative: Callable[[Sequence[Array]], list[Array]],
        vectors: Sequence[Array],
        boxes: Sequence[Array],
    ) -> list[Array]:
        """Return derivative(vectors), as a function of the boxes among the arguments and vectors."""
        call, boxes, reads = self.call, [*boxes, *filter(is_box, vectors)], Reads.count
        if self.is_constant:
            vectors = [*map(value_of, vectors)]
        results = derivative(vectors)
        level = max(map(level_of, boxes), default=-1)
        for x in filter(is_box, results):
            if level_of(x) > level:  # it did not come from the arguments
                call.refuse_captured(x)
        refuse = run.refuse
        if self.is_constant:
            refuse = partial(call.refuse_second_order, "autograd's derivative of a gradient")
        elif refuse is None and Reads.count > reads:
            refuse = partial(call.refuse_unconnected, results[0], _READ.format("grad_fn"))
        return (
            results if refuse is None else [without_derivative(x, boxes, refuse) for x in results]
        )


class Run:
    """A run of f at one level of derivatives: its rule, and the rule's tensors.

    `refuse` raises the error for the derivative of the rule. It is None if autograd has the
    derivative.
    """

    def __init__(
        self,
        call: Call,
        rule: Rule,
        inputs: Sequence[Array],
        variables: Sequence[Array],
        refuse: Refuse | None = None,
    ) -> None:
        self.call, self.rule, self.refuse = call, rule, refuse
        self.inputs, self.variables = inputs if rule.needs_inputs else (), variables

    def converted(self) -> Converted:
        """Return the rule without its residuals."""
        # the cells of a rebuilt f are not the original ones
        constants = () if self.variables else self.call.constants
        return closure_convert(self.rule.grad_fn, search(self.call, is_tensor), constants)

    def existing(self) -> set[int]:
        """Return the ids of the tensors and objects in f's closure."""
        f = closure_convert(self.call.f, search(self.call, is_tensor))
        return {*map(id, f.residuals), *map(id, f.opaque)}

    def gradients(self, argnums: Sequence[int], upstreams: Sequence[Array]) -> list[Array]:
        """Return the gradients of some of the primitive's arguments, by the rule."""
        needed, wanted = None, {*argnums}
        if self.rule.takes_needs_input_grad:
            needed = [at in wanted for at in range(len(self.rule.shapes))]
        of_inputs, of_variables = self.rule(self.inputs, upstreams, self.variables, needed)
        gradients = [*of_inputs, *of_variables]
        return [self._zeros(at) if gradients[at] is None else gradients[at] for at in argnums]

    def tangents(
        self, argnums: Sequence[int], outputs: Sequence[Array], tangents: Sequence[Array]
    ) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn or by the transposed rule."""
        zeros = [np.zeros(y.shape, y.dtype) for y in outputs]
        if self.rule.jvp_fn is not None:
            pushed = self._by_jvp_fn(argnums, [*map(value_of, outputs)], tangents)
            return [zero if t is None else t for zero, t in zip(zeros, pushed, strict=True)]
        if not self.call.forward_mode:
            self.call.refuse_forward_mode("autograd's make_jvp")
        floats = [at for at, y in enumerate(outputs) if is_float(y)]
        rule = lambda *upstreams: self.gradients(argnums, subvals(zeros, floats, upstreams))
        of_floats = [outputs[at] for at in floats]
        pushed = transposed(rule, of_floats, tangents, self.call.refuse_nonlinear)
        return subvals(zeros, floats, pushed)

    def _by_jvp_fn(
        self, argnums: Sequence[int], outputs: Sequence[Array], tangents: Sequence[Array]
    ) -> Sequence[Array | None]:
        count = len(self.rule.shapes)
        if max(argnums) >= count:
            refuse_captured_tangent(self.call.name)
        return self.rule.tangents(subvals([None] * count, argnums, tangents), outputs, self._zeros)

    def _zeros(self, at: int) -> Array:
        count = len(self.rule.shapes)
        if at < count:
            return np.zeros(self.rule.shapes[at], self.rule.dtypes[at])
        return np.zeros(self.variables[at - count].shape, self.variables[at - count].dtype)


def _are_same(residuals: Sequence[Array], others: Sequence[Array]) -> bool:
    """Return True if two runs of f made the same numbers."""
    pairs = zip(map(value_of, residuals), map(value_of, others), strict=False)
    return len(residuals) == len(others) and all(itertools.starmap(_are_close, pairs))


def _are_close(x: Array, y: Array) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    size = np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
    rounding = (1e-5 if x.dtype.itemsize > 2 else 1e-2) * size
    return x.shape == y.shape and np.allclose(x, y, rtol=0.0, atol=rounding, equal_nan=True)


def _read_only(x: Array) -> Array:
    """Return a new array that f cannot write to."""
    view = np.asarray(x)[()] if isinstance(x, np.generic) else x.view()
    if isinstance(view, np.ndarray):
        view.flags.writeable = False
    return view
