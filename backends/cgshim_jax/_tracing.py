"""What JAX is doing around a call, and functions traced with all that they capture."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

import jax
from jax.core import Tracer
from jax.errors import ConcretizationTypeError, TracerArrayConversionError
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from cgshim_jax import _private

Array = Any


class NeedsValuesError(Exception):
    """A rule that was traced reads values."""


def reads_a_value(error: BaseException | None) -> bool:
    """Return True for what JAX raises where Python or NumPy reads a value that a tracer does not
    have, and for a library's own words about it.
    """
    kinds = (ConcretizationTypeError, TracerArrayConversionError, NeedsValuesError)
    return error is not None and (isinstance(error, kinds) or reads_a_value(error.__cause__))


# --- What surrounds a call ------------------------------------------------------------------------


class Surroundings(enum.Enum):
    """The transformations that a call is under."""

    NOTHING = enum.auto()
    """at most vmap: every value is known"""
    ONE_GRADIENT = enum.auto()
    """one derivative, in reverse mode, or by a JAX that does not tell the modes apart"""
    ONE_DERIVATIVE = enum.auto()
    """one derivative, and around it vmap perhaps"""
    DERIVATIVES = enum.auto()
    """derivatives, and vmap perhaps: below them every value is known"""
    STAGING = enum.auto()
    """jit, scan, ..., or a JAX that does not tell"""


_LEVELS = (_private.BatchTrace, _private.LinearizeTrace, _private.JVPTrace, _private.JaxprTrace)


def current_trace() -> Any:
    """Return what JAX does with the operations that run now."""
    return _private.trace_ctx.trace


def without_batches(trace: Any) -> Any:
    """Return what is below the batches of a trace."""
    while isinstance(trace, _private.BatchTrace):
        trace = trace.parent_trace
    return trace


def surroundings() -> Surroundings:
    """Return what surrounds the code that runs now."""
    trace, levels = current_trace(), []
    while isinstance(trace, (*_LEVELS, _Watch)):
        if not isinstance(trace, (_private.JaxprTrace, _Watch)):  # what is known passes through it
            levels.append(trace)
        trace = trace.parent_trace
    if not isinstance(trace, _private.EvalTrace):
        return Surroundings.STAGING
    is_batch = [isinstance(level, _private.BatchTrace) for level in levels]
    if all(is_batch):
        return Surroundings.NOTHING
    if len(levels) == 1 and _may_be_reverse_mode(levels[0]):
        return Surroundings.ONE_GRADIENT
    is_one = not is_batch[0] and all(is_batch[1:])
    return Surroundings.ONE_DERIVATIVE if is_one else Surroundings.DERIVATIVES


def _may_be_reverse_mode(trace: Any) -> bool:
    if isinstance(trace, _private.JVPTrace):  # over a JaxprTrace it is reverse mode: JAX before 0.7
        return isinstance(trace.parent_trace, _private.JaxprTrace)
    return getattr(trace, "is_vjp", True)


def is_known(x: Any) -> bool:
    """Return True if x is concrete, or a batch of concrete values."""
    return not is_tracer(x) or isinstance(without_batches(x._trace), _private.EvalTrace)


# --- Tracers --------------------------------------------------------------------------------------


def is_tracer(x: object) -> bool:
    """Return True if x stands for a value, rather than being one."""
    return isinstance(x, Tracer)


def is_reference(x: Any) -> bool:
    """Return True if x stands for a mutable array (jax.Ref), which can be neither returned nor
    copied.
    """
    return hasattr(getattr(x, "aval", None), "inner_aval")


def is_differentiated(x: Any) -> bool | None:
    """Return True if a derivative is being taken of x; None if x is staged, for a later
    transformation decides, or an argument of a linear function that is transposed.
    """
    if not is_tracer(x):
        return False
    if hasattr(x, "tangent"):
        return True
    if hasattr(x, "pval"):
        return is_differentiated(x.pval.get_known()) if x.pval.is_known() else None
    contents = [is_differentiated(inner) for _, inner in x._contents()]
    return None if not contents or None in contents else any(contents)


def perturbed_by_each_derivative(inputs: Sequence[Array]) -> list[tuple[int, ...]]:
    """Return for each derivative the places of the inputs that it is taken of."""
    places: dict[int, list[int]] = {}
    x: Any
    for at, x in enumerate(inputs):
        while is_tracer(x):
            if hasattr(x, "primal"):
                places.setdefault(id(x._trace.tag), []).append(at)  # all tags are equal
            x = x.primal if hasattr(x, "primal") else getattr(x, "val", None)
    return [tuple(each) for each in places.values()]


def value_below_derivatives(x: Any) -> Any:
    """Return the value that a tracer of derivatives has; None if a vmap is in between, which has
    many.
    """
    while hasattr(x, "primal"):
        x = x.primal
    return None if is_tracer(x) else x


# --- What is read ---------------------------------------------------------------------------------


class _Watch(_private.Trace):  # type: ignore[misc]
    """Runs each operation as the trace below it does, on what `read` returns for its operands."""

    def __init__(self, parent_trace: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.parent_trace = parent_trace
        self.requires_low = getattr(parent_trace, "requires_low", False)
        self.read = read

    def __getattr__(self, name: str) -> Any:
        # how it takes a shard_map, or what a reference holds
        return getattr(self.parent_trace, name)

    def read_each(self, operands: Sequence[Any]) -> list[Any]:
        # in an operation the current trace is none
        with _private.set_current_trace(self.parent_trace):
            return [self.read(x) for x in operands]

    def stage_value(self, value: Any) -> Any:
        return self.parent_trace.stage_value(*self.read_each([value]))

    def process_primitive(self, primitive: Any, operands: Sequence[Any], parameters: Any) -> Any:
        return self.parent_trace.process_primitive(primitive, self.read_each(operands), parameters)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, operands: Sequence[Any], **how: Any
    ) -> Any:
        return self.parent_trace.process_custom_jvp_call(
            primitive, fun, jvp, self.read_each(operands), **how
        )

    def process_custom_vjp_call(
        self,
        primitive: Any,
        fun: Any,
        forward: Any,
        backward: Any,
        operands: Sequence[Any],
        **how: Any,
    ) -> Any:
        return self.parent_trace.process_custom_vjp_call(
            primitive, fun, forward, backward, self.read_each(operands), **how
        )


class _Calls(_Watch):
    """Leaves in a jaxpr the calls of compiled functions, such as all of jax.numpy, that JAX would
    inline.
    """

    def process_primitive(self, primitive: Any, operands: Sequence[Any], parameters: Any) -> Any:
        if "inline" in parameters:
            parameters = {**parameters, "inline": _private.not_inlined}
        return self.parent_trace.process_primitive(primitive, operands, parameters)


def keeping_calls() -> Any:
    """Return a context in which a jaxpr is made that is to be differentiated eagerly, operation by
    operation.

    JAX remembers the derivative of a compiled function, and of other operations it makes it anew
    each time.
    """
    return _private.set_current_trace(_Calls(current_trace(), lambda x: x))


class _Linear(_Watch):
    """Runs in a linear function the function of a jax.custom_jvp in the place of its rule, as JAX
    does where it linearizes by itself.

    JAX transposes that function (0.10 cannot transpose one with its rule), also one in a call of a
    compiled function.
    """

    def process_primitive(self, primitive: Any, operands: Sequence[Any], parameters: Any) -> Any:
        if "inline" in parameters and _has_rules(parameters["jaxpr"].jaxpr):
            with _private.set_current_trace(self):
                return eval_jaxpr(parameters["jaxpr"], operands)
        return super().process_primitive(primitive, operands, parameters)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, operands: Sequence[Any], **how: Any
    ) -> Any:
        with _private.set_current_trace(self):
            return fun.call_wrapped(*operands)


def _has_rules(jaxpr: Any) -> bool:
    """Return True if a jaxpr calls a jax.custom_jvp, or a compiled function that does."""
    return any(
        eqn.primitive.name == "custom_jvp_call"
        or ("inline" in eqn.params and _has_rules(eqn.params["jaxpr"].jaxpr))
        for eqn in jaxpr.eqns
    )


def in_linear_function() -> Any:
    """Return a context in which JAX makes a linear function, which it transposes."""
    return _private.set_current_trace(_Linear(current_trace(), lambda x: x))


def watching(read: Callable[[Any], Any]) -> Any:
    """Return a context in which each operation reads `read(x)` where it would read x."""
    return _private.set_current_trace(_Watch(current_trace(), read))


@contextlib.contextmanager
def revived(tracers: Sequence[Any]) -> Iterator[None]:
    """Let operations have tracers of derivatives that are over, for which a watch reads others.

    From 0.11 on JAX invalidates the trace of jax.grad at its end, as that of jax.jit, and refuses
    its tracers before the current trace gets an operation.
    """
    traces: list[Any] = []
    for x in tracers:
        while hasattr(x, "primal"):
            traces.append(x._trace)
            x = x.primal
    over = [trace for trace in traces if getattr(trace, "_invalidated", False)]
    for trace in over:
        trace._invalidated = False
    try:
        yield
    finally:
        for trace in over:
            trace._invalidated = True


def as_read(tensors: Sequence[Array]) -> Sequence[Array]:
    """Return what an operation of these tensors would read."""
    trace = current_trace()
    while isinstance(trace, _Watch):
        tensors, trace = trace.read_each(tensors), trace.parent_trace
    return tensors


def lowered(x: Any) -> Any:
    """Return what a tracer stands for at the derivatives that are still being taken."""
    tags, trace = set(), current_trace()
    while trace is not None:
        tags.add(id(getattr(trace, "tag", None)))
        trace = getattr(trace, "parent_trace", None)
    while hasattr(x, "primal") and id(getattr(x._trace, "tag", None)) not in tags:
        x = x.primal
    return x


# --- Functions as jaxprs --------------------------------------------------------------------------


def eval_jaxpr(jaxpr: ClosedJaxpr, operands: Sequence[Array]) -> list[Array]:
    """Return the results of a jaxpr."""
    return list(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *operands))


def equations_for(wanted: Sequence[Any], equations: Sequence[Any]) -> list[Any]:
    """Return the equations that compute wanted."""
    needed = {v for v in wanted if not isinstance(v, Literal)}
    computing = []
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            computing.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return computing[::-1]


def part_of(
    whole: ClosedJaxpr, arguments: Sequence[Any], results: Sequence[Any], equations: Sequence[Any]
) -> ClosedJaxpr:
    """Return a part of a jaxpr, as one; a constant of the whole may be an argument of the part."""
    # which JAX counts
    names = {"arg_names": ("",) * len(arguments), "result_paths": ("",) * len(results)}
    jaxpr, given = whole.jaxpr, set(arguments)
    constants = {v: c for v, c in zip(jaxpr.constvars, whole.consts, strict=True) if v not in given}
    part = jaxpr.replace(
        constvars=list(constants), invars=list(arguments), outvars=list(results), eqns=list(equations),
        effects=set().union(*(eqn.effects for eqn in equations)),
        debug_info=jaxpr.debug_info and jaxpr.debug_info._replace(**names),
    )  # fmt: skip
    return ClosedJaxpr(part, list(constants.values()))


def code_of(f: Callable[..., Any]) -> Any:
    """Return what two functions have in common that were made by one definition."""
    while isinstance(f, functools.partial):
        f = f.func
    f = inspect.unwrap(f)
    return getattr(f, "__code__", type(f))


@functools.lru_cache(maxsize=256)
def _debug_info(code: Any, arguments: int) -> Any:
    """Return what JAX's messages say of a function with this code, and of its arguments: JAX reads
    it off a function, here off one without a closure.
    """
    if isinstance(code, CodeType):
        code = FunctionType(code, {}, closure=tuple(CellType() for _ in code.co_freevars))
    return _private.debug_info("op_custom_gradient", code, (0,) * arguments, {})


def _make_jaxpr(
    function: Callable[..., Sequence[Array]], types: Sequence[Any], author: Callable[..., Any]
) -> ClosedJaxpr:
    """Return function's jaxpr for arguments of these types."""
    if _private.debug_info is None or _private.trace_to_jaxpr_dynamic is None:
        return jax.make_jaxpr(function)(*types)
    flat = _private.wrap_init(function, debug_info=_debug_info(code_of(author), len(types)))
    jaxpr, _, constants = _private.trace_to_jaxpr_dynamic(flat, types)
    return ClosedJaxpr(jaxpr, constants)


