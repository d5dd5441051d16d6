"""Is a rule linear in its upstream gradients? JAX knows which operations it can transpose: those
are linear.

But its transposition is no check: it drops constant terms, and gives zeros for a cast to integers,
without a word. A walk over the rule's jaxpr finds these, and names the operation that JAX could not
transpose.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import ad

from cgshim.backend import CustomGradientError
from cgshim_jax import _private
from cgshim_jax._tracing import Array, equations_for, eval_jaxpr, is_tracer, jaxpr_of

Form = enum.IntEnum("Form", ["ZERO", "CONSTANT", "LINEAR"], start=0)
"""how a value depends on the upstream gradients"""
ZERO, CONSTANT, LINEAR = Form

_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
"""linear in each operand"""

_SUMS = frozenset({"add", "sub", "add_any", "concatenate", "stack", "pad", "complex"})
"""linear in all operands together"""

_TOGETHER = {
    "dynamic_update_slice": (0, 1), "scatter": (0, 2), "scatter-add": (0, 2), "scatter-sub": (0, 2),
    "div": (0,), "triangular_solve": (1,),
}  # fmt: skip
"""linear in these operands together, the rest being constant"""

_ONE_BY_ONE = frozenset({"optimization_barrier", "psum", "psum2", "psum_invariant", "device_put"})
"""whose operands become results one by one"""

_OPAQUE = frozenset({"while", "pure_callback", "io_callback", "ffi_call"})
"""for which JAX's transposition is an error, though they may be linear"""

_MANY = 1_000_000
"""how large a constant may be that is searched for what is not zero"""


