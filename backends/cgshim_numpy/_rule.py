"""NumPy: the rule of a run, asked at one level of derivatives: for its gradients, or for a tangent by its transpose.

In a first order the rule is called on values, as it is. If outer derivatives look on, it is called on recorded values,
and what it returns is connected with what these are at this level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cgshim.backend import CustomGradientError, gradients_of_arguments, runs_op
from cgshim_numpy._arrays import Array, as_arrays, conjugated, kind_of
from cgshim_numpy._boxes import has_box
from cgshim_numpy._closed_over import rule_scope
from cgshim_numpy._linear import NonlinearError, transposed
from cgshim_numpy._private import getval, isbox, trace_stack
from cgshim_numpy._record import Connection, Record, Step, is_recorded, now
from cgshim_numpy._recorded_run import RecordedRun
from cgshim_numpy._refusals import without_derivative
from cgshim_numpy._run import PLAIN, Run, refuse_box, values_of
from cgshim_numpy._trees import with_boxes_opened

if TYPE_CHECKING:
    from cgshim.backend import Rule

Function = Callable[[Sequence[Any]], Sequence[Any]]
"""From upstream gradients, or tangents, to gradients, or a tangent, by the rule"""


_READ = "f made of values that Python read"


class Level:
    """A call at one level of derivatives: what its arguments and outputs are there, if outer derivatives look on."""

    __slots__ = ("_connection", "_run", "_values")

    def __init__(self, run: Run, values: Sequence[Any], ans: Any) -> None:
        self._run = run
        self._values = values if has_box(values) else ()
        self._connection = None
        if isinstance(run, RecordedRun):
            arguments = {x._node: value for x, value in zip(run.leaves, values, strict=True) if isbox(x)}
            outputs = zip(run.outputs, run.outputs_in(ans), strict=True)
            of_outputs = {y._node: value for y, value in outputs if y is not None and y._node not in arguments}
            self._connection = Connection(run.record, arguments, of_outputs, run.f_returned)

    def gradients(self, upstreams: Sequence[Array], argnums: Sequence[int]) -> Sequence[Array]:
        """Return the gradients at argnums of f's inputs and of what it closes over, by the rule."""
        run = self._run

        def by_rule(upstreams: Sequence[Array]) -> Sequence[Array]:
            gradients = _ask(run, upstreams, argnums)
            return gradients if len(gradients) == len(argnums) else [gradients[at] for at in argnums]

        return self._applied(by_rule, as_arrays(upstreams))

    def tangent(self, ans: Any, argnums: Sequence[int], tangents: Sequence[Array]) -> Any:
        """Return J v, by the transpose of the rule."""
        run = self._run

        def by_rule(upstream: Any) -> Sequence[Array]:
            gradients = _ask(run, run.per_output(upstream), argnums)
            return [gradients[at] for at in argnums]

        def by_transpose(tangents: Sequence[Array]) -> Sequence[Any]:
            try:
                return [transposed(by_rule, by_rule, ans, tangents)]
            except NonlinearError as error:
                run.call.refuse_nonlinear(str(error))

        return self._applied(by_transpose, tangents)[0]

    def _applied(self, by_rule: Function, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return by_rule(arguments), as a function of all that is in a box at this level."""
        run = self._run
        call = run.call
        if not (self._values or has_box(arguments)):
            found = by_rule(arguments)
            return values_of(call, found, run.record) if has_box(found) else found
        refuse: Callable[[], NoReturn]
        if call.once_differentiable:
            refuse = lambda: call.refuse_second_order("autograd's derivative of a gradient")
        elif self._values and isinstance(run, RecordedRun) and run.hidden is not None:
            hidden = run.hidden
            refuse = lambda: call.refuse_unconnected(hidden, _READ)
        else:
            return self._connected(by_rule, arguments)

        def of_values(*xs: Any) -> Any:
            return tuple(values_of(call, by_rule(as_arrays(xs[len(self._values) :])), run.record))

        return without_derivative(*self._values, *arguments, function=of_values, refuse=refuse)  # type: ignore[no-any-return]

    def _connected(self, by_rule: Function, arguments: Sequence[Any]) -> Sequence[Any]:
        call, record = self._run.call, self._run.record or Record()
        connection = self._connection or Connection(record, {}, {}, now())
        leaves = [record.leaf(getval(x)) if isbox(x) else x for x in arguments]
        given = {leaf._node: x for leaf, x in zip(leaves, arguments, strict=True) if isbox(x)}
        record.running += 1
        try:
            found = by_rule(leaves)
        finally:
            record.running -= 1
        for x in found:
            if isbox(x) and not is_recorded(x):
                refuse_box(call, x)

        def unknown(step: Step) -> Any:
            if step.record is not None and step.record.running:
                refuse_box(call, step.value)
            why = "f kept in an earlier call" if step.record is not None else _READ
            refuse = lambda: call.refuse_unconnected(step.value, why)
            return without_derivative(*self._values, *arguments, function=lambda *xs: step.value, refuse=refuse)

        return connection.connect(found, given, unknown)


def _ask(run: Run, upstreams: Sequence[Array], argnums: Sequence[int]) -> Sequence[Array]:
    """Return the gradients of all inputs, and of what f closes over; only those at argnums will be used.

    autograd's gradients are the conjugates of those that rules take and give.
    """
    rule = run.rule
    conjugates = conjugated(upstreams) if "c" in map(kind_of, upstreams) else upstreams
    needed = [at in argnums for at in range(run.count)] if rule.takes_needed else None
    if trace_stack.top >= 0 or run.record:
        rule = rule.with_grad_fn(_opening(rule.grad_fn))
    token = rule_scope.enter((run, rule_scope.current))
    try:
        if isinstance(run, RecordedRun):
            found = _ask_on_record(run, rule, conjugates, needed)
        else:
            found, _ = rule(run.inputs, conjugates, (), needed)
    finally:
        rule_scope.leave(token)
    return _finished(run, found)


def _finished(run: Run, found: Sequence[Array | None]) -> Sequence[Array]:
    """Return the gradients of a rule as autograd takes them: zeros for None, and the conjugates of complex ones."""
    if NoneType in map(type, found):
        found = [_zeros(run, at) if g is None else g for at, g in enumerate(found)]
    return conjugated(found) if "c" in map(kind_of, found) else found


def _ask_on_record(
    run: RecordedRun, rule: Rule, upstreams: Sequence[Array], needed: Sequence[bool] | None
) -> Sequence[Array | None]:
    """Return the rule's gradients of all inputs, and of what f closes over, on recorded values."""
    variables = [run.leaves[run.count + at] for at in run.variables]
    try:
        found, of_variables = run.on_record(rule, run.inputs, upstreams, variables, needed)
    except CustomGradientError:
        raise
    except Exception as error:
        if not run.was_asked:
            raise
        run.call.refuse("a second order calls grad_fn once for each derivative of the output",
                        f"a {type(error).__name__} in the second call", "let grad_fn keep what it reads")  # fmt: skip
    run.was_asked = True
    closed_over: dict[int, Array | None] = dict(zip(run.variables, of_variables, strict=True))
    return [*found, *(closed_over.get(at) for at in range(len(run.leaves) - run.count))]


def _opening(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return grad_fn with its gradients out of a box: autograd may put those into one that the rule takes itself."""
    return lambda *args, **kwargs: with_boxes_opened(grad_fn(*args, **kwargs))


def _zeros(run: Run, at: int) -> Array:
    """Return the gradient of an input, or of what f closes over, that the rule has none for."""
    if at < run.count:
        return np.zeros(run.rule.shapes[at], run.rule.dtypes[at])
    return np.zeros(run.leaves[at].shape, run.leaves[at].dtype)


# --- A first order where all is plain ---------------------------------------------------------------------------------


def plain_vjp(run: Run, argnums: Sequence[int]) -> Callable[[Any], Sequence[Array]]:
    """Return the gradients at argnums as a function of upstream, by the very function that f returned."""

    def vjp(upstream: Any) -> Sequence[Array]:
        if type(upstream) not in PLAIN or trace_stack.top >= 0:
            return Level(run, (), None).gradients([upstream], argnums)
        found = _ask_plain(run, upstream)
        return found if len(found) == len(argnums) else [found[at] for at in argnums]

    return vjp


@runs_op
def _ask_plain(run: Run, upstream: Array) -> Sequence[Array]:
    assert run.grad_fn is not None
    arguments, inputs, upstreams = run.call.arguments, run.inputs, (upstream,)
    token = rule_scope.enter((run, rule_scope.current))
    try:
        result = run.grad_fn(*inputs, *upstreams)  # of no inputs: a plain rule takes none
    finally:
        rule_scope.leave(token)
    shapes, dtypes = run.shapes, run.dtypes
    if type(result) in PLAIN and [result.shape] == shapes and [result.dtype] == dtypes and result.dtype.kind == "f":
        return (result,)  # as nearly all are
    found = _finished(run, gradients_of_arguments(arguments, result, shapes, dtypes))
    return values_of(run.call, found) if has_box(found) else found