def _forgotten_if_it_fails(
    function: Callable[..., Sequence[Array]],
) -> Callable[..., Sequence[Array]]:
    """Return the same function. If it raises while JAX traces it, it empties the trace, which JAX
    keeps.
    """

    def traced(*arguments: Array) -> Sequence[Array]:
        try:
            return function(*arguments)
        except BaseException:
            if hasattr(trace := current_trace(), "invalidate"):
                trace.invalidate()
            raise

    return traced


def jaxpr_of(
    function: Callable[..., Sequence[Array]], types: Sequence[Any], known: Sequence[Array] = (),
    author: Callable[..., Any] | None = None,
) -> tuple[ClosedJaxpr, list[Array]]:  # fmt: skip
    """Return function's jaxpr for arguments of these types, and the tracers and known tensors that
    it captured, which are its last arguments.

    JAX's messages speak of the author's function.
    """
    whole = _make_jaxpr(_forgotten_if_it_fails(function), types, author or function)
    if not whole.consts:
        return whole, []
    jaxpr, ids = whole.jaxpr, {id(x) for x in known}
    captured = {
        v: constant
        for v, constant in zip(jaxpr.constvars, whole.consts, strict=True)
        if is_tracer(constant) or id(constant) in ids
    }
    part = part_of(whole, [*jaxpr.invars, *captured], jaxpr.outvars, jaxpr.eqns)
    return part, list(captured.values())


