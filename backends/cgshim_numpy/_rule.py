"""NumPy: the rule of a run, asked at one level of derivatives: for its gradients, or for a tangent by its transpose.

In a first order the rule is asked as it is. If outer derivatives look on, it is put around what they see: arguments and
outputs as they are at this level, and other residuals as functions of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cgshim.backend import has_a_derivative, refuse_hidden, tensors_inside
from cgshim_numpy._again import other_residuals_at
from cgshim_numpy._ancestry import AncestryOfResults, links_of, rule_scope
from cgshim_numpy._arrays import Array, as_arrays, conjugated, kind_of
from cgshim_numpy._boxes import has_box
from cgshim_numpy._linear import NonlinearError, transposed
from cgshim_numpy._private import box_types, getval, isbox, trace_stack
from cgshim_numpy._refusals import without_derivative
from cgshim_numpy._run import Run
from cgshim_numpy._trees import with_boxes_opened

if TYPE_CHECKING:
    from cgshim.backend import Rule

Around = tuple["Rule", Sequence[Array]]
"""The rule around what an outer derivative sees, and the other residuals among that."""


def needed_by_rule(run: Run, values: Sequence[Array], ans: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the values and outputs at one level; None, or none, for those that neither rule nor derivative needs."""
    residuals = run.residuals
    if residuals is None:
        if run.rule.needs_inputs:
            return as_arrays(values), ()
        if run.captured:
            return [None] * run.count + [*as_arrays(values[run.count :])], ()
        return (), ()
    values, outputs = as_arrays(values), run.outputs_in(ans)
    if not has_a_derivative(residuals.others):
        needed = {*residuals.inputs, *range(run.count, len(values))}
        values = [x if at in needed or isbox(x) else None for at, x in enumerate(values)]
    return values, [y if at in residuals.outputs else None for at, y in enumerate(outputs)]


def gradients_of(
    run: Run, values: Sequence[Any], outputs: Sequence[Any], upstreams: Sequence[Array], argnums: Sequence[int]
) -> Sequence[Any]:
    """Return the gradients of the inputs and the variables, by the rule, at a level with these values and outputs.

    Only those at argnums will be used.
    """
    if not (run.is_nested or run.call.once_differentiable):
        return _ask(run, (run.rule, ()), values, outputs, upstreams, argnums)
    if not _refuses_derivative(run, values):
        return _ask(run, _rule_around(run, values, outputs), values, outputs, upstreams, argnums)
    of_values = lambda values, upstreams: tuple(_ask(run, (run.rule, ()), values, (), upstreams, argnums))
    return _refusing_derivative(run, of_values, values, upstreams)  # type: ignore[no-any-return]


def tangent_of(run: Run, values: Sequence[Any], ans: Any, argnums: Sequence[int], tangents: Sequence[Array]) -> Any:
    """Return J v, by the transpose of the rule, at a level with these values of the inputs and the variables."""

    def of_values(values: Sequence[Array], tangents: Sequence[Array], around: Around | None = None) -> Any:
        outputs, around = run.outputs_in(ans), around or (run.rule, ())

        def gradients(upstream: Any) -> list[Array]:
            found = _ask(run, around, values, outputs, run.per_output(upstream), argnums)
            return [found[argnum] for argnum in argnums]

        def of_constants(upstream: Any) -> list[Array]:
            constants = [*map(getval, values)]
            found = _ask(run, (run.rule, ()), constants, (), run.per_output(upstream), argnums)
            return [found[argnum] for argnum in argnums]

        try:
            return transposed(gradients, of_constants, ans, tangents)
        except NonlinearError as error:
            run.call.refuse_nonlinear(str(error))

    if not _refuses_derivative(run, values):
        return of_values(values, tangents, _rule_around(run, values, run.outputs_in(ans)))
    return _refusing_derivative(run, of_values, values, tangents)


# --- Asking the rule --------------------------------------------------------------------------------------------------


def _rule_around(run: Run, values: Sequence[Any], outputs: Sequence[Any]) -> Around:
    """Return the rule around what an outer derivative sees; as it is if there are only values at this level."""
    if run.residuals is None or not has_box(values):
        return run.rule, ()
    others = other_residuals_at(run, values)
    return run.residuals.around(values, outputs, others), others


def _ask(
    run: Run, around: Around, values: Sequence[Any], outputs: Sequence[Any], upstreams: Sequence[Array],
    argnums: Sequence[int],
) -> Sequence[Array]:  # fmt: skip
    """Return the rule's gradients. autograd's are the conjugates of those that rules take and give."""
    rule, others = around
    links = rule_scope.current or {}
    if run.is_nested:
        links = {**links, **links_of([*outputs, *others], values)}
    asked = rule if trace_stack.top < 0 else rule.with_grad_fn(_opening(rule.grad_fn))
    conjugates = conjugated(upstreams) if "c" in map(kind_of, upstreams) else upstreams
    needed = [at in argnums for at in range(run.count)] if rule.takes_needed else None
    found, of_variables = rule_scope.run(links, asked, values[: run.count], conjugates, values[run.count :], needed)
    if run.captured:
        found = [*found, *(of_variables or [None] * len(run.captured.variables))]
    types = set(map(type, found))
    if NoneType in types:
        found = [_zeros(run, at) if g is None else g for at, g in enumerate(found)]
    if not types.isdisjoint(box_types):
        _refuse_foreign(run, rule, found, [*values, *outputs, *upstreams])
    return conjugated(found) if "c" in map(kind_of, found) else found


def _opening(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return grad_fn with its gradients out of a box: autograd may put those into one that the rule takes itself."""
    return lambda *args, **kwargs: with_boxes_opened(grad_fn(*args, **kwargs))


def _zeros(run: Run, at: int) -> Array:
    """Return the gradient of an input or a variable that the rule has none for."""
    if at < run.count:
        return np.zeros(run.rule.shapes[at], run.rule.dtypes[at])
    assert run.captured is not None
    variable = run.captured.variables[at - run.count]
    return np.zeros(variable.shape, variable.dtype)


def _refuse_foreign(run: Run, rule: Rule, gradients: Sequence[Array], given: Sequence[Any]) -> None:
    """Raise if gradients depend on a box that the rule was not given, and f has not read."""
    ancestry = AncestryOfResults(given)
    for gradient in filter(isbox, gradients):
        if not ancestry.covers(gradient):
            read = (box for box in tensors_inside(rule.grad_fn, isbox) if not ancestry.covers(box))
            run.call.refuse_captured(next(read, gradient))


# --- What is refused if anybody asks for it ---------------------------------------------------------------------------


def _refuses_derivative(run: Run, values: Sequence[Any]) -> bool:
    """Return True if the gradients of these values have no derivatives."""
    return run.call.once_differentiable or (run.hidden is not None and has_box(values))


def _refusing_derivative(run: Run, function: Callable[..., Any], values: Sequence[Any], others: Sequence[Any]) -> Any:
    """Return function(values, others) of what is in the boxes, connected with these, and without a derivative."""

    def refuse() -> NoReturn:
        if run.call.once_differentiable:
            run.call.refuse_second_order("autograd's derivative of a gradient")
        refuse_hidden(run.call, run.hidden)

    first = len(values)
    return without_derivative(*values, *others, function=lambda *xs: function(xs[:first], xs[first:]), refuse=refuse)
