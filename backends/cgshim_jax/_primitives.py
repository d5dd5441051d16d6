"""The three operations that JAX sees of an op, in the place of jax.custom_vjp and jax.custom_jvp.

`cgshim_op` is a call. Under a derivative it runs f below it, and then the rule is its derivative,
in both modes.

`cgshim_attached` gives f's outputs the rule's derivative further out: it is a call that has been
made already.

`cgshim_transposed` is a linear map defined by its transpose: what a rule is to forward mode.
Reverse mode transposes it, and so runs the rule itself. Only where the map is executed, in forward
mode, is the rule transposed, or refused.

(JAX's own two are each half of this: a custom_vjp has no forward mode, and JAX forgets a custom_jvp
within a scan whose gradient is differentiated. Both run f again where a jitted call is
differentiated, and take the upstream of an output without the batch of a vmap for that of each
member: 48 becomes 96 for two, in 0.4.38 to 0.12.)
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.errors import UnexpectedTracerError
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import ad, mlir

from cgshim.backend import (
    Arguments,
    Call,
    TransformationError,
    refusal,
    refuse_nonlinear_jvp,
    subvals,
)
from cgshim_jax import _private
from cgshim_jax._axes import at_front, batched_type, fit, spread, vmap_over
from cgshim_jax._linearity import (
    NotLinearError,
    calls,
    require_linear,
    require_linear_op,
    transposed_if_linear,
)
from cgshim_jax._rules import (
    as_tensor,
    floats_among,
    is_differentiable,
    is_tensor,
    message_of,
    refuse_captured,
    refuse_captured_of_batch,
    type_of_upstream,
    zeros_of,
)
from cgshim_jax._tracing import (
    Array,
    equations_for,
    eval_jaxpr,
    in_linear_function,
    is_known,
    is_tracer,
    jaxpr_of,
    part_of,
    primitive,
)

Rule = Callable[[list[Array], list[Array], Sequence[int]], Sequence[Array | None]]
"""from residuals, upstreams and places of arguments to the gradients of these arguments"""
_FORWARD = "jvp, jacfwd or linearize"


def without_f(call: Call) -> Call:
    """Return a call for what is refused of this one, whose f would keep tracers alive."""
    return Call(
        Arguments(call.name, call.backend, [], [], True), None, {},  # type: ignore[arg-type]
        forward_mode=call.forward_mode, once_differentiable=call.once_differentiable,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """The derivative of a run of f, as its transpose, the rule.

    As it is callable, no cache of JAX keeps it alive, and what the rule holds.
    """

    call: Call
    """the op's call, without f"""
    rule: Rule
    outputs: Sequence[Any]
    """the types of the outputs"""
    reads: Sequence[int]
    """which of the arguments, the other residuals and the outputs are the rule's residuals"""
    gives: Collection[int]
    """which arguments have a gradient"""
    push: Rule | None = None
    """the map itself, from residuals, tangents and places of arguments, if its author gave it"""
    is_pushed: bool = False
    """whether the rule is nothing but the transpose of that, which JAX itself can take"""
    owner: Any = None
    """what is to live as long as the map: a grad_fn that owns what a host function keeps for it"""

    @functools.cached_property
    def float_at(self) -> list[int]:
        """Which outputs have an upstream."""
        return floats_among(self.outputs)

    @functools.cached_property
    def types(self) -> list[Any]:
        """The types of these upstreams."""
        return [type_of_upstream(self.outputs[at]) for at in self.float_at]

    def attach(self, tensors: Sequence[Array], first: bool = False) -> list[Array]:
        """Return the outputs, which are the last of the tensors, with this map for their
        derivative.
        """
        if not any(map(is_tracer, tensors)):
            return list(tensors[-len(self.outputs) :])
        return list(_attached.bind(*tensors, linear=self, first=first))

    def differentiate(
        self, tensors: Sequence[Array], moving: Sequence[bool], first: bool
    ) -> tuple[list[Array], list[bool], list[Array], Callable[..., list[Any]]]:
        """Return the outputs, which of them move with these arguments, the residuals, and what
        makes of them and the arguments' tangents those of the outputs; tensors are below the
        derivative.
        """
        outputs = self.attach(tensors)
        # an output that the rule keeps is the op's own
        tensors = [*tensors[: len(tensors) - len(outputs)], *outputs]
        picked = tuple(i for i, moves in enumerate(moving) if moves and i in self.gives)
        own_types = [as_tensor(tensors[i]).aval for i in picked]
        types = [y.aval.to_tangent_aval() for y in outputs]

        def tangents_of(residuals: Sequence[Array], tangents: Sequence[Any]) -> list[Any]:
            output_tangents: list[Any] = [*map(ad.Zero, types)]
            if picked:
                own = [spread(tangents[i], kind) for i, kind in zip(picked, own_types, strict=True)]
                if self.is_pushed:
                    moved = self.pushed(list(residuals), own, picked)
                else:
                    moved = _transposed.bind(
                        *residuals, *own, linear=self, picked=picked, first=first
                    )
                for at, tangent in zip(self.float_at, moved, strict=True):
                    output_tangents[at] = tangent
            return output_tangents

        moves = [bool(picked) and at in self.float_at for at in range(len(outputs))]
        return outputs, moves, [tensors[i] for i in self.reads], tangents_of

    def over(
        self, axis: Any, operands: Sequence[Array], residuals_at: Sequence[int | None],
        arguments_at: Mapping[int, int | None],
    ) -> Linear:  # fmt: skip
        """Return the map over a batch: the operands have it at these axes, and the outputs at their
        first axis.
        """

        def rule(
            residuals: list[Array], upstreams: list[Array], picked: Sequence[int]
        ) -> list[Array | None]:
            of_one: Callable[..., Any] = lambda residuals, upstreams: self.rule(
                residuals, upstreams, picked
            )
            out_axes = [arguments_at[i] or 0 for i in picked]
            gradients = vmap_over(axis, of_one, (list(residuals_at), 0), out_axes)(
                residuals, upstreams
            )
            return [
                g.sum(0) if g is not None and arguments_at[i] is None else g
                for g, i in zip(gradients, picked, strict=True)
            ]

        def push(
            residuals: list[Array], tangents: list[Array], picked: Sequence[int]
        ) -> Sequence[Array | None]:
            of_one: Callable[..., Any] = lambda residuals, tangents: self.push(  # type: ignore[misc]
                residuals, tangents, picked
            )
            in_axes = list(residuals_at), [arguments_at[i] for i in picked]
            return list(vmap_over(axis, of_one, in_axes, 0)(residuals, tangents))

        return dataclasses.replace(
            self, rule=rule, push=None if self.push is None else push,
            outputs=[batched_type(y, axis, operands) for y in self.outputs],
        )  # fmt: skip

    def pushed(
        self, residuals: list[Array], tangents: Sequence[Any], picked: Sequence[int]
    ) -> Sequence[Array | None]:
        """Return the outputs' tangents by `push`, which JAX transposes in its turn if it wants to.

        So it has to be linear, unless the tangents are numbers already.
        """
        push: Any = self.push
        tangents = [*map(as_tensor, tangents)]
        if all(map(is_known, tangents)):
            return push(residuals, tangents, picked)  # type: ignore[no-any-return]
        types = [t.aval for t in tangents]
        jaxpr, captured = jaxpr_of(lambda *own: push(residuals, list(own), picked), types)
        try:
            require_linear(jaxpr, len(captured))
        except NotLinearError as error:
            refuse_nonlinear_jvp(self.call.name, str(error))
        if not calls(jaxpr.jaxpr, lambda eqn: eqn.primitive.name == "scan"):
            return eval_jaxpr(jaxpr, [*tangents, *captured])
        # JAX transposes no scan that carries values beside tangents: linearized, it is two
        zeros = [*map(zeros_of, types)]
        _, linear = jax.linearize(lambda *own: eval_jaxpr(jaxpr, [*own, *captured]), *zeros)
        return linear(*tangents)  # type: ignore[no-any-return]

    def __call__(
        self, residuals: list[Array], upstreams: Sequence[Any], picked: Sequence[int]
    ) -> list[Array | None]:
        """Return gradients: run the rule."""
        whole = [
            u if is_tensor(u) else jnp.asarray(u, kind.dtype)
            for u, kind in zip(map(ad.instantiate_zeros, upstreams), self.types, strict=True)
        ]  # a pullback may be called with Python's numbers
        gradients = list(self.rule(residuals, whole, picked))
        return self._once(gradients, [*residuals, *whole])

    def execute(
        self, residuals: list[Array], tangents: list[Array], picked: Sequence[int], first: bool
    ) -> list[Array]:
        """Return the outputs' tangents in forward mode, which may be refused: at first, or over
        another derivative.
        """
        if self.push is not None:
            outputs: Any = self.push(residuals, [as_tensor(t) for t in tangents], picked)
        elif first and not self.call.forward_mode:
            self.call.refuse_forward_mode(_FORWARD)
        else:
            outputs = self._transposed(residuals, tangents, picked)
        return self._once(list(outputs), [*residuals, *tangents])

    def _once(self, values: list[Any], of: Sequence[Array]) -> list[Any]:
        if not self.call.once_differentiable:
            return values
        refusal = message_of(self.call.refuse_second_order, "its derivative")
        return without_derivative(self.call, values, of, refusal)

    def _transposed(
        self, residuals: list[Array], tangents: list[Array], picked: Sequence[int]
    ) -> list[Array]:
        def fitting(*upstreams: Array) -> list[Array]:
            gradients = self.rule(residuals, list(upstreams), picked)
            return [
                jnp.zeros_like(t) if g is None else fit(g, t.aval)
                for g, t in zip(gradients, map(as_tensor, tangents), strict=True)
            ]

        def refuse(what: str, is_seen: bool) -> NoReturn:
            if is_seen and not self.call.forward_mode:
                self.call.refuse_forward_mode(_FORWARD)
            self.call.refuse_nonlinear(what)

        return transposed_if_linear(fitting, self.types, tangents, refuse)