def holds_constants(jaxpr: Any, ids: Collection[int]) -> bool:
    """Return True if a function that a jaxpr calls holds one of these tensors, as those compiled by
    jax.jit do.
    """
    inner = [x for eqn in jaxpr.eqns for parameter in eqn.params.values()
             for x in (parameter if isinstance(parameter, (list, tuple)) else [parameter])]  # fmt: skip
    closed = [x for x in inner if isinstance(x, ClosedJaxpr)]
    return any(id(c) in ids for x in closed for c in x.consts) or any(
        holds_constants(x.jaxpr, ids) for x in closed
    )


def captured_so_far() -> list[Array]:
    """Return the tracers that the function has captured which is being traced now."""
    values = [
        getattr(c, "canonical", c) for c in list(current_trace().frame.constvar_to_val.values())
    ]
    return [c for c in values if is_tracer(c)]  # a pair in JAX 0.7.2 to 0.9.0


def primitive(
    name: str, evaluate: Callable[..., Any], types: Callable[..., Any], jvp: Callable[..., Any],
    batch: Callable[..., Any], lower: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Return a new primitive with any number of results."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(types)
    made.def_impl(evaluate)
    ad.primitive_jvps[made] = jvp
    batching.fancy_primitive_batchers[made] = batch
    mlir.register_lowering(made, lower or mlir.lower_fun(evaluate, multiple_results=True))
    return made
