"""MLX: one run of f, its outputs as functions of the arguments, and the rule that it returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import compress
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from cgshim.backend import is_in_rule, tensors_inside
from cgshim_mlx._arrays import Array, Arrays, handle, is_float, is_tensor, rebound, renewed, stopped
from cgshim_mlx._graph import Graph, those_behind
from cgshim_mlx._linear import transposed
from cgshim_mlx._vjp import unusable

if TYPE_CHECKING:
    from cgshim.backend import Call

Derivative = Callable[[Arrays, Arrays, Arrays, Arrays], Arrays]
"""`pull(sources, values, held, upstreams)`: one gradient for each source; push: from tangents to those of the values"""


def attached(
    pull: Derivative,
    push: Derivative,
    sources: Arrays,
    values: Arrays,
    held: Arrays = (),
    told: Arrays = (),
) -> list[Array]:
    """The values, as functions of the sources by pull and push.

    It is lazy: MLX calls pull and push where it is asked for such a derivative. There the values
    are those that this has returned, with their own derivatives. held are arrays that pull and push
    read from a Python closure, which mx.vmap does not see: in its batches pull and push are told
    what they are there, and elsewhere what told says.
    """
    met: list[Array] = []  # held, in a batch

    @mx.custom_function
    def carry(held: Arrays) -> Array:
        return mx.zeros(())  # an argument of attach: mx.vmap comes here first

    @carry.vmap
    def vmap_of_held(held: Any, axes: Any) -> Any:
        met[:] = _batched(held, axes)
        return mx.zeros(()), None

    @mx.custom_function
    def attach(sources: Arrays, values: Arrays, carried: Array) -> list[Array]:
        return list(values)

    @attach.vjp
    def vjp(arguments: Any, upstreams: Arrays, outputs: Arrays) -> Any:
        gradients = pull(arguments[0], outputs, list(told), upstreams)
        return gradients, [mx.zeros_like(y) for y in arguments[1]], mx.zeros_like(arguments[2])

    @attach.jvp
    def jvp(arguments: Any, tangents: Any) -> list[Array]:
        of_sources = [
            mx.zeros_like(x) if t is None else t
            for x, t in zip(arguments[0], tangents[0], strict=True)
        ]
        return list(push(arguments[0], attach(*arguments), list(told), of_sources))

    @attach.vmap
    def vmap(arguments: Any, axes: Any) -> Any:
        count, both = (
            len(arguments[0]),
            _batched([*arguments[0], *arguments[1]], [*axes[0], *axes[1]]),
        )
        return attached(mx.vmap(pull), mx.vmap(push), both[:count], both[count:], met, met), [
            0
        ] * len(arguments[1])

    found: list[Array] = attach(list(sources), list(values), mx.stop_gradient(carry(list(held))))
    # integers, which may be indices
    return [y if is_float(y) else mx.stop_gradient(y) for y in found]


def _batched(arrays: Arrays, axes: Sequence[int | None]) -> list[Array]:
    """Arrays with their batch axis in front; one that has none is repeated."""
    pairs = list(zip(arrays, axes, strict=True))
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    return [
        mx.broadcast_to(x, (size, *x.shape)) if axis is None else mx.moveaxis(x, axis, 0)
        for x, axis in pairs
    ]


class Run:
    """One run of f, on the inputs as they are in the graph: so is all that the rule reads, wherever
    f kept it.
    """

    def __init__(self, call: Call, inputs: Arrays) -> None:
        self.call, self.in_rule, self.is_within_f = call, is_in_rule(), _within_f.get()
        self.given = [renewed(x) for x in inputs]
        self.beginnings = [handle(x) for x in self.given]
        in_options = filter(is_tensor, call.backend.tree_flatten(dict(call.options))[0])
        may_be_captured = [*in_options, *call.variables, *tensors_inside(call.f, is_tensor, 20)]
        captured = {id(x): x for x in may_be_captured if is_float(x)}
        outer = _within_f.set(True)
        try:
            self.results, self.rule = call(self.given)
        finally:
            _within_f.reset(outer)
        self.made = [handle(y) for y in self.results]
        read = those_behind(self.made, [*captured.values()])
        self.variables, self.sources = call.variables, [*inputs, *call.variables]
        if not self.in_rule:  # else captured tensors are constants
            self._find_captured(read, inputs)
        unread = () if self.in_rule else captured.keys() - map(id, read)
        self.held = [
            *self.given,
            *(x for x in tensors_inside(self.rule.grad_fn, is_tensor) if id(x) not in unread),
        ]
        self.kept = [handle(x) for x in self.held]
        old = {id(x): x for x in self.given} | captured
        self.is_own = [id(y) not in old for y in self.results]
        self.known = {*old, *map(id, self.results)}
        self.new = [handle(x) for x in self.held if is_float(x) and id(x) not in self.known]
        self.known |= {id(x) for x in self.held}

    @property
    def outputs(self) -> list[Array]:
        # what that rule's call returned is another array while it runs
        told = self.kept if self.in_rule else []
        return attached(self._pull, self._push, self.sources, stopped(self.made), self.kept, told)

    # --- What f captured --------------------------------------------------------------------------

    def _find_captured(self, read: Arrays, inputs: Arrays) -> None:
        """Make the variables and every other captured tensor sources of the outputs."""
        found = [
            x
            for x in read
            if self.rule.takes_variables
            and Graph([x]).has_a_derivative()
            and self._captures(handle(x))
        ]
        self.variables = self.call.captured_variables(found, inputs)
        self.call.require_variables(self.rule, self.variables)
        if Graph(self.made, [*self.beginnings, *read]).has_a_derivative():  # of a global
            self.call.refuse_captured(self.made[0])
        guarded = [x for x in read if all(x is not each for each in self.variables)]
        self.sources = [*inputs, *self.variables, *map(self._guarded, guarded)]

    def _guarded(self, x: Array) -> Array:
        """x as a source of the outputs: MLX tells nobody what is being differentiated, until it
        asks for a gradient.
        """
        now = handle(x)

        def zeros(sources: Any, values: Any, held: Any, derivatives: Arrays) -> list[Array]:
            if self._captures(now):
                self.call.refuse_captured(x)
            return [mx.zeros_like(each) for each in derivatives]

        return attached(zeros, zeros, [x], stopped([x]))[0]

    def _captures(self, x: Array) -> bool:
        """Whether an output is made of x by another way than the inputs."""
        return len(self.beginnings) in Graph(self.made, [*self.beginnings, x]).inputs()

    # --- The rule ---------------------------------------------------------------------------------

    def _gradients(
        self, sources: Arrays, outputs: Arrays, held: Arrays, upstreams: Arrays
    ) -> list[Array]:
        """The rule is called as it is; f's outputs are the op's own meanwhile, and in batches all
        else is batched.
        """
        # what f returns twice is read as the first of these
        own = [*compress(zip(self.results, outputs, strict=True), self.is_own)][::-1]
        objects = [*(self.held if held else ()), *(y for y, _ in own)]
        with rebound(objects, [*held, *(y for _, y in own)]):
            of_inputs, of_variables = self.rule(self.given, upstreams, self.variables)
        found = [*of_inputs, *of_variables, *([None] * len(sources))]
        return [mx.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=False)]

    def _pull(
        self, sources: Arrays, outputs: Arrays, held: Arrays, upstreams: Arrays
    ) -> list[Array]:
        held_now = tensors_inside(self.rule.grad_fn, is_tensor)  # before the rule changes that
        gradients = self._gradients(sources, outputs, held, upstreams)
        return self._differentiable(
            gradients, [*sources, *upstreams], [*outputs, *upstreams, *held], held_now
        )

    def _push(
        self, sources: Arrays, outputs: Arrays, held: Arrays, tangents: Arrays
    ) -> list[Array]:
        """J v, as the transpose of the rule; what cannot be had may still be a tangent that an
        outer op never uses.
        """
        try:
            if not self.call.forward_mode:
                self.call.refuse_forward_mode("mx.jvp")
            rule = lambda *upstreams: self._gradients(sources, outputs, held, upstreams)
            pushed = transposed(self.call, rule, outputs, tangents)
        except Exception as error:
            if not self.is_within_f:
                raise
            return [unusable(y, error) for y in outputs]
        return self._differentiable(pushed, [*sources, *tangents], [*outputs, *tangents, *held])

    def _differentiable(
        self, results: Arrays, sources: Arrays, known: Arrays, others: Arrays = ()
    ) -> list[Array]:
        """The results of the rule, whose derivatives by all that it read are there, or are refused
        when asked for.

        MLX does not ask for that of a constant. Where something may be one to MLX alone, it is made
        of the sources too.
        """
        once = self.call.once_differentiable
        read = [handle(x) for x in results]

        def require(of: Arrays, values: Any, held: Any, derivatives: Arrays) -> list[Array]:
            if once:
                self.call.refuse_second_order("MLX's derivative of a gradient")
            self._require_connected(read, [*self.beginnings, *self.variables, *self.kept, *known])
            return [*derivatives[: len(results)], *map(mx.zeros_like, of[len(results) :])]

        of = [] if once else list(results)
        others = [x for x in others if id(x) not in self.known]
        of += sources if once or others or self.new or self.rule.output.converted else ()
        return attached(require, lambda *args: require(*args)[: len(results)], of, stopped(results))

    def _require_connected(self, results: Arrays, known: Arrays) -> None:
        if Graph(results, known).has_a_derivative():
            found = (
                x
                for x in tensors_inside(self.rule.grad_fn, is_tensor)
                if Graph([x], known).has_a_derivative()
            )
            self.call.refuse_unconnected(
                next(found, results[0]), "was made of what is differentiated elsewhere"
            )
        converted = self.rule.output.converted
        for x in (
            tensors_inside(self.rule.grad_fn, lambda x: id(x) in converted) if converted else ()
        ):
            self.call.refuse_unconnected(x, "f has returned as an array of NumPy's")
        for x in self.new:
            if Graph([x]).is_an_array_alone and Graph(results, [x]).inputs():
                self.call.refuse_unconnected(x, "f made of values that Python read")


_within_f: ContextVar[bool] = ContextVar("cgshim_mlx_f", default=False)
