"""NumPy: an op under autograd: one run of f, its outputs as a primitive, and their derivatives by
the rule it returned.

Most calls have few arrays, one level of derivatives, and close over no box: f runs on values, and
the rule is the very function that it returned. If outer derivatives look on, or f closes over a
box, f runs on recorded values, and what the rule returns is connected with what these are at the
level that asks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, NoReturn, cast

import numpy as np
from autograd import numpy as anp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import Box, defjvp_argnums, defvjp_argnums

from cgshim.backend import (
    Call,
    CustomGradientError,
    Rule,
    gradients_of_arguments,
    refuse_captured_tangent,
    replace_held,
    run_on,
    subvals,
)
from cgshim_numpy._arrays import Array, as_arrays, is_float, is_tensor, with_boxes_opened
from cgshim_numpy._linear import transposed
from cgshim_numpy._plain import PLAIN, PlainRules
from cgshim_numpy._private import box_types, getval, isbox
from cgshim_numpy._record import (
    RECORDED,
    Record,
    Step,
    closed_over_by,
    in_boxes,
    is_recorded,
    nodes_of,
    refuse_replay,
    rule_scope,
    steps_to,
    values_of,
    variables_among,
    without_derivative,
)

# the classes of which autograd makes a box: NumPy's own array, and its scalars of floats
_BOXABLE = frozenset(Box.type_mappings) - box_types

_READ = "f made of values that Python read"


_conj = cast(Any, anp).conj  # autograd makes its functions where no type checker looks


def conjugated(xs: Sequence[Array]) -> Sequence[Array]:
    """Return the conjugates of the complex arrays among xs, and the rest as they are."""
    return [_conj(x) if x.dtype.kind == "c" else x for x in xs]


class Run:
    """The run of f in a call, and the rule that it returned, on the tensors that it holds."""

    # what f returned, if all about it is plain, and if not:
    grad_fn: Callable[..., Any] | None = None
    rule: Any = None  # a Rule, on the tensors that it holds
    has_gradient: Sequence[bool] = (True,)  # by output
    record: Any = None  # a Record, if f runs on recorded values, and then:
    # the inputs and what f closes over, recorded if anybody differentiates it
    leaves: Sequence[Any] = ()
    closed_over: Sequence[Any] = ()
    # their places among the leaves, in the order in which f reads them
    variables: Sequence[int] = ()
    was_asked = False

    def __init__(self, call: Call, count: int, values: Sequence[Array]) -> None:
        """Prepare the run of a call with `count` inputs, which come first among values."""
        self.call, self.count = call, count
        self.shapes, self.dtypes = [x.shape for x in values], [x.dtype for x in values]

    def on_values(self, inputs: Sequence[Array], plain: PlainRules | None) -> Any:
        """Run f on values, and return its outputs as autograd takes them: one, or a tuple."""
        result = self.call.run(inputs)
        if self._is_plain(result, plain):
            self.grad_fn = result[1]
            return result[0]
        outputs, rule = self.call.read(result, inputs)
        return self._keep(values_of(self.call, outputs), rule, inputs)

    def _is_plain(self, result: Any, plain: PlainRules | None) -> bool:
        """Return True for one array of floats, recorded or not, and a function of upstream."""
        if plain is None or type(result) is not tuple or len(result) != 2:
            return False
        output, grad_fn = result
        if self.record is not None and is_recorded(output):
            output = output._value
        return (
            type(output) in PLAIN
            and output.dtype.kind == "f"
            and plain.include(grad_fn, self.call.arguments)
        )

    def on_record(
        self,
        values: Sequence[Array],
        args: Sequence[Any],
        closed_over: Sequence[Any],
        plain: PlainRules | None,
    ) -> Any:
        """Run f on values, recorded where they are those of boxes, and return its outputs as
        autograd takes them.
        """
        call, count = self.call, self.count
        variables: list[int] = []
        if closed_over:
            variables = [count + at for at in variables_among(closed_over, args[:count])]
        record = self.record = Record(call, args)
        pairs = zip(values, map(nodes_of, args), strict=True)
        self.leaves, self.closed_over = (
            [record.leaf(x, nodes) if nodes else x for x, nodes in pairs],
            closed_over,
        )
        inputs, unseen = self.leaves[:count], dict[int, Any]()
        with self._recording(record):
            try:
                result = call.run(inputs)
            except Exception:  # noqa: BLE001  # Numba and ctypes have their own
                # f may take values alone, as compiled code does. If they are not what is wrong, it
                # raises that again.
                record.note_read(None)
                # objects that nobody else has
                own = [x._value[...] if isbox(x) else x for x in inputs]
                unseen = {id(x): leaf for x, leaf in zip(own, inputs, strict=True) if isbox(leaf)}
                result = call.run(own)
            rule = None
            if not (unseen or closed_over) and self._is_plain(result, plain):
                outputs, grad_fn = result[:1], result[1]
            else:
                outputs, rule = call.read(result, inputs)
                grad_fn = rule.grad_fn
            # of outputs and leaves, as the rule reads them; None for constants
            constants = {id(x) for x in inputs if not isbox(x)}
            self.steps = [None if id(y) in constants else self._end(y, unseen) for y in outputs]
            outputs = values_of(call, outputs, record)
        self.steps += [leaf._node if isbox(leaf) else None for leaf in self.leaves]
        self.variables = sorted(variables, key=lambda at: self.leaves[at]._node.first_read)
        if rule is not None:
            call.require_variables(rule, [args[at] for at in self.variables])
        if unseen:
            grad_fn, record.unrecorded = replace_held(grad_fn, unseen, is_tensor)
        record.f_has_returned(grad_fn)
        if rule is None:
            self.grad_fn = grad_fn
            return outputs[0]
        return self._keep(outputs, rule.with_grad_fn(grad_fn) if unseen else rule, inputs)

    def _recording(self, record: Record) -> contextlib.AbstractContextManager[Any]:
        """Let the boxes that f closes over be recorded values, wherever f or its rule reads them."""
        return self._with_leaves(record) if self.closed_over else record

    @contextlib.contextmanager
    def _with_leaves(self, record: Record) -> Iterator[None]:
        before = [(box.__class__, box._value, box._trace, box._node) for box in self.closed_over]
        try:
            for box, leaf in zip(self.closed_over, self.leaves[self.count :], strict=True):
                box.__class__, box._value, box._trace, box._node = (
                    type(leaf),
                    leaf._value,
                    leaf._trace,
                    leaf._node,
                )
            with record:
                yield
        finally:
            for box, was in zip(self.closed_over, before, strict=True):
                box.__class__, box._value, box._trace, box._node = was

    def _end(self, y: Any, unseen: dict[int, Any]) -> Step | None:
        """Return the step that an output is to the rule, which reads it as the op's own: to f it
        was its own value.

        If f has computed it off the record, its identity tells where it is.
        """
        if not is_float(y):
            return None
        if not is_recorded(y):
            made_of = [leaf._node for leaf in self.leaves if isbox(leaf)]
            y = unseen.setdefault(id(y), self.record.leaf(y, made_of))
        elif y._node.record is not self.record:
            y._node = Step(y._value, record=self.record, made_of=[y._node])
        return y._node  # type: ignore[no-any-return]

    def _keep(self, outputs: Sequence[Array], rule: Rule, inputs: Sequence[Any]) -> Any:
        # the inputs if the rule is called with them; it keeps all else that it needs
        self.rule, self.inputs = rule, inputs if rule.needs_inputs else ()
        self.has_gradient = [*map(is_float, outputs)]
        boxable = [y if type(y) in _BOXABLE else self._boxable(y) for y in outputs]
        return boxable[0] if len(boxable) == 1 else tuple(boxable)

    def _boxable(self, y: Array) -> Array:
        if isinstance(y, np.ndarray) and not isinstance(y, np.memmap):
            self.call.refuse("autograd differentiates plain arrays alone", f"a {type(y).__name__}",
                             "make it one with np.asarray")  # fmt: skip
        return np.asarray(y)

    def per_output(self, of_outputs: Any) -> list[Array]:
        """Return the outputs, or their upstream gradients, one by one; those that have no gradient
        as values.
        """
        each = [of_outputs] if len(self.has_gradient) == 1 else of_outputs
        return [each[at] if has else getval(each[at]) for at, has in enumerate(self.has_gradient)]

    def gradients(self, argnums: Sequence[int], upstreams: Sequence[Array]) -> Sequence[Array]:
        """Return the gradients at argnums of f's inputs and of what it closes over.

        autograd's gradients are the conjugates of those that rules take and give.
        """
        try:
            gradients, of_variables = self._asked(argnums, upstreams)
        except Exception as error:
            if isinstance(error, CustomGradientError) or not self.was_asked:
                raise
            self.call.refuse("a second order calls grad_fn once for each derivative of the output",
                             f"a {type(error).__name__} in the second call",
                             "let grad_fn keep what it reads")  # fmt: skip
        self.was_asked = self.record is not None
        return self.as_autograd(argnums, gradients, of_variables)

    def _asked(
        self, argnums: Sequence[int], upstreams: Sequence[Array]
    ) -> tuple[Sequence[Array | None], Sequence[Array | None]]:
        """Return the gradients of the inputs and of the variables, as the rule gives them."""
        if self.grad_fn is not None:
            return _by_grad_fn(self, upstreams[0]), ()
        rule = self.rule
        needed = (
            [at in argnums for at in range(self.count)] if rule.takes_needs_input_grad else None
        )
        if self.record or not box_types.isdisjoint(map(type, upstreams)):
            # autograd may put gradients into one box that the rule takes itself
            grad_fn = rule.grad_fn
            opened = lambda *args, **kwargs: with_boxes_opened(grad_fn(*args, **kwargs))
            rule = rule.with_grad_fn(functools.wraps(grad_fn)(opened))
        variables = [self.leaves[at] for at in self.variables]
        us = conjugated(upstreams)
        return rule_scope.run(True, rule, self.inputs, us, variables, needed)  # type: ignore[no-any-return]

    def pushed(
        self, argnums: Sequence[int], outputs: Sequence[Array], tangents: Sequence[Array]
    ) -> Sequence[Array]:
        """Return the tangents of the outputs by the author's jvp_fn, from those at argnums."""
        if any(at >= self.count for at in argnums):
            refuse_captured_tangent(self.call.name)
        full = subvals([None] * self.count, argnums, tangents)
        zeros = lambda at: np.zeros(self.shapes[at], self.dtypes[at])
        plain = [*map(getval, outputs)]
        output_tangents = rule_scope.run(True, self.rule.tangents, full, plain, zeros)
        return [
            np.zeros(y.shape, y.dtype) if t is None else t
            for t, y in zip(output_tangents, plain, strict=True)
        ]

    def as_autograd(
        self,
        argnums: Sequence[int],
        gradients: Sequence[Array | None],
        of_variables: Sequence[Array | None] = (),
    ) -> Sequence[Array]:
        """Return the gradients of a rule as autograd takes them: zeros for None, and the conjugates
        of complex ones.
        """
        if self.closed_over or len(argnums) != len(gradients):
            by_place = dict(enumerate(gradients)) | dict(
                zip(self.variables, of_variables, strict=True)
            )
            gradients = [by_place.get(at) for at in argnums]
        if NoneType in map(type, gradients):
            pairs = zip(gradients, argnums, strict=True)
            gradients = [
                np.zeros(self.shapes[at], self.dtypes[at]) if g is None else g for g, at in pairs
            ]
        return conjugated(gradients)

    def connected(
        self,
        by_rule: Callable[[Any], Sequence[Any]],
        arguments: Sequence[Any],
        values: Sequence[Any],
        ans: Any,
    ) -> Sequence[Any]:
        """Return by_rule(arguments) as a function of all that is in a box at one level of
        derivatives.

        values and ans are what the arguments of f and its outputs are there.
        """
        call, boxes = self.call, [x for x in (*values, *arguments) if type(x) in box_types]
        if self.record is None and not boxes:
            return values_of(call, by_rule(arguments))
        record = self.record or Record(call)
        as_seen = getval if call.once_differentiable else lambda x: record.leaf(getval(x))
        seen = [as_seen(x) if isbox(x) else x for x in arguments]
        with self._recording(record):
            results = by_rule(seen)
            raw, steps = (
                values_of(call, results, record),
                [x._node if isbox(x) else None for x in results],
            )
        if call.once_differentiable or record.unrecorded is not None:
            refuse = functools.partial(call.refuse_unconnected, record.unrecorded, _READ)
            if call.once_differentiable:
                refuse = functools.partial(
                    call.refuse_second_order, "autograd's derivative of a gradient"
                )
            return [without_derivative(call, boxes, x, refuse) for x in raw]
        known = {leaf._node: x for leaf, x in zip(seen, arguments, strict=True) if isbox(leaf)}
        if self.record is not None:
            outputs = self.per_output(ans)
            pairs = [*zip(self.steps, [*outputs, *values], strict=True)]
            # what f returns twice is read as the first of these
            known |= dict(reversed(pairs[: len(outputs)])) | dict(pairs[len(outputs) :])
        for step in steps_to(filter(None, steps), known):
            if step.record is None and not record.is_lost(step):
                args = subvals(step.args, step.places, [known[parent] for parent in step.parents])
                known[step] = in_boxes(step.value, step.fun, args, step.kwargs)
            else:
                why = _READ if step.record is None else "f kept in an earlier call"
                refuse = functools.partial(call.refuse_unconnected, step.value, why)
                known[step] = without_derivative(call, boxes, step.value, refuse)
        return [known[step] if step else x for step, x in zip(steps, results, strict=True)]


