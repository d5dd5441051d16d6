"""NumPy: one run of f on values, as primitives of HIPS autograd whose derivatives are the rule's.

f runs once, on values. Where an outer derivative looks on, the rule is put around what that sees: arguments and
outputs as they are there, and other residuals as functions of the arguments. The values of these are those of the
first run; only when their derivative is asked for does f run again, on boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from autograd.builtins import tuple as tuple_of_boxes
from autograd.core import defjvp_argnums, make_jvp, make_vjp
from autograd.extend import defvjp_argnums, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox

from cgshim._closure import lift
from cgshim._contents import tensors_inside
from cgshim._residuals import Residuals, has_a_derivative, refuse_another_run, refuse_hidden, run_again
from cgshim._scope import RuleScope
from cgshim_numpy._boxes import (
    Ancestry,
    AncestryOfResults,
    Array,
    Links,
    agree,
    as_array,
    as_object_of_its_own,
    at_level,
    conjugated,
    copied,
    in_the_open,
    is_float,
    is_tensor,
    levels_of,
    links_of,
    tree_flatten,
)
from cgshim_numpy._linear import NonlinearError, transposed
from cgshim_numpy._refusals import boxable, without_derivative

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

running: RuleScope[Links] = RuleScope("cgshim_numpy_rule")
"""While a rule runs: what it is known to be given, where autograd does not record that."""


class Run:
    """A call of an op while something is being differentiated."""

    rule: Rule
    """the rule of the first run, around what that kept"""
    residuals: Residuals | None = None
    """what it kept, where an outer derivative looks on"""
    floats: list[bool]
    """for each output, whether it has a gradient"""
    hidden: Any = None
    """what it kept where nobody can put another tensor"""
    changed = False
    """whether f wrote into its arguments, as far as anybody has to know"""

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call = call
        self.count = len(inputs)
        captured, self._remake = lift(call.f, isbox)
        links = running.current
        ancestry = None if links is None or not captured else Ancestry(inputs, links)
        constant = [ancestry is not None and ancestry.covers(box) for box in captured]
        self.variables = [box for box, is_constant in zip(captured, constant, strict=True) if not is_constant]
        self._captured = [
            as_object_of_its_own(as_array(getval(box))) if is_constant else None
            for box, is_constant in zip(captured, constant, strict=True)
        ]
        self._box_of = {
            id(value): box for value, box in zip(self._captured, captured, strict=True) if value is not None
        }
        self.is_nested = len(levels_of([*inputs, *self.variables])) > 1
        for box in self.variables:
            if not isinstance(box, ArrayBox):
                call.refuse_captured(box)

    def remake_f(self, variables: Sequence[Array]) -> Callable[..., Any]:
        """f around these values of its variables."""
        if not self._captured:
            return self.call.f
        values = iter(variables)
        f: Callable[..., Any] = self._remake([next(values) if c is None else c for c in self._captured])
        return f

    # --- The first run, on values --------------------------------------------------------------------------------

    def __call__(self, values: Sequence[Array]) -> list[Array]:
        if self.is_nested:
            values = [*map(as_object_of_its_own, values)]
        before = [x.copy() for x in values] if self.is_nested else []
        outputs, self.rule = self.call(values[: self.count], self.remake_f(values[self.count :]))
        self.rule.require_variables(self.variables)
        self.refuse_boxes(outputs)
        self.floats = [*map(is_float, outputs)]
        if self.is_nested:
            self.residuals = Residuals(self.call, self.rule, is_tensor, values, outputs)
            self.refuse_boxes(self.residuals.others)
            self.hidden = next(iter(self.residuals.hidden()), None)
            self.changed = any(x.tobytes() != was.tobytes() for x, was in zip(values, before, strict=True))
        return [
            boxable(self.call, out) if float_ else np.asarray(out)
            for out, float_ in zip(outputs, self.floats, strict=True)
        ]

    def on_constants(self, inputs: Sequence[Array]) -> list[Array]:
        """The outputs where nothing that f is given is differentiated."""
        outputs, _ = self.call(inputs)
        self.refuse_boxes(outputs)
        return outputs

    def refuse_boxes(self, arrays: Sequence[Array]) -> None:
        """Raise where f or its rule was given values, and came upon a box in a way that lift does not see."""
        for x in filter(isbox, arrays):
            options = self.call.options.values()
            self.call.refuse_captured(next(filter(isbox, [*options, *tree_flatten([*options])[0]]), x))

    # --- Its rule, at one level ----------------------------------------------------------------------------------

    def kept(self, values: Sequence[Array], outputs: Sequence[Array]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Of the values and outputs only those that the rule needs, or that connect it with an outer derivative."""
        residuals = self.residuals
        if residuals is None:
            unneeded = 0 if self.rule.needs_inputs else self.count
            return [None] * unneeded + list(values[unneeded:]), [None] * len(outputs)
        if has_a_derivative(residuals.others):
            inputs = values
        else:
            inputs = [
                x if isbox(x) or at in residuals.inputs or at >= self.count else None for at, x in enumerate(values)
            ]
        return inputs, [y if at in residuals.outputs else None for at, y in enumerate(outputs)]

    def gradients(
        self, values: Sequence[Array], outputs: Sequence[Array], upstreams: Sequence[Array]
    ) -> Sequence[Array]:
        """The rule's gradients of the inputs and the variables."""
        if not self._is_sealed(values):
            return self._gradients(*self._rule_at(values, outputs), values, outputs, upstreams)
        of_values = lambda values, upstreams: tuple(self._gradients(self.rule, (), values, (), upstreams))
        return self._sealed(of_values, values, upstreams)  # type: ignore[no-any-return]

    def tangent(self, values: Sequence[Array], output: Any, argnums: Sequence[int], tangents: Sequence[Array]) -> Any:
        """J v, as the transpose of the rule."""

        def of_values(values: Sequence[Array], tangents: Sequence[Array], rule_at: Any = None) -> Any:
            outputs = self.outputs_at(output)
            rule, others = rule_at or (self.rule, ())

            def gradients(upstream: Any) -> list[Array]:
                found = self._gradients(rule, others, values, outputs, self.separate(upstream))
                return [found[argnum - 1] for argnum in argnums]

            def of_constants(upstream: Any) -> list[Array]:
                found = self._gradients(self.rule, (), [*map(getval, values)], (), self.separate(upstream))
                return [found[argnum - 1] for argnum in argnums]

            try:
                return transposed(gradients, of_constants, output, tangents)
            except NonlinearError as error:
                self.call.refuse_nonlinear(str(error))

        if not self._is_sealed(values):
            return of_values(values, tangents, self._rule_at(values, self.outputs_at(output)))
        return self._sealed(of_values, values, tangents)

    def separate(self, of_output: Any) -> list[Array]:
        """What belongs to each output: the outputs, or their upstream gradients."""
        count = len(self.floats)
        return [of_output] if count == 1 else [of_output[i] for i in range(count)]

    def outputs_at(self, ans: Any) -> list[Array]:
        """The outputs; those that have no gradient as values, even out of a tuple that is in a box."""
        return [y if float_ else getval(y) for y, float_ in zip(self.separate(ans), self.floats, strict=True)]

    def _rule_at(self, values: Sequence[Array], outputs: Sequence[Array]) -> tuple[Rule, Sequence[Array]]:
        """The rule around what the values and the outputs are at this level, and the other residuals in it."""
        if self.residuals is None or not any(map(isbox, values)):
            return self.rule, ()
        others = self._others(values)
        return self.residuals.around(values, outputs, others), others

    def _others(self, values: Sequence[Array]) -> Sequence[Array]:
        """The other residuals, as functions of the values; what f captured as a constant is what it was outside."""
        assert self.residuals is not None
        others = self.residuals.others
        if not has_a_derivative(others):
            return others
        places = [at for at, x in enumerate(others) if is_float(x)]
        connected = dict(zip(places, _items(_other_residuals(self, *values), len(places)), strict=True))
        level = max(levels_of(values))
        for at in places:
            if id(others[at]) in self._box_of:
                connected[at] = at_level(self._box_of[id(others[at])], level)
        return [connected.get(at, x) for at, x in enumerate(others)]

    def _gradients(
        self,
        rule: Rule,
        others: Sequence[Array],
        values: Sequence[Array],
        outputs: Sequence[Array],
        upstreams: Sequence[Array],
    ) -> list[Array]:
        """What rule gives. autograd's gradients are the conjugates of those that rules take and give."""
        links = {**(running.current or {}), **links_of([*outputs, *others], values)}
        opening = rule.with_grad_fn(_opening(rule.grad_fn))
        of_inputs, of_variables = running.run(
            links, opening, values[: self.count], [*map(conjugated, upstreams)], values[self.count :]
        )
        found = of_inputs + (of_variables or [None] * len(self.variables))
        gradients = [self._zeros(at) if g is None else conjugated(g) for at, g in enumerate(found)]
        self._refuse_foreign(rule, gradients, [*values, *outputs, *upstreams])
        return gradients

    def _zeros(self, at: int) -> Array:
        shapes = [*self.rule.shapes, *[box.shape for box in self.variables]]
        dtypes = [*self.rule.dtypes, *[box.dtype for box in self.variables]]
        return np.zeros(shapes[at], dtypes[at])

    def _refuse_foreign(self, rule: Rule, gradients: Sequence[Array], given: Sequence[Any]) -> None:
        """Raise where gradients depend on a box that the rule was not given, and f has not read."""
        boxes = [*filter(isbox, gradients)]
        if not boxes:
            return
        ancestry = AncestryOfResults(given)
        for gradient in boxes:
            if not ancestry.covers(gradient):
                read = (box for box in tensors_inside(rule.grad_fn, isbox) if not ancestry.covers(box))
                self.call.refuse_captured(next(read, gradient))

    # --- What is refused, if anybody asks for it -----------------------------------------------------------------

    def _is_sealed(self, values: Sequence[Array]) -> bool:
        """Whether there are gradients, and no derivatives of them."""
        return self.call.once_differentiable or (self.hidden is not None and any(map(isbox, values)))

    def _sealed(self, function: Callable[..., Any], *args: Sequence[Any]) -> Any:
        """function of the values in args, connected with the boxes in them, as something without a derivative."""
        first = len(args[0])
        return without_derivative(lambda *xs: function(xs[:first], xs[first:]), self._refuse, *args[0], *args[1])

    def _refuse(self) -> NoReturn:
        if self.call.once_differentiable:
            self.call.refuse_second_order("autograd's derivative of a gradient")
        refuse_hidden(self.call, self.hidden)

    # --- Another run, for derivatives alone ----------------------------------------------------------------------

    def again(self, values: Sequence[Array], argnums: Sequence[int]) -> Callable[[Any], Any]:
        """The other residuals, and the values at argnums, as a function of these, by f's own operations."""

        def residuals_and_chosen(chosen: Any) -> Any:
            xs = [*map(copied, values)]
            for n, argnum in enumerate(argnums):
                xs[argnum - 1] = copied(chosen[n])
            return tuple_of_boxes((tuple_of_boxes(self._others_again(xs)), chosen))

        return residuals_and_chosen

    def _others_again(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        if self.changed:
            refuse_another_run(self.call, "one that changes its arguments", "let f work on copies")
        assert self.residuals is not None
        inputs, variables = xs[: self.count], xs[self.count :]
        found = run_again(self.call, inputs, self.rule, is_tensor, agree, f=self.remake_f(variables))
        others = [x for x in found if not any(x is variable for variable in variables)]
        first = self.residuals.others
        if len(others) != len(first) or any(a.shape != b.shape for a, b in zip(others, first, strict=True)):
            refuse_another_run(self.call, "others", "let f return, and its rule keep, the same tensors in each run")
        return tuple(x for x in others if is_float(x))


def _opening(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """grad_fn, whose gradients may be in a box together: autograd puts those there that a rule takes itself."""
    return lambda *args, **kwargs: in_the_open(grad_fn(*args, **kwargs))


def _items(sequence: Any, count: int) -> list[Any]:
    return [sequence[at] for at in range(count)]


# --- What autograd differentiates ------------------------------------------------------------------------------


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def outputs_of(run: Run, *values: Array) -> Any:
    """The outputs of f: the one that there is, or a tuple of them."""
    outputs = run([*map(as_array, values)])
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _vjp_of_outputs(
    argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    run: Run = args[0]
    values, outputs = run.kept([*map(as_array, args[1:])], run.outputs_at(ans))

    def vjp(upstream: Any) -> list[Array]:
        gradients = run.gradients(values, outputs, run.separate(upstream))
        return [gradients[argnum - 1] for argnum in argnums]

    return vjp


def _jvp_of_outputs(argnums: Sequence[int], tangents: Sequence[Any], ans: Any, args: Sequence[Any], kwargs: Any) -> Any:
    run: Run = args[0]
    if not run.call.forward_mode:
        run.call.refuse_forward_mode("autograd's make_jvp")
    return run.tangent([*map(as_array, args[1:])], ans, argnums, tangents)


defvjp_argnums(outputs_of, _vjp_of_outputs)
defjvp_argnums(outputs_of, _jvp_of_outputs)


@primitive  # type: ignore[untyped-decorator]
def _other_residuals(run: Run, *values: Array) -> tuple[Array, ...]:
    """The floats among the other residuals, as the first run has left them."""
    assert run.residuals is not None
    return tuple(boxable(run.call, x) for x in run.residuals.others if is_float(x))


def _vjp_of_others(
    argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    run, *values = args

    def vjp(upstreams: Any) -> Sequence[Array]:
        chosen = tuple(values[argnum - 1] for argnum in argnums)
        pull_back, (_, ends) = cast(Any, make_vjp)(run.again(values, argnums), chosen)  # autograd has no types
        zeros = tuple(np.zeros(x.shape, x.dtype) for x in map(as_array, _items(ends, len(chosen))))
        return _items(pull_back(tuple_of_boxes((upstreams, zeros))), len(chosen))

    return vjp


def _jvp_of_others(argnums: Sequence[int], tangents: Sequence[Any], ans: Any, args: Sequence[Any], kwargs: Any) -> Any:
    run, *values = args
    chosen = tuple(values[argnum - 1] for argnum in argnums)
    _, tangent = cast(Any, make_jvp)(run.again(values, argnums), chosen)(tuple_of_boxes(tuple(tangents)))
    return tangent[0]


defvjp_argnums(_other_residuals, _vjp_of_others)
defjvp_argnums(_other_residuals, _jvp_of_others)
