"""An op under autograd: a primitive whose derivative is the rule that f returned.

autograd calls a primitive's derivative once per level of derivatives. At the innermost level of the
values the arguments are arrays: f has run there for the output, and the rule is the very function
that it returned. At every other level the arguments are boxes of the levels around it. f runs again
on these, so that the residuals of its rule are functions of the arguments there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import optree
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import JVPNode, VJPNode, defjvp_argnums, defvjp_argnums, primitive

from cgshim.backend import (
    Call,
    Converted,
    Rule,
    TransformationError,
    closure_convert,
    has_no_derivative,
    is_differentiable,
    is_in_rule,
    refuse_captured_tangent,
    subvals,
    tensors_inside,
)
from cgshim_numpy._arrays import Array, is_box, is_tensor
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
    application.own = ()  # the rule holds the tensors that it needs
    return application.first.rule.output.combine(application.each(ans))


_outputs_of: Any = primitive(lambda *values, application: application.outputs_of(values))


def _vjp_of_outputs(argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any) -> Any:
    application: Application = kwargs["application"]
    run = application.run_at_level(args, ans)
    boxes, gradients = [*filter(is_box, args)], partial(run.gradients, argnums)
    return lambda upstream: conjugated(
        run.connected(gradients, conjugated(application.each(upstream)), boxes)
    )


def _jvp_of_outputs(
    argnums: Sequence[int], tangents: Sequence[Any], ans: Any, args: Sequence[Any], kwargs: Any
) -> Any:
    application: Application = kwargs["application"]
    run = application.run_at_level(args, ans)
    push = partial(run.tangents, argnums, application.each(ans))
    pushed = run.connected(push, [*map(as_array, tangents)], [*filter(is_box, args)])
    return pushed[0] if len(pushed) == 1 else tuple_of_boxes(tuple(pushed))


defvjp_argnums(_outputs_of, _vjp_of_outputs)
defjvp_argnums(_outputs_of, _jvp_of_outputs)


class Application:
    """An op applied to arguments: the inputs of f, and then its variables."""

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call, self.count = call, len(inputs)
        self.boxes, self.rebuild, self.variables = captured_by(call, inputs)
        refuse = partial(call.refuse_second_order, "autograd's derivative of a gradient")
        is_constant = call.once_differentiable or has_no_derivative(call.f)
        self.refuse = refuse if is_constant else None
        """raises the error if the gradient has no derivative: then one run of f is enough"""

    def run(self, args: Sequence[Array]) -> tuple[list[Array], Run]:
        """Run f on arguments, and return its outputs and the run."""
        call = self.call
        if self.boxes:
            values = dict(zip(map(id, self.variables), args[self.count :], strict=True))
            f, *options = self.rebuild([values.get(id(x), value_of(x)) for x in self.boxes])
            call = call.with_f(f, dict(zip(call.options, options, strict=True)))
        outputs, rule = call(args[: self.count])
        return outputs, Run(call, rule, args, self.refuse)

    def outputs_of(self, values: Sequence[Array]) -> Any:
        """Run f on arrays, and return its outputs in autograd's form."""
        args = [*map(_read_only, map(as_array, values))]
        outputs, self.first = self.run(args)
        self.call.require_variables(self.first.rule, self.variables)
        for y in filter(is_box, outputs):
            self.call.refuse_captured(y)
        self.are_float = [is_differentiable(y.dtype) for y in outputs]
        self.own: Sequence[Array] = [*args, *outputs]
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
        if self.refuse or not any(map(is_box, args)):
            return first
        args = [*map(as_array, args)]
        rule = again = first.converted()
        # reversed: an output that f returns twice is the first one, and an argument remains one
        own = dict(reversed([*zip(map(id, self.own), [*args, *self.each(ans)], strict=True)]))
        before = closure_convert(first.call.f, _search(first.call, is_tensor))
        known = {*own, *map(id, before.residuals), *map(id, before.opaque)}
        made = {id(x) for x in rule.residuals if is_differentiable(x.dtype)} - known
        objects = [x for x in rule.opaque if id(x) not in known]
        nodes = [x for x in objects if isinstance(x, _NODES)]  # in a kept pullback
        refuse = None
        if made or nodes:
            again, refuse = self._made_again(args, rule, made)
        for x in objects:
            if not isinstance(x, _NODES) and any(
                is_differentiable(t.dtype) for t in tensors_inside(x, is_tensor)
            ):
                refuse = partial(self.call.refuse_unconnected, x, "has tensors in its attributes")
        residuals = zip(rule.residuals, again.residuals, strict=True)
        tensors = [own.get(id(x), y if is_differentiable(x.dtype) else x) for x, y in residuals]
        # the first run's rule has f's random numbers, but only the second one's nodes are live
        grad_fn = (again if nodes else rule).rebuild(tensors)
        return Run(first.call, first.rule.with_grad_fn(grad_fn), args, refuse)

    def _made_again(
        self, args: Sequence[Array], rule: Converted, made: set[int]
    ) -> tuple[Converted, Refuse | None]:
        """Return the rule of another run of f on boxes, and the error for unknown derivatives.

        The error is for residuals that f makes in a way that autograd does not record.
        """
        reads = Reads.count
        residual = next((x for x in rule.residuals if id(x) in made), rule.opaque)
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
        residuals = zip(rule.residuals, again.residuals, strict=True)
        are_boxes = all(is_box(y) for x, y in residuals if id(x) in made)
        return again, None if are_boxes or Reads.count == reads else unconnected


