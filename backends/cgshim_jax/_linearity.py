"""Is a rule linear in its upstream gradients? A walk over its jaxpr tells, from what is known of each primitive.

JAX's own transposition is no check: it drops constant terms silently.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from cgshim_jax import _private
from cgshim_jax._tracing import is_tracer

if TYPE_CHECKING:
    from cgshim_jax._tracing import Jaxpr


class Linearity(NamedTuple):
    """What a walk over a rule's jaxpr has found. A rule may be neither seen to be linear, nor seen not to be."""

    is_linear: bool
    """True if every operation is known to be linear"""
    operation: str | None
    """the words for an operation that is known not to be linear, if there is one"""


class Form(enum.IntEnum):
    """How a value depends on the upstream gradients."""

    ZERO = 0
    CONSTANT = 1
    LINEAR = 2
    UNKNOWN = 3
    NONLINEAR = 4


ZERO, CONSTANT, LINEAR, UNKNOWN, NONLINEAR = Form

_SUMS = frozenset({
    "add", "sub", "add_any", "concatenate", "stack", "pad", "psum_invariant", "complex",
})  # fmt: skip
"""linear in all operands together"""

_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
"""linear in each operand"""

_IN_FIRST = frozenset({
    "neg", "convert_element_type", "reduce_precision", "real", "imag", "conj", "copy", "copy_p", "name",
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "slice", "dynamic_slice", "gather",
    "reduce_sum", "cumsum", "reduce_window_sum", "fft", "div", "split", "unstack", "device_put", "sharding_constraint",
    "optimization_barrier", "psum", "psum2", "pvary", "pbroadcast", "ppermute", "all_gather", "all_to_all",
    "reduce_scatter", "psum_scatter", "all_gather_invariant", "mesh_cast", "reshard", "layout_constraint",
    "scatter-mul", "tile",
})  # fmt: skip
"""linear in the first operand (or in all, where they have nothing to do with each other), the rest being constant"""

_TOGETHER = frozenset({"optimization_barrier", "psum", "psum2", "psum_invariant", "device_put"})
"""operands that become results one by one"""

_UPDATES = {"dynamic_update_slice": (0, 1), "scatter": (0, 2), "scatter-add": (0, 2), "scatter-sub": (0, 2)}
"""linear in these operands together, the rest being constant"""

_NONLINEAR = frozenset({
    "stop_gradient", "sign", "round", "floor", "ceil", "abs", "max", "min", "clamp", "exp", "exp2", "log", "log1p",
    "expm1", "sqrt", "rsqrt", "cbrt", "square", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan",
    "atan2", "asinh", "acosh", "atanh", "logistic", "erf", "erfc", "erf_inv", "lgamma", "digamma", "pow", "rem",
    "nextafter", "sort", "top_k", "approx_top_k", "argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod",
    "cummax", "cummin", "cumprod", "cumlogsumexp", "reduce_and", "reduce_or", "eq", "ne", "lt", "le", "gt", "ge",
    "eq_to", "lt_to", "le_to", "is_finite", "and", "or", "not", "xor", "cholesky", "eigh", "eig", "svd", "qr", "lu",
    "schur", "pure_callback", "scatter-max", "scatter-min", "io_callback", "bitcast_convert_type",
    "reduce_window_max", "reduce_window_min",
})  # fmt: skip
"""not linear in any operand"""


def linearity_of(jaxpr: Jaxpr) -> Linearity:
    """Find out if a jaxpr is linear in its arguments. A constant whose value is not known is None."""
    walk = _Walk()
    forms = walk(jaxpr.jaxpr, [*map(_form_of, jaxpr.constants)], [LINEAR] * len(jaxpr.invars))
    if CONSTANT in forms:
        return Linearity(False, "a constant one")
    if NONLINEAR in forms:
        return Linearity(False, walk.operation)
    return Linearity(UNKNOWN not in forms, None)


def _form_of(constant: Any) -> Form:
    """Return ZERO for a constant that is known to be zero everywhere, else CONSTANT."""
    is_known = isinstance(constant, (bool, int, float, complex, np.ndarray, np.generic, jax.Array))
    if not is_known or is_tracer(constant) or not jnp.issubdtype(jnp.result_type(constant), jnp.number):
        return CONSTANT
    return CONSTANT if np.size(constant) > _MANY or np.asarray(constant).any() else ZERO


_MANY = 1_000_000


