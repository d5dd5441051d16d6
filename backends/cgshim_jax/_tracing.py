"""What JAX is doing around a call, and functions traced with all that they capture."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.errors import ConcretizationTypeError, TracerArrayConversionError
from jax.extend.core import ClosedJaxpr, Literal

from cgshim.backend import TransformationError
from cgshim_jax import _private

Array = Any

CONCRETIZATION_ERRORS = (ConcretizationTypeError, TracerArrayConversionError)
"""what JAX raises where Python or NumPy reads a value that a tracer does not have"""


# --- What surrounds a call --------------------------------------------------------------------------------------


class Surroundings(enum.Enum):
    """The transformations that a call is under."""

    NOTHING = enum.auto()
    """at most vmap: every value is known"""
    GRADIENTS = enum.auto()
    """reverse mode, and at most vmap besides: below the derivatives every value is known"""
    LINEARIZATIONS = enum.auto()
    """the same, or jax.linearize: a JAX that does not tell the two apart"""
    STAGING = enum.auto()
    """jit, scan, forward mode, ..., or a JAX that does not tell"""


if not _private.tells_traces:

    def current_trace() -> Any:
        """Return what JAX does with the operations that run now."""
        return None

    def without_batches(trace: Any) -> Any:
        """Return what is below the batches of a trace."""
        return object()  # not known, and so not the same as any other

    def tag_of_derivative() -> Any:
        """Return what the tracers of the innermost derivative are marked with; None if JAX does not tell."""
        return None

    def surroundings() -> Surroundings:
        """Return what surrounds the code that runs now."""
        return Surroundings.STAGING

    def has_one_derivative() -> bool:
        """Return True if one derivative in reverse mode is all that surrounds the call."""
        return False

    def may_be_batched() -> bool:
        """Return True if a vmap is next, but for derivatives, or may come later."""
        return True

    def is_recorded() -> bool:
        """Return True if operations are recorded, as within jit, and neither differentiated nor batched before that."""
        return False

    def is_known(x: Any) -> bool:
        """Return True if x is concrete, or a batch of concrete values."""
        return not is_tracer(x)

    def is_in_reverse_mode(arguments: Sequence[Array]) -> bool:
        """Return True if the innermost derivative is in reverse mode, and by some of these."""
        return False

else:

    def current_trace() -> Any:
        """Return what JAX does with the operations that run now."""
        return _private.trace_ctx.trace

    def without_batches(trace: Any) -> Any:
        """Return what is below the batches of a trace."""
        while isinstance(trace, _private.BatchTrace):
            trace = trace.parent_trace
        return trace

    def tag_of_derivative() -> Any:
        """Return what the tracers of the innermost derivative are marked with; None if JAX does not tell."""
        trace = _private.trace_ctx.trace
        while isinstance(trace, (_private.BatchTrace, _private.JaxprTrace)):
            trace = trace.parent_trace
        return getattr(trace, "tag", None)

    def surroundings() -> Surroundings:
        """Return what surrounds the code that runs now."""
        trace = _private.trace_ctx.trace
        while isinstance(trace, _private.JaxprTrace):  # what is known passes through it
            trace = trace.parent_trace
        if _has_known_values(trace):
            return Surroundings.NOTHING
        around = Surroundings.GRADIENTS
        while (below := _below(trace)) is not None:
            if not (isinstance(trace, _private.BatchTrace) or hasattr(trace, "is_vjp")):
                around = Surroundings.LINEARIZATIONS
            trace = below
        # With jax_custom_vjp3 a custom_vjp stages whatever it is given.
        known = isinstance(trace, _private.EvalTrace) and not getattr(jax.config, "jax_custom_vjp3", False)
        return around if known else Surroundings.STAGING

    def has_one_derivative() -> bool:
        """Return True if one derivative in reverse mode is all that surrounds the call."""
        trace = _private.trace_ctx.trace
        while isinstance(trace, _private.JaxprTrace):
            trace = trace.parent_trace
        return not isinstance(trace, _private.BatchTrace) and isinstance(_below(trace), _private.EvalTrace)

    def may_be_batched() -> bool:
        """Return True if a vmap is next, but for derivatives, or may come later."""
        trace = _private.trace_ctx.trace
        while isinstance(trace, (_private.LinearizeTrace, _private.JVPTrace, _private.JaxprTrace)):
            trace = trace.parent_trace
        return not isinstance(trace, _private.EvalTrace)

    def is_recorded() -> bool:
        """Return True if operations are recorded, as within jit, and neither differentiated nor batched before that."""
        return _private.types_tell_devices and type(_private.trace_ctx.trace) is _private.DynamicJaxprTrace

    def _below(trace: Any) -> Any:
        """Return the trace that a vmap or reverse mode is under; None for any other trace."""
        is_reverse_mode = isinstance(trace, _private.LinearizeTrace) and getattr(trace, "is_vjp", True)
        if is_reverse_mode or isinstance(trace, _private.BatchTrace):
            return trace.parent_trace
        if isinstance(trace, _private.JVPTrace):  # over a JaxprTrace it is reverse mode: JAX before 0.7
            below = trace.parent_trace
            return below.parent_trace if isinstance(below, _private.JaxprTrace) else None
        return None

    def is_known(x: Any) -> bool:
        """Return True if x is concrete, or a batch of concrete values."""
        return not is_tracer(x) or _has_known_values(x._trace)

    def _has_known_values(trace: Any) -> bool:
        return isinstance(without_batches(trace), _private.EvalTrace)

    def is_in_reverse_mode(arguments: Sequence[Array]) -> bool:
        """Return True if the innermost derivative is in reverse mode, and by some of these."""
        trace = without_batches(_private.trace_ctx.trace)
        is_reverse_mode = isinstance(trace, _private.LinearizeTrace) and getattr(trace, "is_vjp", False)
        return is_reverse_mode and any(map(is_perturbed, arguments))


# --- Tracers ----------------------------------------------------------------------------------------------------


def is_tracer(x: object) -> bool:
    """Return True if x stands for a value, rather than being one."""
    return isinstance(x, Tracer)


def is_reference(x: Any) -> bool:
    """Return True if x stands for a mutable array (jax.Ref), which can be neither returned nor copied."""
    return hasattr(x.aval, "inner_aval")


def is_differentiated(x: Any) -> bool | None:
    """Return True if a derivative is being taken of x; None if x is staged, for a later transformation decides."""
    if not is_tracer(x):
        return False
    if hasattr(x, "tangent"):
        return True
    contents = [is_differentiated(inner) for _, inner in x._contents()]
    return None if not contents or None in contents else any(contents)


def is_perturbed(x: Any) -> bool:
    """Return True if the innermost derivative is taken of x, which nothing stages."""
    while is_tracer(x) and hasattr(x, "batch_dim"):
        x = x.val
    if not hasattr(x, "tangent"):
        return False
    tag = tag_of_derivative()
    return tag is None or getattr(x._trace, "tag", tag) is tag


def perturbed_by_each_derivative(inputs: Sequence[Array]) -> list[list[bool]]:
    """Return for each derivative that surrounds the call, the innermost first, which inputs it is taken of."""
    trace, inputs = _private.trace_ctx.trace, list(inputs)
    found = []
    while trace is not None:
        own = [is_tracer(x) and getattr(x._trace, "tag", None) is getattr(trace, "tag", x) for x in inputs]
        if isinstance(trace, _private.BatchTrace):
            inputs = [x.val if is_own else x for x, is_own in zip(inputs, own, strict=True)]
        elif not isinstance(trace, (_private.JaxprTrace, _private.EvalTrace)):
            found.append(own)
            inputs = [x.primal if is_own else x for x, is_own in zip(inputs, own, strict=True)]
        trace = getattr(trace, "parent_trace", None)
    return found


def value_below_derivatives(x: Any) -> Any:
    """Return the value that a tracer of derivatives has; None if a vmap is in between, which has many."""
    while hasattr(x, "primal"):
        x = x.primal
    return None if is_tracer(x) else x


# --- What is read -----------------------------------------------------------------------------------------------


_NOT_REVERSIBLE = frozenset(["while"])
"""operations that have a derivative in forward mode alone, of which JAX says so when it transposes them"""


class _Watch(_private.Trace):  # type: ignore[misc]
    """Runs each operation as the trace below it does, on what `read` returns for its operands."""

    def __init__(
        self, parent_trace: Any, read: Callable[[Any], Any], made: Callable[[Any], Any],
        stopped: Callable[[list[Any]], list[Any]] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.parent_trace = parent_trace
        self.requires_low = getattr(parent_trace, "requires_low", False)
        self.read, self.made, self.stopped = read, made, stopped

    def _run(self, name: str, run: Callable[[Sequence[Any]], Any], operands: Sequence[Any]) -> Any:
        with _private.set_current_trace(self.parent_trace):  # in an operation the current trace is none
            operands = [self.read(x) for x in operands]
        try:
            if name in _NOT_REVERSIBLE and self.stopped is not None and any(map(is_differentiated, operands)):
                raise NotImplementedError
            results = run(operands)
        except (NotImplementedError, TransformationError, ValueError):  # as JAX says that there is no derivative
            if self.stopped is None or not any(map(is_differentiated, operands)):
                raise
            with _private.set_current_trace(self.parent_trace):
                operands = [jax.lax.stop_gradient(x) for x in operands]
            results = run(operands)
            with _private.set_current_trace(self.parent_trace):
                several = isinstance(results, (list, tuple))
                results = self.stopped(list(results) if several else [results])
                results = results if several else results[0]
        for result in results if isinstance(results, (list, tuple)) else [results]:
            self.made(result)
        return results

    def stage_value(self, value: Any) -> Any:
        return self._run("stage_value", lambda values: self.parent_trace.stage_value(*values), [value])

    def process_primitive(self, primitive: Any, operands: Sequence[Any], parameters: Any) -> Any:
        process = self.parent_trace.process_primitive
        return self._run(primitive.name, lambda xs: process(primitive, xs, parameters), operands)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, operands: Sequence[Any], **how: Any) -> Any:
        process = self.parent_trace.process_custom_jvp_call
        return self._run(primitive.name, lambda xs: process(primitive, fun, jvp, xs, **how), operands)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, forward: Any, backward: Any, operands: Sequence[Any], **how: Any
    ) -> Any:
        process = self.parent_trace.process_custom_vjp_call
        return self._run(primitive.name, lambda xs: process(primitive, fun, forward, backward, xs, **how), operands)


@contextlib.contextmanager
def watching(
    read: Callable[[Any], Any], made: Callable[[Any], Any] = id,
    stopped: Callable[[list[Any]], list[Any]] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Put `read(x)` in the place of each tensor x that an operation reads, and tell `made` of its results.

    Operations that have no derivative run on values, and `stopped` returns what is to stand for their results.
    """
    with _private.set_current_trace(_Watch(_private.trace_ctx.trace, read, made, stopped)):
        yield