class Op:
    """A call, as a parameter of the operation that JAX sees."""

    call: Call
    f: ClosedJaxpr | None = None
    """from arguments to outputs, once somebody has asked for their types"""
    of_batch: Callable[..., tuple[Sequence[Array], Sequence[bool]]] | None = None
    """runs a batch as cgshim.backend.Mapped does, if vmap is not to map the call itself"""
    in_batch: Sequence[int] = ()
    """which arguments are to have the batch in any case"""

    def primal(self, arguments: Sequence[Array]) -> Sequence[Array]:
        """Return the outputs, those of f where that is a jaxpr from the beginning."""
        assert self.f is not None
        return eval_jaxpr(self.f, arguments)

    def forward(
        self, arguments: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array], Linear]:
        """Return the outputs, the residuals that are neither arguments nor outputs, and the
        derivative.
        """
        raise NotImplementedError

    def __call__(self, arguments: Sequence[Array]) -> list[Array]:
        return list(_op.bind(*arguments, op=self))

    def traced(self, types: Sequence[Any]) -> ClosedJaxpr:
        """Return f as a jaxpr of arguments of these types."""
        if self.f is None or list(self.f.in_avals) != list(types):
            f, captured = jaxpr_of(lambda *arguments: list(self.primal(arguments)), types)
            refuse_captured(self.call.name, captured)
            self.f = f
        return self.f

    def transposed(self, types: Sequence[Any], picked: Sequence[int]) -> ClosedJaxpr:
        """Return the gradients of these arguments, in which f is linear, as a jaxpr of the other
        arguments and of upstreams; types are those of all arguments.

        They are the rule's, which may not read these arguments, nor what f made of them: that is an
        error. Where a jvp_fn is the only rule they are those of f, as with jax.custom_jvp.
        """
        f = self.traced(types)
        float_at = floats_among(f.out_avals)

        def gradients(*tensors: Array) -> list[Array]:
            arguments, upstreams = tensors[: len(types)], list(tensors[len(types) :])
            outputs, residuals, linear = self.forward(arguments)
            if linear.is_pushed:
                of_own, own = functools.partial(of, arguments), [types[at] for at in picked]
                return transposed_if_linear(of_own, own, upstreams, refuse)
            before = [*arguments, *residuals]
            read = [*before, *linear.attach([*before, *outputs])]
            made = linear([read[at] for at in linear.reads], upstreams, tuple(picked))
            return [
                jnp.zeros_like(arguments[at]) if g is None else fit(g, types[at])
                for at, g in zip(picked, made, strict=True)
            ]

        def of(arguments: Sequence[Array], *own: Array) -> list[Array]:
            outputs = eval_jaxpr(f, subvals(arguments, picked, own))
            return [outputs[at] for at in float_at]

        def refuse(what: str, is_seen: bool) -> NoReturn:
            raise NotLinearError(what)

        of_outputs = [type_of_upstream(f.out_avals[at]) for at in float_at]
        whole, captured = jaxpr_of(gradients, [*types, *of_outputs])
        refuse_captured(self.call.name, captured)
        given, ends = whole.jaxpr.invars, whole.jaxpr.outvars
        computing = equations_for(ends, whole.jaxpr.eqns)
        own = {given[at] for at in picked}
        if any(v in own for eqn in computing for v in eqn.invars if not isinstance(v, Literal)):
            raise NotLinearError(f"{self.call.name}, whose gradient depends on the tangent")
        return part_of(whole, [v for v in given if v not in own], ends, computing)