# --- An op as a primitive of autograd -------------------------------------------------------------


def output_under_autograd(
    call: Call, inputs: Sequence[Array], plain: PlainRules | None = None
) -> Any:
    """Return the output of a call, connected with the boxes among its inputs, and with those that f
    closes over.
    """
    closed_over = closed_over_by(call)
    args = [*inputs, *closed_over] if closed_over else inputs
    boxes = [x for x in args if type(x) in box_types]
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad([isbox(x) for x in inputs])
    if not boxes:
        outputs, rule = call(inputs)
        return rule.output.combine(values_of(call, outputs))
    inner, levels = [x._value for x in boxes], {x._trace for x in boxes}
    is_first_order = (
        len(levels) == 1 and RECORDED not in levels and box_types.isdisjoint(map(type, inner))
    )
    values = as_arrays(
        inner if is_first_order and len(inner) == len(args) else [*map(getval, args)]
    )
    run = Run(call, len(inputs), values)
    if closed_over or not (is_first_order or call.once_differentiable):
        output = run.on_record(values, args, closed_over, plain)
    else:
        output = run.on_values(values, plain if is_first_order else None)
    ans = in_boxes(output, _outputs_of, args, {"run": run})
    return ans if run.grad_fn is not None else run.rule.output.combine(run.per_output(ans))


