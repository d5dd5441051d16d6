"""MLX: one run of f, and its outputs and residuals as functions of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import mlx.core as mx

from cgshim.backend import Residuals, RuleScope, convert_closure, refuse_another_run, refuse_hidden, run_again
from cgshim_mlx._arrays import Array, agree, all_of, handle, is_float, is_tensor, spoiled, stopped
from cgshim_mlx._graph import Graph, is_one_array, is_traced
from cgshim_mlx._linear import transposed
from cgshim_mlx._vjp import RANDOM, jvp, pulled_back

if TYPE_CHECKING:
    from cgshim.backend import Call

Pull = Callable[[Sequence[Array], Sequence[Array], Sequence[Array], Sequence[Array]], Sequence[Array]]
"""`pull(sources, values, kept, upstreams)`: one gradient for each source"""
Push = Callable[[Sequence[Array], Sequence[Array], Sequence[Array], Sequence[Array]], Sequence[Array]]
"""`push(sources, values, kept, tangents)`: the tangent of each value"""


def attached(pull: Pull, push: Push) -> Callable[..., list[Array]]:
    """The function `attach(sources, values, kept)` to the values, as functions of the sources by pull and push.

    It is lazy: MLX calls pull and push where it is asked for such a derivative. There the values are those that attach
    has returned, with their own derivatives; kept are constants, which have to be arguments for mx.vmap to see them.
    """

    @mx.custom_function
    def attach(sources: Sequence[Array], values: Sequence[Array], kept: Sequence[Array]) -> list[Array]:
        return list(values)

    @attach.vjp
    def vjp(arguments: Any, upstreams: Sequence[Array], outputs: Sequence[Array]) -> Any:
        sources, values, kept = arguments
        gradients = pull(sources, outputs, kept, upstreams)
        return gradients, [mx.zeros_like(y) for y in values], [mx.zeros_like(x) for x in kept]

    @attach.jvp
    def jvp(arguments: Any, tangents: Any) -> list[Array]:
        sources, values, kept = arguments
        of_sources = [mx.zeros_like(x) if t is None else t for x, t in zip(sources, tangents[0], strict=True)]
        return list(push(sources, attach(sources, values, kept), kept, of_sources))

    @attach.vmap
    def vmap(arguments: Any, axes: Any) -> Any:
        parts = [[*zip(part, its_axes, strict=True)] for part, its_axes in zip(arguments, axes, strict=True)]
        size = next(x.shape[axis] for part in parts for x, axis in part if axis is not None)
        batched = attached(mx.vmap(pull), mx.vmap(push))
        return batched(*[_batched(part, size) for part in parts]), [0] * len(arguments[1])

    return attach  # type: ignore[no-any-return]  # MLX has no type for it


def _batched(arrays: Sequence[tuple[Array, int | None]], size: int) -> list[Array]:
    """Arrays with their batch axis in front; one that has none is repeated."""
    return [mx.broadcast_to(x, (size, *x.shape)) if axis is None else mx.moveaxis(x, axis, 0) for x, axis in arrays]


def without_derivative(
    refuse: Callable[[], NoReturn], sources: Sequence[Array], values: Sequence[Array]
) -> list[Array]:
    """The values, as functions of the sources that nobody may differentiate."""
    return attached(lambda *_: refuse(), lambda *_: refuse())(sources, stopped(values), [])


class Run:
    """One run of f, on inputs and captured arrays that are cut off from their derivatives."""

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call, self.count = call, len(inputs)
        captured, self._rebuild = convert_closure(call.f, is_tensor)
        given = stopped([*inputs, *captured])
        self._same_as_given = given, [handle(x) for x in given]  # the same arrays, while f changes none in place
        outputs, self.rule = call(given[: self.count], self._rebuild(given[self.count :]))
        constant = [_is_a_constant(x, inputs) for x in captured]
        self.is_variable = [
            self.rule.takes_variables and not c and is_traced(x) for x, c in zip(captured, constant, strict=True)
        ]
        # A constant has a gradient of zero by this op, but a derivative of its own where the rule keeps it.
        known = [v or c for v, c in zip(self.is_variable, constant, strict=True)]
        read = [x if is_known else self._refused(x) for x, is_known in zip(captured, known, strict=True)]
        self.residuals = Residuals(call, self.rule, is_tensor, given, outputs)
        self.sources = [*inputs, *read]
        in_options = next(filter(is_tensor, call.backend.tree_flatten(dict(call.options))[0]), None)
        self.outputs = [self._refused(y, in_options) for y in outputs]
        self.kept = given + [self._refused(y) for y in self.residuals.others]

    def _refused(self, x: Array, source: Array | None = None) -> Array:
        """x as a constant; MLX tells nobody what is being differentiated, until it asks for the gradient of x."""
        culprit = x if source is None else source
        return without_derivative(lambda: self.call.refuse_captured(culprit), [x], [x])[0]

    # --- The rule ------------------------------------------------------------------------------------------------

    def gradients(
        self, sources: Sequence[Array], outputs: Sequence[Array], kept: Sequence[Array], upstreams: Sequence[Array]
    ) -> Sequence[Array]:
        refuse = self._refuse_second_order()
        if refuse is not None:
            given, others = kept[: len(sources)], kept[len(sources) :]
            gradients = self._gradients(stopped(given), stopped(outputs), stopped(others), stopped(upstreams))
            return without_derivative(refuse, [*sources, *upstreams], gradients)
        arguments, others = self._connected(sources, kept)
        return self._gradients(arguments, outputs, others, upstreams)

    def _gradients(
        self, arguments: Sequence[Array], outputs: Sequence[Array], others: Sequence[Array], upstreams: Sequence[Array]
    ) -> list[Array]:
        rule = self.residuals.around(arguments, outputs, others)
        inputs, read = arguments[: self.count], arguments[self.count :]
        running = _Running(inputs, [*arguments, *outputs, *others], _rule.current)
        of_inputs, of_variables = _rule.run(running, rule, inputs, upstreams, [*compress(read, self.is_variable)])
        left = iter(of_variables)
        found = [*of_inputs, *(next(left, None) if is_variable else None for is_variable in self.is_variable)]
        return [mx.zeros_like(x) if g is None else g for x, g in zip(arguments, found, strict=True)]

    def _refuse_second_order(self) -> Callable[[], NoReturn] | None:
        """What to say to whoever asks for a second order that does not exist; None where it does."""
        if self.call.once_differentiable:
            return lambda: self.call.refuse_second_order("MLX's derivative of a gradient")
        hidden = self.residuals.hidden()
        return (lambda: refuse_hidden(self.call, hidden[0])) if hidden else None

    def tangents(
        self, sources: Sequence[Array], outputs: Sequence[Array], kept: Sequence[Array], tangents: Sequence[Array]
    ) -> Sequence[Array]:
        """J v, as the transpose of the rule: the gradient of <gradients(upstream), v> with respect to upstream."""
        if not self.call.forward_mode:
            self.call.refuse_forward_mode("mx.jvp")
        refuse = self._refuse_second_order()
        if refuse is None:
            arguments, others = self._connected(sources, kept)
            return transposed(self.call, lambda *us: self._gradients(arguments, outputs, others, us), outputs, tangents)
        given, others = stopped(kept[: len(sources)]), stopped(kept[len(sources) :])
        constants = stopped(outputs)
        rule = lambda *us: self._gradients(given, constants, others, us)
        pushed = transposed(self.call, rule, constants, stopped(tangents))
        return without_derivative(refuse, [*sources, *tangents], pushed)

    # --- What it keeps, with the derivatives that a second order needs ------------------------------------------------

    def _connected(self, sources: Sequence[Array], kept: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """The arguments, and the other residuals as functions of these, with the values of the first run."""
        given, others = kept[: len(sources)], kept[len(sources) :]
        as_given = attached(self._gradients_of_arguments, self._tangents_of_arguments)
        arguments = _with_floats(given, lambda floats: as_given(_floats(sources), floats, []))
        by_f = attached(self._gradients_of_others, self._tangents_of_others)
        return arguments, _with_floats(others, lambda floats: by_f(arguments, floats, []))

    def _gradients_of_arguments(self, sources: Any, values: Any, kept: Any, upstreams: Sequence[Array]) -> Any:
        self._require_unchanged()
        return upstreams

    def _tangents_of_arguments(self, sources: Any, values: Any, kept: Any, tangents: Sequence[Array]) -> Any:
        self._require_unchanged()
        return tangents

    def _require_unchanged(self) -> None:
        for after, before in zip(*self._same_as_given, strict=True):
            if not is_one_array(after, before):
                refuse_another_run(self.call, "one that changes its arguments", "let f work on copies")

    def _gradients_of_others(
        self, arguments: Sequence[Array], values: Sequence[Array], kept: Any, upstreams: Sequence[Array]
    ) -> list[Array]:
        _, gradients = pulled_back(lambda *xs: self._others_again(xs, values), arguments, upstreams)
        return [mx.zeros_like(x) if g is None else g for x, g in zip(arguments, gradients, strict=True)]

    def _tangents_of_others(
        self, arguments: Sequence[Array], values: Sequence[Array], kept: Any, tangents: Sequence[Array]
    ) -> Sequence[Array]:
        return jvp(lambda *xs: self._others_again(xs, values), arguments, tangents)

    def _others_again(self, arguments: Sequence[Array], values: Sequence[Array]) -> list[Array]:
        """The floats among the other residuals, of another run of f; NaN where they are not those of the first."""
        given = [handle(x) for x in arguments]
        inputs, read = given[: self.count], given[self.count :]
        found = run_again(
            self.call, inputs, self.rule, is_tensor, lambda a, b: True, f=self._rebuild(read), generators=[RANDOM]
        )
        floats = [x for x in _floats(found) if not any(x is each for each in read)]
        if [x.shape for x in floats] != [x.shape for x in values]:
            refuse_another_run(self.call, "others", "let f return, and its rule keep, the same tensors in each run")
        ok = all_of(map(agree, floats, values))
        return [spoiled(x, ok) for x in floats]


def _floats(arrays: Sequence[Array]) -> list[Array]:
    return [x for x in arrays if is_float(x)]


def _with_floats(arrays: Sequence[Array], replace: Callable[[list[Array]], list[Array]]) -> list[Array]:
    """The arrays, with others in the place of the floats among them; integers are constants."""
    floats = _floats(arrays)
    rest = iter(replace(floats) if floats else [])
    return [next(rest) if is_float(x) else x for x in arrays]


# --- Ops that are called while a rule runs


class _Running(NamedTuple):
    """The call whose rule is running, for the ops that are called in it."""

    inputs: Sequence[Array]
    residuals: Sequence[Array]
    outer: _Running | None

    def speaks_for(self, x: Array, inputs: Sequence[Array]) -> bool:
        """Whether x is a residual of this call, or one further out, whose arguments are all among inputs."""
        given = {id(each) for each in inputs}
        if any(x is each for each in self.residuals) and all(
            id(each) in given for each in self.inputs if is_float(each)
        ):
            return True
        return self.outer is not None and self.outer.speaks_for(x, inputs)


_rule: RuleScope[_Running] = RuleScope("cgshim_mlx_rule")


def _is_a_constant(x: Array, inputs: Sequence[Array]) -> bool:
    """Whether, in a running rule, x depends on what is differentiated through inputs alone."""
    if _rule.current is None:
        return False
    return _rule.current.speaks_for(x, inputs) or Graph(x, inputs).is_made_of_inputs()