class _Over(Op):
    """A call over a batch."""

    def __init__(self, op: Op, axis: Any, at: Sequence[int | None]) -> None:
        self.op, self.axis, self.at, self.call = op, axis, at, op.call

    def primal(self, arguments: Sequence[Array]) -> Sequence[Array]:
        primal = vmap_over(
            self.axis, lambda *arguments: list(self.op.primal(arguments)), tuple(self.at), 0
        )
        return list(primal(*arguments))

    def forward(
        self, arguments: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array], Linear]:
        linears: list[Linear] = []

        def of_one(*arguments: Array) -> Any:
            outputs, residuals, linear = self.op.forward(arguments)
            linears.append(linear)
            return list(outputs), list(residuals)

        outputs, residuals = vmap_over(self.axis, of_one, tuple(self.at), 0)(*arguments)
        at = [*self.at, *[0] * (len(residuals) + len(outputs))]
        reads = [at[i] for i in linears[-1].reads]
        linear = linears[-1].over(self.axis, arguments, reads, dict(enumerate(self.at)))
        return outputs, residuals, linear


def without_derivative(
    call: Call, values: Sequence[Array | None], of: Sequence[Array], refusal: str
) -> list[Array | None]:
    """Return values whose derivative by `of`, the tensors that they are made of, raises the error
    `refusal`.
    """
    arguments = [x for x in of if is_differentiable(x)]
    if not any(map(is_tracer, arguments)):
        return list(values)

    def refuse(*_: Any) -> NoReturn:
        raise TransformationError(refusal)

    at = [i for i, value in enumerate(values) if value is not None]
    made = [jax.lax.stop_gradient(values[i]) for i in at]
    types, gives = [x.aval for x in made], range(len(arguments))
    # a call that is not once_differentiable: there is no derivative to be refused in its turn
    plain = Call(call.arguments, call.f, {})
    linear = Linear(plain, refuse, types, [], gives, push=refuse)
    return subvals([None] * len(values), at, linear.attach([*arguments, *made], first=True))