class Run:
    """A run of f at one level of derivatives: its rule, and the rule's tensors.

    `refuse` raises the error for the derivative of the rule. It is None if autograd has the
    derivative.
    """

    def __init__(
        self, call: Call, rule: Rule, args: Sequence[Array], refuse: Refuse | None
    ) -> None:
        self.call, self.rule, self.refuse, self.count = call, rule, refuse, len(rule.shapes)
        self.inputs = args[: self.count] if rule.needs_inputs else ()
        self.variables = args[self.count :]

    def converted(self) -> Converted:
        """Return the rule without its residuals."""
        # the cells of a rebuilt f are not the original ones
        constants = () if self.variables else self.call.constants
        return closure_convert(self.rule.grad_fn, _search(self.call, is_tensor), constants)

    def connected(
        self,
        derivative: Callable[[Sequence[Array]], list[Array]],
        vectors: Sequence[Array],
        boxes: Sequence[Array],
    ) -> list[Array]:
        """Return derivative(vectors), as a function of the boxes among the arguments and vectors."""
        boxes, reads, refuse = [*boxes, *filter(is_box, vectors)], Reads.count, self.refuse
        results = derivative([*map(value_of, vectors)] if refuse else vectors)
        level = max(map(level_of, boxes), default=-1)
        for x in filter(is_box, results):
            if level_of(x) > level:  # it did not come from the arguments
                self.call.refuse_captured(x)
        if refuse is None and Reads.count > reads:
            refuse = partial(self.call.refuse_unconnected, results[0], _READ.format("grad_fn"))
        cut = lambda x: without_derivative(*boxes, value=value_of(x), refuse=refuse)
        return [*map(cut, results)] if refuse else results

    def gradients(self, argnums: Sequence[int], upstreams: Sequence[Array]) -> list[Array]:
        """Return the gradients of some of the primitive's arguments, by the rule."""
        needed = [at in argnums for at in range(self.count)]
        of_inputs, of_variables = self.rule(self.inputs, upstreams, self.variables, needed)
        gradients = [*of_inputs, *of_variables]
        return [self._zeros(at) if gradients[at] is None else gradients[at] for at in argnums]

    def tangents(
        self, argnums: Sequence[int], outputs: Sequence[Array], tangents: Sequence[Array]
    ) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn or by the transposed rule."""
        zeros = [np.zeros(y.shape, y.dtype) for y in outputs]
        if self.rule.jvp_fn is not None:
            if max(argnums) >= self.count:
                refuse_captured_tangent(self.call.name)
            given = subvals([None] * self.count, argnums, tangents)
            by_author = self.rule.tangents(given, [*map(value_of, outputs)], self._zeros)
            return [zero if t is None else t for zero, t in zip(zeros, by_author, strict=True)]
        if not self.call.forward_mode:
            self.call.refuse_forward_mode("autograd's make_jvp")
        floats = [at for at, y in enumerate(outputs) if is_differentiable(y.dtype)]
        rule = lambda *upstreams: self.gradients(argnums, subvals(zeros, floats, upstreams))
        of_floats = [outputs[at] for at in floats]
        pushed = transposed(rule, of_floats, tangents, self.call.refuse_nonlinear)
        return subvals(zeros, floats, pushed)

    def _zeros(self, at: int) -> Array:
        variables = [(x.shape, x.dtype) for x in map(value_of, self.variables)]
        specs = [*zip(self.rule.shapes, self.rule.dtypes, strict=True), *variables]
        return np.zeros(*specs[at])


def _are_same(residuals: Sequence[Array], others: Sequence[Array]) -> bool:
    """Return True if two runs of f made the same numbers."""
    return len(residuals) == len(others) and all(
        map(_are_close, map(value_of, residuals), map(value_of, others))
    )


def _are_close(x: Array, y: Array) -> bool:
    size = np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
    rounding = (1e-5 if x.dtype.itemsize > 2 else 1e-2) * size
    return x.shape == y.shape and np.allclose(  # NumPy 1 does not compare arrays of bfloat16
        x.astype(complex), y.astype(complex), rtol=0.0, atol=rounding, equal_nan=True
    )


def _read_only(x: Array) -> Array:
    """Return a new array or scalar that f cannot write to."""
    view = np.asanyarray(x).view()
    view.flags.writeable = False
    return view[()] if isinstance(x, np.generic) else view


# --- Boxes that f captures: f runs on other values of them, in a copy of f ------------------------


def captured_by(
    call: Call, inputs: Sequence[Array]
) -> tuple[Sequence[Array], Callable[[Sequence[Any]], Any], Sequence[Array]]:
    """Return the boxes in f and its options, a function that rebuilds these, and the variables.

    The rule gets the variables, and cgshim differentiates the boxes among them. In a rule there are
    none.
    """
    is_empty = type(call.f) is FunctionType and not (
        call.f.__closure__ or call.f.__defaults__ or call.f.__kwdefaults__ or call.f.__dict__
    )
    if is_empty and not (call.options or call.variables):
        return (), tuple, ()
    held: Any = (call.f, *call.options.values())
    boxes, rebuild, _ = closure_convert(held, _search(call, is_box))
    if is_in_rule():
        return boxes, rebuild, [*map(value_of, call.variables)]
    for x in boxes:
        if not is_tensor(x) or call.option_of(x) is not None:  # a container in one box
            call.refuse_captured(x)
    return boxes, rebuild, call.captured_variables(boxes, inputs)


def _search(call: Call, is_leaf: Callable[[Any], bool]) -> Any:
    """Return the part of a backend that closure_convert uses, to search for other leaves.

    Declared variables may be attributes of an object, so it searches objects if there are any.
    """

    def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
        is_leaf = len(leaves) == 1 and leaves[0] is tree and bool(call.variables)
        if is_leaf and hasattr(tree, "__dict__") and not isinstance(tree, (type, ModuleType)):
            return [*vars(tree).values()], partial(_with_attributes, tree)
        return leaves, partial(optree.tree_unflatten, structure)

    return SimpleNamespace(
        is_tensor=is_leaf, tree_flatten=flatten, tree_unflatten=lambda make, leaves: make(leaves)
    )


def _with_attributes(x: Any, values: Sequence[Any]) -> Any:
    new = copy.copy(x)
    vars(new).update(zip(vars(x), values, strict=True))
    return new
