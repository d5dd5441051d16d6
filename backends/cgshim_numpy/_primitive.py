"""An op under autograd: a primitive whose derivative is the rule that f returned.

autograd asks a primitive for its derivative once per level of derivatives. At the innermost level
of the values the arguments are arrays: f has run there for the output, and the rule is the very
function that it returned. At every other level the arguments are boxes of the levels around it. f
runs again on these, so that the residuals of its rule are functions of the arguments there.
"""

from __future__ import annotations

import functools
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
    tree_flatten,
    tree_unflatten,
)
from cgshim_numpy._captured import Captured, search
from cgshim_numpy._private import innermost_level, level_of
from cgshim_numpy._vjp import (
    Reads,
    as_array,
    conjugated,
    convert_box as convert_box,
    read as read,
    transposed as transposed,
    value_of as value_of,
    vjp as vjp,
    vjp_of_rules as vjp_of_rules,
    without_derivative,
)

_NODES = (VJPNode, JVPNode)
Refuse = Callable[[], NoReturn]


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    """Return the output of an op that autograd may differentiate."""
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad([*map(is_box, inputs)])
    application = Application(call, inputs)
    ans = _outputs_of(*inputs, *application.captured.variables, application=application)
    application.made_of = application.made = ()  # of these only the rule keeps what it needs
    return application.first.rule.output.combine(application.each(ans))


@primitive
def _outputs_of(*values: Array, application: Application) -> Any:
    return application.outputs_of(values)


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

    first: Run
    """the run of f on arrays"""
    made_of: Sequence[Array] = ()
    made: Sequence[Array] = ()
    """the arrays with which f ran there, and its outputs; dropped when the op returns"""
    are_float: Sequence[bool]
    """which outputs have gradients"""

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call, self.count = call, len(inputs)
        self.captured = Captured(call, inputs)

    @property
    def is_constant(self) -> bool:
        """True if the gradient has no derivative, so that one run of f is enough."""
        return self.call.once_differentiable or has_no_derivative(self.call.f)

    def run(self, args: Sequence[Array]) -> tuple[list[Array], Run]:
        """Run f on arguments, and return its outputs and the run."""
        variables = args[self.count :]
        call = self.captured.call_at(variables)
        outputs, rule = call(args[: self.count])
        return outputs, Run(call, rule, args[: self.count], variables)

    def outputs_of(self, values: Sequence[Array]) -> Any:
        """Run f on arrays, and return its outputs as autograd takes them."""
        self.made_of = [*map(_read_only, map(as_array, values))]
        self.made, self.first = self.run(self.made_of)
        self.call.require_variables(self.first.rule, self.captured.variables)
        for y in filter(is_box, self.made):
            self.call.refuse_captured(y)
        self.are_float = [*map(is_float, self.made)]
        plain = [self._as_autograd_takes(y) for y in self.made]
        return plain[0] if len(plain) == 1 else tuple(plain)

    def _as_autograd_takes(self, y: Array) -> Array:
        if type(y) is np.ndarray or isinstance(y, np.inexact):
            return y
        if isinstance(y, np.ndarray) and not isinstance(y, np.memmap):
            self.call.refuse("autograd differentiates plain arrays alone", f"a {type(y).__name__}",
                             "make it one with np.asarray")  # fmt: skip
        return np.asarray(y)

    def each(self, ans: Any) -> list[Array]:
        """Return the outputs, or their gradients, one by one; integers as values."""
        if len(self.are_float) == 1:
            return [ans if self.are_float[0] else value_of(ans)]
        return [ans[at] if has else value_of(ans[at]) for at, has in enumerate(self.are_float)]

    def run_at_level(self, args: Sequence[Array], ans: Any) -> Run:
        """Return the run of f for the level with these arguments, where ans is the op's output.

        It has the rule of the first run, around the arguments and outputs of this level. f runs
        again only for residuals that it has made of the arguments.
        """
        first = self.first
        if self.is_constant or not any(map(is_box, args)):
            return first
        args = [*map(as_array, args)]
        rule = again = first.converted()
        own = self.own_tensors(args, ans)
        existing = first.existing()
        made = [x for x in rule.residuals if is_float(x) and id(x) not in own.keys() | existing]
        objects = [x for x in rule.opaque if id(x) not in existing]
        nodes = [x for x in objects if isinstance(x, _NODES)]  # of a pullback that f took
        refuse = None
        if made or nodes:
            again, refuse = self.made_again(args, rule, {*map(id, made)})
        for x in objects:
            if not isinstance(x, _NODES) and any(map(is_float, tensors_inside(x, is_tensor))):
                refuse = partial(self.call.refuse_unconnected, x, "has tensors in its attributes")
        residuals = zip(rule.residuals, again.residuals, strict=True)
        tensors = [own.get(id(x), y if is_float(x) else x) for x, y in residuals]
        # the first run's rule has the numbers that f drew, but only the second one's nodes are live
        grad_fn = (again if nodes else rule).rebuild(tensors)
        inputs, variables = args[: self.count], args[self.count :]
        return Run(first.call, first.rule.with_grad_fn(grad_fn), inputs, variables, refuse)

    def own_tensors(self, args: Sequence[Array], ans: Any) -> dict[int, Array]:
        """Return the arguments and outputs at a level, by the ids of those of the first run."""
        outputs = [*zip(map(id, self.made), self.each(ans), strict=True)]
        # an output that f returns twice is the first one, and an argument remains one
        return dict(reversed(outputs)) | dict(zip(map(id, self.made_of), args, strict=True))

    def made_again(
        self, args: Sequence[Array], rule: Converted, made: set[int]
    ) -> tuple[Converted, Refuse | None]:
        """Return the rule of another run of f, on boxes, and the error for the derivatives of what
        f made, if autograd does not know them.
        """
        call, reads, unconnected = self.call, Reads.count, self.call.refuse_unconnected
        why = "f made of values that Python read"
        residual = next((x for x in rule.residuals if id(x) in made), None)
        try:
            _, run = self.run(args)
        except TransformationError:
            raise
        except Exception:  # noqa: BLE001  # f may be compiled code, which takes only arrays
            return rule, partial(unconnected, residual, why)
        again = run.converted()
        if not _are_same(rule.residuals, again.residuals):
            return rule, partial(
                call.refuse, "a second derivative runs f again, and f must return the same",
                "other residuals", "draw random numbers outside f, and pass them as an argument")  # fmt: skip
        if Reads.count > reads:
            for x, y in zip(rule.residuals, again.residuals, strict=True):
                if id(x) in made and not is_box(y):
                    return again, partial(unconnected, x, why)
        return again, None

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
        innermost = max(map(level_of, boxes), default=-1)
        for x in filter(is_box, results):
            if level_of(x) > innermost:  # it did not come from the arguments
                call.refuse_captured(x)
        if self.is_constant:
            refuse = partial(call.refuse_second_order, "autograd's derivative of a gradient")
        elif run.refuse is not None:
            refuse = run.refuse
        elif Reads.count > reads:
            why = "grad_fn made of values that Python read"
            refuse = partial(call.refuse_unconnected, results[0], why)
        else:
            return results
        return [without_derivative(x, boxes, refuse) for x in results]