# --- The operations -------------------------------------------------------------------------------


def _differentiable(
    name: str, evaluate: Callable[..., Any], types: Callable[..., Any],
    differentiate: Callable[..., Any], batch: Callable[..., Any],
) -> Any:  # fmt: skip
    """Return a new primitive that has a derivative: differentiate is that of Linear, of its
    operands.
    """

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], **parameters: Any) -> Any:
        moving = [not isinstance(t, ad.Zero) for t in tangents]
        outputs, _, residuals, tangents_of = differentiate(primals, moving, **parameters)
        return outputs, tangents_of(residuals, tangents)

    def linearize(*operands: Any, **parameters: Any) -> Any:
        # since 0.9 another flag comes first
        moving, *primals = operands[isinstance(operands[0], bool) :]
        *derivative, tangents_of = differentiate(primals, moving, **parameters)

        def linear(residuals: Sequence[Array], *own: Any) -> list[Any]:
            with in_linear_function():
                return tangents_of(residuals, own)  # type: ignore[no-any-return]

        if _private.has_structured_residuals:
            return *derivative, None, lambda residuals, _, *own: linear(residuals, *own)
        return *derivative, linear

    made = primitive(name, evaluate, types, jvp, batch)
    _private.primitive_linearizations[made] = linearize
    return made


