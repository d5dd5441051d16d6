"""What JAX is doing around a call, and functions traced with all that they capture."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import Literal

from cgshim_jax import _private

Array = Any


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

    def is_recorded() -> bool:
        """Return True if operations are recorded, as within jit, and neither differentiated nor batched before that."""
        return False

    def is_known(x: Any) -> bool:
        """Return True if x is concrete, or a batch of concrete values."""
        return not is_tracer(x)

    def is_in_reverse_mode(arguments: Sequence[Array]) -> bool:
        """Return True if the innermost transformation is reverse mode, and by some of these."""
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
        """Return True if the innermost transformation is reverse mode, and by some of these."""
        trace = _private.trace_ctx.trace
        is_reverse_mode = isinstance(trace, _private.LinearizeTrace) and getattr(trace, "is_vjp", False)
        return is_reverse_mode and any(getattr(x, "_trace", None) is trace for x in arguments)


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


def value_of(x: Any) -> Any:
    """Return the concrete value below a tracer's derivatives and batches (as one of its axes); None if unknown."""
    while is_tracer(x):
        x = getattr(x, "primal", None) if hasattr(x, "primal") else getattr(x, "val", None)
        if not (is_tracer(x) or hasattr(x, "dtype")):
            return None
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


def jaxpr_of(function: Callable[..., Sequence[Array]], types: Sequence[Any]) -> tuple[Jaxpr, list[Array]]:
    """Return function's jaxpr for arguments of these types, and the tracers that it captured."""
    jaxpr, constants = _make_jaxpr(_forgotten_if_it_fails(function), types)
    captured_at = [at for at, constant in enumerate(constants) if is_tracer(constant)]
    captured = [constants[at] for at in captured_at]
    for at in captured_at:
        constants[at] = None
    return Jaxpr(jaxpr, constants, captured_at), captured


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