class _Walk:
    """A walk over a jaxpr, which finds the form of each value."""

    operation: str | None = None
    """the words for the first operation that is known not to be linear"""

    def __call__(self, jaxpr: Any, constants: Sequence[Form], arguments: Sequence[Form]) -> list[Form]:
        """Return the forms of a jaxpr's results."""
        forms: dict[Any, Form] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def read(v: Any) -> Form:
            return _form_of(v.val) if isinstance(v, Literal) else forms[v]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            forms.update(zip(eqn.outvars, self.results(eqn, operands), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def results(self, eqn: Any, operands: list[Form]) -> list[Form]:
        """Return the forms of an operation's results."""
        name = eqn.primitive.name
        if all(form <= CONSTANT for form in operands):
            is_zero = name in _IN_FIRST and bool(operands) and operands[0] is ZERO
            is_zero |= name in _PRODUCTS and ZERO in operands
            is_zero |= name in _SUMS and CONSTANT not in operands and bool(operands)
            return [ZERO if is_zero else CONSTANT] * len(eqn.outvars)
        if name in _TOGETHER:
            return operands if len(operands) == len(eqn.outvars) else [self.summed(name, operands)] * len(eqn.outvars)
        form = self.through(eqn, name, operands)
        if isinstance(form, list):
            return form
        return [NONLINEAR if form is LINEAR and self.is_discrete(v, name) else form for v in eqn.outvars]

    def through(self, eqn: Any, name: str, operands: list[Form]) -> Form | list[Form]:
        """Return the form of all results of an operation that has operands which are not constant, or each one's."""
        if name in _SUMS:
            return self.summed(name, operands)
        if name in _PRODUCTS:
            return self.product(name, operands)
        if name in _IN_FIRST:
            return self.linear_in(name, operands, [0])
        if name in _UPDATES:
            return self.linear_in(name, operands, _UPDATES[name])
        if name == "select_n":
            return self.linear_in(name, operands, range(1, len(operands)))
        if name == "triangular_solve":
            return self.linear_in(name, operands, [1])
        if name == "integer_pow":
            return operands[0] if eqn.params["y"] == 1 else self.nonlinear(name)
        if name in _NONLINEAR:
            return self.nonlinear(name)
        if name == "cgshim_transposed":
            return self.linear_in(name, operands, range(len(eqn.params["linear"].reads), len(operands)))
        if name == "cgshim_attached":
            return operands[len(operands) - len(eqn.outvars) :]
        if name == "cgshim_op":
            return self.inside(eqn.params["op"].f.jaxpr, operands)
        if name == "scan":
            return self.scan(eqn.params, operands)
        if name == "while":
            return self.loop(eqn.params, operands)
        if name == "cond":
            return self.branches(eqn.params["branches"], operands)
        if name == "custom_linear_solve":
            return self.linear_in(name, operands, range(sum(eqn.params["const_lengths"]), len(operands)))
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
        return UNKNOWN if inner is None else self.inside(inner, operands)

    # --- The ways in which operands come together ----------------------------------------------------------------

    def summed(self, name: str, operands: Sequence[Form]) -> Form:
        """Return the form of a sum. A constant plus something linear is not linear."""
        if CONSTANT in operands and max(operands) is LINEAR:
            return self.nonlinear(name, "one with a constant part")
        return max(operands)

    def product(self, name: str, operands: Sequence[Form]) -> Form:
        """Return the form of a product, which is linear if at most one factor is."""
        if ZERO in operands:
            return ZERO
        if sum(form >= LINEAR for form in operands) > 1:
            return self.nonlinear(name) if UNKNOWN not in operands else UNKNOWN
        return max(operands)

    def linear_in(self, name: str, operands: Sequence[Form], places: Sequence[int]) -> Form:
        """Return the form of a result that is linear in the operands at these places, and only in them."""
        others = [form for at, form in enumerate(operands) if at not in places]
        if max(others, default=ZERO) >= LINEAR:
            return self.nonlinear(name) if max(others) is not UNKNOWN else UNKNOWN
        return self.summed(name, [operands[at] for at in places])

    def nonlinear(self, name: str, operation: str | None = None) -> Form:
        """Note the operation for the message, unless one was noted before; return NONLINEAR."""
        self.operation = self.operation or operation or f"{name} of upstream"
        return NONLINEAR

    def is_discrete(self, v: Any, name: str) -> bool:
        """Return True, and note the operation, if a result is an integer or a boolean."""
        if jnp.issubdtype(v.aval.dtype, jnp.inexact):
            return False
        self.nonlinear(name, "a cast to integers" if name == "convert_element_type" else None)
        return True

    # --- Operations with jaxprs inside ---------------------------------------------------------------------------

    def inside(self, inner: Any, operands: Sequence[Form]) -> list[Form]:
        """Return the forms of the results of a jaxpr that an operation holds."""
        jaxpr = getattr(inner, "jaxpr", inner)
        constants = getattr(inner, "consts", None) or [None] * len(jaxpr.constvars)
        if len(jaxpr.invars) != len(operands):
            return [UNKNOWN] * len(jaxpr.outvars)
        return self(jaxpr, [*map(_form_of, constants)], operands)

    def scan(self, parameters: Any, operands: list[Form]) -> list[Form]:
        constants, carry, scanned = _private.parts_of_scan(parameters, operands)

        def step(carry: list[Form]) -> list[Form]:
            return self.inside(parameters["jaxpr"], [*constants, *carry, *scanned])

        carry = self.settled(carry, step)
        return [*carry, *step(carry)[len(carry) :]]

    def loop(self, parameters: Any, operands: list[Form]) -> list[Form]:
        of_condition, of_body = parameters["cond_nconsts"], parameters["body_nconsts"]
        first = of_condition + of_body
        step: Callable[[list[Form]], list[Form]] = lambda carry: self.inside(
            parameters["body_jaxpr"], [*operands[of_condition:first], *carry]
        )
        carry = self.settled(operands[first:], step)
        operation = self.operation
        decides = self.inside(parameters["cond_jaxpr"], [*operands[:of_condition], *carry])
        if max(decides) <= CONSTANT:
            return carry
        self.operation = operation
        return [self.nonlinear("while") for _ in carry]

    def settled(self, carry: list[Form], step: Callable[[list[Form]], list[Form]]) -> list[Form]:
        """Return the forms that a loop's values have after any number of steps."""
        while True:
            after = [self.either(a, b) for a, b in zip(carry, step(carry), strict=False)]  # a scan has more results
            if after == carry:
                return carry
            carry = after

    def branches(self, branches: Sequence[Any], operands: list[Form]) -> list[Form]:
        results = [self.inside(branch, operands[1:]) for branch in branches]
        if operands[0] >= LINEAR:
            return [self.nonlinear("cond") for _ in results[0]]
        found = results[0]
        for other in results[1:]:
            found = [self.either(a, b) for a, b in zip(found, other, strict=True)]
        return list(found)

    def either(self, a: Form, b: Form) -> Form:
        """Return the form of a value that is one or the other."""
        return self.summed("select_n", [a, b])