def _evaluate_op(*operands: Array, op: Op) -> list[Array]:
    return list(op.primal(operands) if op.f is None else eval_jaxpr(op.f, operands))


def _types_of_op(*types: Any, op: Op) -> list[Any]:
    return list(op.traced(types).out_avals)


def _differentiate_op(primals: Sequence[Array], moving: Sequence[bool], *, op: Op) -> Any:
    outputs, residuals, linear = op.forward(primals)
    return linear.differentiate([*primals, *residuals, *outputs], moving, first=True)


def _batch_op(axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, op: Op) -> Any:
    batched = any(i is not None for i in at)  # JAX asks even where nothing is
    if batched and op.of_batch is not None:
        flags = [i is not None or place in op.in_batch for place, i in enumerate(at)]
        front = lambda x, i, has: at_front(x, i, axis) if has else x
        try:
            outputs, have = op.of_batch(axis.size, flags, *map(front, operands, at, flags))
        except UnexpectedTracerError as error:
            refuse_captured_of_batch(op.call.name, error)
        return outputs, [0 if has else None for has in have]
    outputs = (_Over(op, axis, at) if batched else op)(operands)
    return outputs, [0 if batched else None] * len(outputs)


def _lower_op(context: Any, *operands: Any, op: Op) -> Any:
    f = op.traced(context.avals_in)
    return _private.core_call_lowering(context, *operands, name="cgshim_op", call_jaxpr=f)


_op = _differentiable("cgshim_op", _evaluate_op, _types_of_op, _differentiate_op, _batch_op)
if _private.core_call_lowering is not None:
    mlir.register_lowering(_op, _lower_op, **_private.lowered_each_time)


def _check(*arguments: Any, op: Op) -> tuple[Any, list[Array]]:
    """Return f's outputs with the rule's derivative, and the first error that checkify finds in f
    or found before.
    """
    context, (error, enabled, *operands) = (
        arguments[: _private.checkify_contexts],
        arguments[_private.checkify_contexts :],
    )
    jaxpr = op.traced([x.aval for x in operands])
    # errors have no derivative; XLA evaluates f once
    constants = [jax.lax.stop_gradient(x) for x in operands]
    error, _ = _private.checkify_jaxpr(*context, jaxpr, enabled, error, *constants)
    return error, op(operands)


_private.error_checks[_op] = _check


def _outputs(*operands: Any, linear: Linear, first: bool) -> list[Any]:
    return list(operands[len(operands) - len(linear.outputs) :])


def _batch_of_attached(
    axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, linear: Linear, first: bool
) -> Any:
    count = len(operands) - len(linear.outputs)
    if any(i is not None for i in at):
        values = [at_front(y, i, axis) for y, i in zip(operands[count:], at[count:], strict=True)]
        operands = [*operands[:count], *values]
        at = [*at[:count], *(0 for _ in values)]
        linear = linear.over(axis, operands, [at[i] for i in linear.reads], dict(enumerate(at)))
    return _attached.bind(*operands, linear=linear, first=first), at[count:]


_attached = _differentiable(
    "cgshim_attached", _outputs, _outputs,
    lambda primals, moving, linear, first: linear.differentiate(primals, moving, first),
    _batch_of_attached,
)  # fmt: skip


def _execute(*operands: Array, linear: Linear, picked: Sequence[int], first: bool) -> list[Array]:
    count = len(linear.reads)
    return linear.execute(list(operands[:count]), list(operands[count:]), picked, first)