class Run:
    """A run of f at one level of derivatives: its rule, and the tensors with which that is called."""

    def __init__(
        self,
        call: Call,
        rule: Rule,
        inputs: Sequence[Array],
        variables: Sequence[Array],
        refuse: Refuse | None = None,
    ) -> None:
        self.call, self.rule, self.variables = call, rule, variables
        self.inputs = inputs if rule.needs_inputs else ()
        self.specs = [(x.shape, x.dtype) for x in (*inputs, *variables)]
        self.refuse = refuse
        """raises the error for the derivative of the rule; None if autograd knows it"""

    def converted(self) -> Converted:
        """Return the rule without its residuals."""
        # the cells of an f around other values are not those that existed before
        constants = () if self.variables else self.call.constants
        return closure_convert(self.rule.grad_fn, search(self.call, is_tensor), constants)

    def existing(self) -> set[int]:
        """Return the ids of the tensors and objects in f's closure."""
        _, f = self.call.constants, closure_convert(self.call.f, search(self.call, is_tensor))
        return {*map(id, f.residuals), *map(id, f.opaque)}

    def gradients(self, argnums: Sequence[int], upstreams: Sequence[Array]) -> list[Array]:
        """Return the gradients of some of the primitive's arguments, by the rule."""
        rule, needed = self.rule, None
        if rule.takes_needs_input_grad:
            needed = [at in argnums for at in range(len(rule.shapes))]
        if innermost_level() >= 0:
            rule = rule.with_grad_fn(_opening_boxes(rule.grad_fn))
        of_inputs, of_variables = rule(self.inputs, upstreams, self.variables, needed)
        gradients = [*of_inputs, *of_variables]
        return [self._zeros(at) if gradients[at] is None else gradients[at] for at in argnums]

    def tangents(
        self, argnums: Sequence[int], outputs: Sequence[Array], tangents: Sequence[Array]
    ) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn or by the transposed rule."""
        if self.rule.jvp_fn is not None:
            return self._by_jvp_fn(argnums, outputs, tangents)
        if not self.call.forward_mode:
            self.call.refuse_forward_mode("autograd's make_jvp")
        zeros = [np.zeros(y.shape, y.dtype) for y in outputs]
        floats = [at for at, y in enumerate(outputs) if is_float(y)]
        rule = lambda *upstreams: self.gradients(argnums, subvals(zeros, floats, upstreams))
        of_floats = [outputs[at] for at in floats]
        return subvals(
            zeros, floats, transposed(rule, of_floats, tangents, self.call.refuse_nonlinear)
        )

    def _by_jvp_fn(
        self, argnums: Sequence[int], outputs: Sequence[Array], tangents: Sequence[Array]
    ) -> list[Array]:
        count = len(self.rule.shapes)
        if max(argnums) >= count:
            refuse_captured_tangent(self.call.name)
        full = subvals([None] * count, argnums, tangents)
        values = [*map(value_of, outputs)]
        pushed = self.rule.tangents(full, values, self._zeros)
        return [
            np.zeros(y.shape, y.dtype) if t is None else t
            for t, y in zip(pushed, values, strict=True)
        ]

    def _zeros(self, at: int) -> Array:
        return np.zeros(*self.specs[at])


def _opening_boxes(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a grad_fn whose gradients are in containers, not in autograd's boxes of containers."""

    @functools.wraps(grad_fn)
    def opened(*args: Any, **keywords: Any) -> Any:
        leaves, structure = tree_flatten(grad_fn(*args, **keywords))
        return tree_unflatten(structure, leaves)

    return opened


def _are_same(residuals: Sequence[Array], others: Sequence[Array]) -> bool:
    """Return True if two runs of f have made the same numbers."""
    if len(residuals) != len(others):
        return False
    for tensors in zip(residuals, others, strict=True):
        x, y = map(np.asarray, map(value_of, tensors))
        size = np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
        rounding = (1e-5 if x.dtype.itemsize > 2 else 1e-2) * size
        if x.shape != y.shape or not np.allclose(x, y, rtol=0.0, atol=rounding, equal_nan=True):
            return False
    return True


def _read_only(x: Array) -> Array:
    """Return an array that f cannot write to, and that no other object is."""
    if not isinstance(x, np.ndarray):
        return np.asarray(x)[()]
    view = x.view()
    view.flags.writeable = False
    return view