def _outputs_of(*args: Any, run: Run) -> NoReturn:
    """Name the primitive that an op is to autograd, which calls its derivatives alone: f has run."""
    refuse_replay(run.call)


def _vjp_of_outputs(
    argnums: Sequence[int], ans: Any, values: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    run: Run = kwargs["run"]
    if run.record is None:  # an array that the rule does not keep is free
        values, ans = () if run.grad_fn else [x for x in values if isbox(x)], None

    def vjp(upstream: Any) -> Sequence[Array]:
        if type(upstream) not in PLAIN or run.grad_fn is None or run.record is not None:
            by_rule = functools.partial(run.gradients, argnums)
            return run.connected(by_rule, as_arrays(run.per_output(upstream)), values, ans)
        gradients = _by_grad_fn(run, upstream)
        return (
            gradients
            if type(gradients) is tuple
            else values_of(run.call, run.as_autograd(argnums, gradients))
        )

    return vjp


def _by_grad_fn(run: Run, upstream: Any) -> Sequence[Array | None]:
    """Return the gradients of the very function that f returned, where all about it is plain."""
    arguments, shapes, dtypes = run.call.arguments, run.shapes, run.dtypes
    token = rule_scope.enter(True)
    try:
        result = run_on(arguments.backend, (upstream,), True, cast(Any, run.grad_fn), upstream)
    finally:
        rule_scope.leave(token)
    value = result._value if run.record is not None and is_recorded(result) else result
    if (
        type(value) in PLAIN
        and [value.shape] == shapes
        and [value.dtype] == dtypes
        and value.dtype.kind == "f"
    ):
        return (result,)  # as nearly all are
    if run.record is not None or isbox(upstream):  # autograd may put gradients into one box
        result = with_boxes_opened(result)
    return gradients_of_arguments(arguments, result, shapes, dtypes)


def _jvp_of_outputs(
    argnums: Sequence[int], tangents: Sequence[Any], ans: Any, values: Sequence[Any], kwargs: Any
) -> Any:
    run: Run = kwargs["run"]
    if run.rule is not None and run.rule.jvp_fn is not None:
        push = functools.partial(run.pushed, argnums, run.per_output(ans))
        pushed = run.connected(push, tangents, values, ans)
        return pushed[0] if len(pushed) == 1 else tuple_of_boxes(tuple(pushed))
    if not run.call.forward_mode:
        run.call.refuse_forward_mode("autograd's make_jvp")

    def by_transpose(tangents: Sequence[Array]) -> Sequence[Any]:
        rule = lambda upstream: run.gradients(argnums, run.per_output(upstream))
        return [transposed(rule, ans, tangents, run.call.refuse_nonlinear)]

    return run.connected(by_transpose, tangents, values, ans)[0]


defvjp_argnums(_outputs_of, _vjp_of_outputs)
defjvp_argnums(_outputs_of, _jvp_of_outputs)