def _jvp_of_transposed(primals: Sequence[Array], tangents: Sequence[Array], **how: Any) -> Any:
    whole = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    return jax.jvp(lambda *operands: _execute(*operands, **how), tuple(primals), whole)


def _transpose(
    upstreams: Sequence[Any], *operands: Array, linear: Linear, picked: Sequence[int], first: bool
) -> list[Array | None]:
    # not even zeros, which would have a dtype of their own
    if all(isinstance(u, ad.Zero) for u in upstreams):
        return [None] * len(operands)
    count = len(linear.reads)
    gradients = linear(list(operands[:count]), upstreams, picked)
    return [None] * count + [
        fit(g, t.aval) if g is not None and ad.is_undefined_primal(t) else None
        for g, t in zip(gradients, operands[count:], strict=True)
    ]


def _batch_of_transposed(
    axis: Any, operands: Sequence[Array], at: Sequence[int | None], *,
    linear: Linear, picked: Sequence[int], first: bool,
) -> Any:  # fmt: skip
    batched = any(i is not None for i in at)
    if batched:
        count = len(linear.reads)
        linear = linear.over(axis, operands, at[:count], dict(zip(picked, at[count:], strict=True)))
    outputs = _transposed.bind(*operands, linear=linear, picked=picked, first=first)
    return outputs, [0 if batched else None] * len(outputs)


_transposed = primitive(
    "cgshim_transposed", _execute, lambda *types, linear, **how: list(linear.types),
    _jvp_of_transposed, _batch_of_transposed,
)  # fmt: skip
ad.primitive_transposes[_transposed] = _transpose


def _transpose_op(upstreams: Sequence[Any], *operands: Any, op: Op) -> list[Array | None]:
    """Return gradients by the rule of an op on a tangent, in which it is linear."""
    picked = [at for at, x in enumerate(operands) if ad.is_undefined_primal(x)]
    if all(isinstance(u, ad.Zero) for u in upstreams):
        return [None] * len(operands)
    known = [as_tensor(x) for x in operands if not ad.is_undefined_primal(x)]
    types = [x.aval if at in picked else as_tensor(x).aval for at, x in enumerate(operands)]
    f = op.traced(types)
    try:
        require_linear_op(op, picked)
        transposed = op.transposed(types, picked)
    except NotLinearError as error:
        _refuse_on_a_tangent(op.call, str(error))
    whole = [as_tensor(ad.instantiate_zeros(upstreams[at])) for at in floats_among(f.out_avals)]
    return subvals([None] * len(operands), picked, eval_jaxpr(transposed, [*known, *whole]))


def _refuse_on_a_tangent(call: Call, what: str) -> NoReturn:
    raise refusal(TransformationError, call.name,
                  must="an op that is called on a tangent must be linear in it", got=what,
                  do="call there the functions that it is made of, or return (output, grad_fn, jvp_fn)")  # fmt: skip


def _transpose_attached(_: Any, *operands: Any, linear: Linear, first: bool) -> NoReturn:
    _refuse_on_a_tangent(linear.call, "one that does something besides")


ad.primitive_transposes.update({_op: _transpose_op, _attached: _transpose_attached})


# --- What JAX has outside of its core, once it is imported ----------------------------------------


def register_with_pallas_and_jet() -> None:
    """Let Pallas lower a call whose kernel is being traced, and let jet refuse one."""
    for each, evaluate in (_op, _evaluate_op), (_attached, _outputs):
        _private.lower_in_kernels(each, evaluate)
        if "jax.experimental.jet" in sys.modules:
            sys.modules["jax.experimental.jet"].jet_rules[each] = _refuse_jet


def _refuse_jet(primals: Any, series: Any, **parameters: Any) -> NoReturn:
    (name,) = [x.call.name for x in parameters.values() if hasattr(x, "call")]
    raise refusal(TransformationError, name, must="a rule gives one derivative at a time",
                  got="jax.experimental.jet",
                  do="nest jax.grad, or jax.jvp with op_custom_gradient(forward_mode=True)")  # fmt: skip