_NOT_TRANSPOSABLE = (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""what JAX raises for what is not linear, each primitive in its own way"""


class NotLinearError(Exception):
    """A rule is not linear in its upstream gradients; the message says why."""


class NotSeenError(NotLinearError):
    """Nobody sees if a rule is linear."""


def require_linear(jaxpr: ClosedJaxpr, captured: int = 0) -> None:
    """Raise the error if a jaxpr has a constant term, or an operation of its arguments that JAX
    cannot transpose; so many of the arguments, the last ones, are what it captured.
    """
    arguments = [LINEAR] * (len(jaxpr.in_avals) - captured) + [CONSTANT] * captured
    if CONSTANT in _inside(jaxpr, arguments):
        raise NotLinearError("a constant one")


def require_linear_op(op: Any, picked: Sequence[int]) -> None:
    """Raise the error if an op is not linear in these arguments."""
    _of_op(op, [LINEAR if at in picked else CONSTANT for at in range(len(op.f.in_avals))])


def transposed_if_linear(
    fn: Callable[..., Any], types: Sequence[Any], cotangents: Sequence[Array],
    refuse: Callable[[str, bool], NoReturn],
) -> list[Array]:  # fmt: skip
    """Return the transpose of a linear function of tensors of these types, applied to cotangents.

    refuse takes what is not linear in it, and whether that was seen or JAX does not know.
    """
    jaxpr, captured = jaxpr_of(fn, types)
    try:
        require_linear(jaxpr, len(captured))
        transpose = jax.linear_transpose(lambda *xs: eval_jaxpr(jaxpr, [*xs, *captured]), *types)
        return list(transpose(list(cotangents)))
    except CustomGradientError:  # an op in the function says more exactly what it refuses
        raise
    except NotLinearError as error:
        refuse(str(error), True)
    except _NOT_TRANSPOSABLE:
        refuse("one that JAX cannot transpose", False)


def calls(jaxpr: Any, is_wanted: Callable[[Any], bool]) -> bool:
    """Return True if a jaxpr has such an operation, at any depth."""
    for eqn in jaxpr.eqns:
        inside = [_jaxpr_in(eqn), *eqn.params.get("branches", ())]
        if is_wanted(eqn) or any(
            calls(getattr(inner, "jaxpr", inner), is_wanted)
            for inner in inside
            if inner is not None
        ):
            return True
    return False


def _form_of(constant: Any) -> Form:
    """Return ZERO for a constant that is known to be zero everywhere, else CONSTANT."""
    # JAX 0.7.2 has arrays of its own in a trace, which are neither NumPy's nor jax.Array
    is_known = isinstance(constant, (int, float, complex)) or hasattr(constant, "__array__")
    if (
        not is_known
        or is_tracer(constant)
        or not jnp.issubdtype(jnp.result_type(constant), jnp.number)
    ):
        return CONSTANT
    return CONSTANT if np.size(constant) > _MANY or np.asarray(constant).any() else ZERO


def _forms_of_results(
    jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Form]
) -> list[Form]:
    variables = [*jaxpr.constvars, *jaxpr.invars]
    forms: dict[Any, Any] = dict(
        zip(variables, [*map(_form_of, constants), *arguments], strict=True)
    )

    def read(v: Any) -> Form:
        return _form_of(v.val) if isinstance(v, Literal) else forms[v]

    for eqn in equations_for(jaxpr.outvars, jaxpr.eqns):
        is_float = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars]
        try:
            after: Sequence[Any] = _forms_after(eqn, [*map(read, eqn.invars)])
        except NotLinearError as error:
            if isinstance(error, NotSeenError) or any(is_float):
                raise
            after = [error] * len(is_float)
        for v, form, floats in zip(eqn.outvars, after, is_float, strict=True):
            forms[v] = form if floats or form is not LINEAR else _as_integer(eqn)
    return [*map(read, jaxpr.outvars)]


def _as_integer(eqn: Any) -> NotLinearError:
    """Return the error for who makes a float of an integer or a bool that was made of upstream."""
    name = eqn.primitive.name
    return NotLinearError(
        "a cast to integers" if name == "convert_element_type" else f"{name} of upstream"
    )


def _forms_after(eqn: Any, operands: list[Form]) -> list[Form]:
    """Return the forms of an operation's results."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == "scan":
        return _of_scan(eqn.params, operands)
    if name == "cond":
        branches = [_inside(branch, operands[1:]) for branch in eqn.params["branches"]]
        _refuse_integers(operands[:1])
        return [_sum(each) for each in zip(*branches, strict=True)]
    if name == "cgshim_op":
        return _of_op(eqn.params["op"], operands)
    inner = _jaxpr_in(eqn)
    if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(operands):
        return _inside(inner, operands)
    if name in _ONE_BY_ONE and len(operands) == count:
        return operands
    if name not in _OPAQUE:
        _refuse_integers(operands)
    if summed := _summed_at(eqn, len(operands)):
        if any(form is LINEAR and at not in summed for at, form in enumerate(operands)):
            raise NotLinearError(f"{name} of upstream")
        return [_sum([operands[at] for at in summed])] * count
    is_transposable = name not in (*_OPAQUE, "cgshim_attached") and (
        eqn.primitive in ad.primitive_transposes or eqn.primitive in _private.fancy_transposes
    )
    if name in _PRODUCTS and ZERO in operands:
        return [ZERO] * count
    if {*operands} <= {ZERO, CONSTANT}:  # what else JAX transposes is linear in its first operand
        return [ZERO if is_transposable and operands[:1] == [ZERO] else CONSTANT] * count
    if not is_transposable or (name in _PRODUCTS and operands.count(LINEAR) > 1):
        error = NotSeenError if name in _OPAQUE else NotLinearError
        raise error(f"{name} of upstream")
    return [LINEAR] * count


def _summed_at(eqn: Any, count: int) -> Sequence[int]:
    """Return the places of the operands in which an operation is linear together; none if there is
    more to it.
    """
    name = eqn.primitive.name
    if name in _TOGETHER:
        return _TOGETHER[name]
    if name == "select_n":
        return range(1, count)
    if name == "custom_linear_solve":
        return range(sum(eqn.params["const_lengths"]), count)
    if name == "cgshim_transposed":
        return range(len(eqn.params["linear"].reads), count)
    return range(count) if name in _SUMS else ()


def _sum(operands: Sequence[Form]) -> Form:
    """Return the form of a sum, or of a value that is one of these. A constant plus something
    linear is not linear.
    """
    _refuse_integers(operands)
    if CONSTANT in operands and LINEAR in operands:
        raise NotLinearError("one with a constant part")
    return max(operands)


def _refuse_integers(operands: Sequence[Any]) -> None:
    for form in operands:
        if isinstance(form, NotLinearError):
            raise form


# --- Operations with jaxprs inside ----------------------------------------------------------------


def _jaxpr_in(eqn: Any) -> Any:
    """Return the jaxpr that an operation runs once, if it has one."""
    return next(
        (eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None
    )


def _inside(inner: Any, operands: Sequence[Form]) -> list[Form]:
    jaxpr = getattr(inner, "jaxpr", inner)
    constants = getattr(inner, "consts", None) or [None] * len(jaxpr.constvars)
    return _forms_of_results(jaxpr, constants, operands)


def _of_op(op: Any, operands: list[Form]) -> list[Form]:
    """Return the forms of an op's results: what JAX cannot look into is as linear as its rule says."""
    try:
        return _inside(op.f, operands)
    except NotSeenError:
        op.transposed(op.f.in_avals, [at for at, form in enumerate(operands) if form is LINEAR])
        return [LINEAR for _ in op.f.out_avals]


def _of_scan(parameters: Any, operands: Sequence[Form]) -> list[Form]:
    """Return the forms that a loop's values have after any number of steps."""
    constants, carry, scanned = _private.parts_of_scan(parameters, operands)
    while True:
        results = _inside(parameters["jaxpr"], [*constants, *carry, *scanned])
        # a scan has more results
        after = [_sum(pair) for pair in zip(carry, results, strict=False)]
        if after == list(carry):
            return results
        carry = after