def lowered(x: Any) -> Any:
    """Return what a tracer stands for at the derivatives that are still being taken."""
    tags, trace = set(), _private.trace_ctx.trace
    while trace is not None:
        tags.add(id(getattr(trace, "tag", None)))
        trace = getattr(trace, "parent_trace", None)
    while hasattr(x, "primal") and id(getattr(x._trace, "tag", None)) not in tags:
        x = x.primal
    return x


# --- Functions as jaxprs ----------------------------------------------------------------------------------------


class Jaxpr(NamedTuple):
    """A jaxpr to which the tracers that it captured are given as arguments."""

    jaxpr: Any
    constants: list[Any]
    captured_at: list[int]

    def __call__(self, captured: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
        return list(jax.core.eval_jaxpr(self.jaxpr, self.constants_with(captured), *arguments))

    def constants_with(self, captured: Sequence[Array]) -> list[Array]:
        """Return the constants, with these tracers in the places of those that were captured."""
        constants = list(self.constants)
        for at, tracer in zip(self.captured_at, captured, strict=True):
            constants[at] = tracer
        return constants

    @property
    def constvars(self) -> list[Any]:
        """The variables of the constants, which JAX since 0.11 has among the arguments."""
        return [*self.jaxpr.constvars, *self.jaxpr.invars][: len(self.constants)]

    @property
    def invars(self) -> list[Any]:
        """The variables of the arguments."""
        return [*self.jaxpr.constvars, *self.jaxpr.invars][len(self.constants) :]

    @property
    def references(self) -> list[Any]:
        """The types of the mutable arrays that it reads or writes, and that it did not make itself."""
        return [v.aval for v in (*self.constvars, *self.invars) if is_reference(v)]

    def only(self, results: Sequence[int]) -> Jaxpr:
        """Return the same function with some of its results."""
        jaxpr = self.jaxpr
        outer = [jaxpr.outvars[at] for at in results]
        return self._replace(jaxpr=part_of(jaxpr, self.constvars, self.invars, outer, jaxpr.eqns))

    def depends_on_all(self, results: int) -> bool:
        """Return True if each of the first results is made of every argument."""
        arguments = {*self.invars, *(self.constvars[at] for at in self.captured_at)}
        for at in range(results):
            needed = {self.jaxpr.outvars[at]}
            if not isinstance(self.jaxpr.outvars[at], Literal):
                for eqn in reversed(self.jaxpr.eqns):
                    if not needed.isdisjoint(eqn.outvars):
                        needed.update(v for v in eqn.invars if not isinstance(v, Literal))
            if not arguments <= needed:
                return False
        return True


def equations_for(wanted: Sequence[Any], equations: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the equations that compute wanted, and the others."""
    needed = {v for v in wanted if not isinstance(v, Literal)}
    first: list[Any] = []
    second: list[Any] = []
    for eqn in reversed(equations):
        part = second
        if not needed.isdisjoint(eqn.outvars):
            part = first
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        part.append(eqn)
    return first[::-1], second[::-1]


def part_of(
    jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], results: Sequence[Any], equations: Any
) -> Any:
    """Return a part of a jaxpr, as one."""
    names = {"arg_names": ("",) * len(arguments), "result_paths": ("",) * len(results)}  # which JAX counts
    return jaxpr.replace(
        constvars=list(constants), invars=list(arguments), outvars=list(results), eqns=list(equations),
        effects=set().union(*(eqn.effects for eqn in equations)),
        debug_info=jaxpr.debug_info and jaxpr.debug_info._replace(**names),
    )  # fmt: skip


if not _private.has_trace_to_jaxpr:

    def _make_jaxpr(function: Callable[..., Sequence[Array]], types: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return function's jaxpr for arguments of these types, and its constants."""
        closed = jax.make_jaxpr(function)(*types)
        return closed.jaxpr, list(closed.consts)

else:

    def _make_jaxpr(function: Callable[..., Sequence[Array]], types: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return function's jaxpr for arguments of these types, and its constants."""
        flat = _private.wrap_init(function, debug_info=_private.debug_info_of(len(types)))
        jaxpr, _, constants = _private.trace_to_jaxpr_dynamic(flat, types)
        return jaxpr, constants


def _forgotten_if_it_fails(function: Callable[..., Sequence[Array]]) -> Callable[..., Sequence[Array]]:
    """Return the same function. If it raises while JAX traces it, it empties the trace, which JAX keeps."""

    @functools.wraps(function)
    def traced(*arguments: Array) -> Sequence[Array]:
        try:
            return function(*arguments)
        except BaseException:
            if hasattr(trace := current_trace(), "invalidate"):
                trace.invalidate()
            raise

    return traced


def jaxpr_of(
    function: Callable[..., Sequence[Array]], types: Sequence[Any], known: Sequence[Array] = ()
) -> tuple[Jaxpr, list[Array]]:
    """Return function's jaxpr for arguments of these types, and the tracers and known tensors that it captured."""
    jaxpr, constants = _make_jaxpr(_forgotten_if_it_fails(function), types)
    ids = {id(x) for x in known}
    captured_at = [at for at, constant in enumerate(constants) if is_tracer(constant) or id(constant) in ids]
    captured = [constants[at] for at in captured_at]
    for at in captured_at:
        constants[at] = None
    return Jaxpr(jaxpr, constants, captured_at), captured


def holds_constants(jaxpr: Any, ids: Collection[int]) -> bool:
    """Return True if a function that a jaxpr calls holds one of these tensors, as those compiled by jax.jit do."""
    inner = [x for eqn in jaxpr.eqns for parameter in eqn.params.values()
             for x in (parameter if isinstance(parameter, (list, tuple)) else [parameter])]  # fmt: skip
    closed = [x for x in inner if isinstance(x, ClosedJaxpr)]
    return any(id(c) in ids for x in closed for c in x.consts) or any(holds_constants(x.jaxpr, ids) for x in closed)


def captured_so_far() -> list[Array] | None:
    """Return the tracers that the function has captured which is being traced now; None if JAX does not tell."""
    frame = getattr(current_trace(), "frame", None)
    constants = getattr(frame, "constvar_to_val", None)
    if constants is None:
        return None
    values = [getattr(c, "canonical", c) for c in list(constants.values())]  # a pair in JAX 0.7.2 to 0.9.0
    return [c for c in values if is_tracer(c)]


def captured_by(
    function: Callable[[Sequence[Array]], Sequence[Array | None]], arguments: Sequence[Array]
) -> list[Array]:
    """Return the tracers that function captures."""
    return jaxpr_of(lambda *xs: [y for y in function(xs) if y is not None], [x.aval for x in arguments])[1]
