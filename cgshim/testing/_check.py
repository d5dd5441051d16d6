"""check_gradients: compare derivatives with central differences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cgshim._batches import WithBatches
from cgshim._dispatch import backend_or_numpy
from cgshim._errors import (
    CustomGradientTypeError,
    CustomGradientValueError,
    TransformationError,
    describe,
    function_name,
    refusal,
)
from cgshim._op import CustomGradient
from cgshim._transforms import by_variables_too, checked_variables, require_callable
from cgshim.testing._batches import check_batches
from cgshim.testing._functions import Array, Function, double_precision, flatten

FIRST_ORDER = "fix the rule, or state a surrogate with against="
HIGHER_ORDER = (
    "fix the rule, or a tensor that grad_fn keeps: one that is neither argument nor output of f is cut off if f "
    "computes it outside of the framework's operations or under stop_gradient; or state a surrogate with against="
)

DIRECTIONS = 2
"""how many random directions change each argument; one shows a wrong derivative almost surely"""

_FAR = 1000.0
"""the ratio of changes at which the smaller one is lost"""

# The frameworks' own checkers (torch.autograd.gradcheck and gradgradcheck,
# jax.test_util.check_grads, tf.test.compute_gradient, autograd.test_util.check_grads) do not
# suffice: none names argument, output and index together, takes a surrogate or supports other
# backends; JAX's needs a global switch for float64 and TensorFlow's has no second order. One
# checker on the Backend protocol has all that; the tests compare its verdicts with theirs.


def check_gradients(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    order: int | None = None,
    modes: Iterable[str] | None = None,
    argnums: int | Sequence[int] | None = None,
    variables: Sequence[Any] = (),
    rtol: float | None = None,
    atol: float | None = None,
    against: Callable[..., Any] | None = None,
) -> None:
    """Compare the derivatives of a function with central differences, per argument and output.

    Parameters
    ----------
    fn : callable
        An op, or any function of tensors. Captured tensors should be float64, because the arguments
        are.
    args : sequence of trees of tensors
        The point to check. Float and complex tensors, of any shape, are varied; other leaves stay
        constant.
    order : int, optional
        The highest derivative to check: order n is compared with differences of order n - 1. By
        default 2, and 1 of an op that is ``once_differentiable`` or has ``host_outputs``.
    modes : iterable of str, optional
        "reverse", "forward" or both. By default forward mode is checked if an op has
        ``forward_mode=True`` or a jvp_fn, and for any other function if it is supported. If you
        name it here, it must be supported.
    argnums : int or sequence of int, optional
        The positional arguments whose gradients to check, as in ``op_grad``; by default all of
        them.
    variables : list of float or complex tensors, optional
        Trainable state that fn captures, in double precision: PyTorch's Parameters, TensorFlow's
        Variables. Each is changed in place, as the arguments are, and has its value back
        afterwards.
    rtol, atol : float, optional
        In float64, rtol is 6e-6 (the step of the differences) and atol 4e-8 of the function's size
        plus 4e-10. If all derivatives are smaller, pass an atol, or scale the function.
    against : callable, optional
        The function for the differences: the surrogate of a function that has other derivatives on
        purpose. Its values may differ: for the identity with a reversed gradient use ``-x``.

    Raises
    ------
    AssertionError
        If a derivative is wrong, with the argument, the output and the index; or if a difference is
        not finite, because it shows nothing.
    CustomGradientError
        If the op does not support a check: a gradient of a wrong shape, forward mode without a
        promise, a second order if it is ``once_differentiable``.

    Examples
    --------
    >>> import numpy as np
    >>> from cgshim import op_custom_gradient
    >>> cube = op_custom_gradient(lambda x: (x**3, lambda upstream: upstream * 3 * x**2), forward_mode=True)
    >>> check_gradients(cube, [np.array([1.0, -2.0])])

    Notes
    -----
    Directions and upstream gradients are random and the same in every run. The checks use float64,
    on JAX too, whose switch for it is on only while they run; a framework without float64 is
    checked in its widest float.

    An op with a batching rule (``vmap=``) is mapped too, if the framework has a vmap: outputs and
    gradients of a batch and its elements are compared with calls for one element after the other.

    Complex gradients are compared in the framework's own convention. Rules use one convention on
    all frameworks, ``u * conj(2 * z)`` for ``z * z``.
    """
    require_callable("check_gradients", fn)
    op = fn.name if isinstance(fn, CustomGradient) else function_name(fn)
    if not isinstance(args, (list, tuple)):
        raise refusal(CustomGradientTypeError, op, must="args must be a list of the arguments",
                      got=describe(args), do="write [x]")  # fmt: skip
    if order is None:
        order = 2
        if isinstance(fn, CustomGradient):
            f = (fn._bound or fn).held_function  # of a method: what binds
            order = 1 if fn.once_differentiable or hasattr(f, "has_one_order") else 2
    demanded = modes is not None or isinstance(fn, CustomGradient)
    modes = _known(op, _default_modes(fn) if modes is None else modes, order)
    backend = backend_or_numpy(args)
    surrogate = "" if against is None else f" of {function_name(against)}"
    random = np.random.default_rng(0)
    with double_precision(backend):
        if variables:
            variables = checked_variables(op, backend, variables)
            # raises an error if the framework has no such state
            by_variables_too(op, backend, variables)
        derived, values = flatten(op, backend, fn, args, argnums, variables)
        differenced = (
            derived
            if against is None
            else flatten(op, backend, against, args, argnums, variables)[0]
        )
        _require_same_outputs(op, derived(values), differenced(values))
        if isinstance(getattr(fn, "held_function", None), WithBatches) and not variables:
            check_batches(op, derived, values, random, rtol)
        for n in range(1, order + 1):
            check = _Check(op, n, surrogate, derived, differenced, values, random, rtol, atol)
            check(modes, demanded)
            upstreams = [_random(random, output) for output in derived(values)]
            derived, differenced, values = (
                derived.gradient(),
                differenced.gradient(),
                [*values, *upstreams],
            )


def _default_modes(fn: Callable[..., Any]) -> list[str]:
    promised = not isinstance(fn, CustomGradient) or fn.forward_mode
    return ["reverse", "forward"] if promised else ["reverse"]


def _known(op: str, modes: Iterable[str], order: int) -> list[str]:
    modes = [modes] if isinstance(modes, str) else list(modes)
    if not isinstance(order, int) or order < 1:
        raise refusal(
            CustomGradientValueError,
            op,
            must="order must be 1 or more",
            got=str(order),
            do="write order=1",
        )
    if not modes or set(modes) - {"reverse", "forward"}:
        raise refusal(CustomGradientValueError, op, must='modes must be "reverse", "forward" or both',
                      got=repr(modes), do='write modes=("reverse",)')  # fmt: skip
    return modes


def _require_same_outputs(op: str, outputs: Sequence[Array], of_surrogate: Sequence[Array]) -> None:
    got, expected = ([describe(y) for y in each] for each in (of_surrogate, outputs))
    if got != expected:
        raise refusal(CustomGradientValueError, op,
                      must=f"against= must return what fn does ({', '.join(expected)})",
                      got=", ".join(got), do="state a surrogate with the same outputs")  # fmt: skip


class _Change(NamedTuple):
    """A change of one input, and the resulting difference of each output."""

    input: int
    step: Array
    differences: Sequence[Array]


@dataclass
class _Check:
    """The check of the first derivatives of one function against the differences of another."""

    op: str
    order: int
    surrogate: str
    derived: Function
    differenced: Function
    values: Sequence[Array]
    random: np.random.Generator
    rtol: float | None
    atol: float | None

    def __call__(self, modes: Sequence[str], demanded: bool) -> None:
        """Check these modes.

        If forward mode is not demanded, an error from it ends that part.
        """
        changes = [
            self._change(at, _random(self.random, value) * np.maximum(1, abs(value)))
            for at, value in enumerate(self.values)
            for _ in range(DIRECTIONS)
        ]
        if "reverse" in modes:
            self._check_reverse(changes)
        if "forward" in modes:
            with contextlib.nullcontext() if demanded else contextlib.suppress(TransformationError):
                self._check_forward(changes)

    def _change(self, at: int, step: Array) -> _Change:
        size = _step_size(self.values[at])
        after, before = (self.differenced(self._moved(at, sign * size * step)) for sign in (1, -1))
        differences = [np.asarray((y - x) / (2 * size)) for x, y in zip(before, after, strict=True)]
        for output, difference in zip(self.differenced.outputs, differences, strict=True):
            self._require_finite(at, output, difference)
        return _Change(at, step, differences)

    def _refined(self, change: _Change) -> _Change:
        """Return a change with accurate differences where fn bends within one step, as near a pole.

        A step of half the size estimates the truncation error (Richardson).
        """
        half = self._change(change.input, change.step / 2)
        pairs = zip(half.differences, change.differences, strict=True)
        differences = [np.asarray((8 * of_half - of_whole) / 3) for of_half, of_whole in pairs]
        return change._replace(differences=differences)

    def _moved(self, at: int, by: Array) -> list[Array]:
        return [
            np.asarray(value + by, value.dtype) if n == at else value
            for n, value in enumerate(self.values)
        ]

    def _require_finite(self, at: int, output: str, difference: Array) -> None:
        if not np.isfinite(difference).all():
            index = tuple(np.argwhere(~np.isfinite(difference))[0])
            where = f"{output}{_spelled(index)} along {self.derived.inputs[at]}"
            what = f"the central difference{self.surrogate} of {where}"
            raise refusal(AssertionError, self._heading, must=f"{what} must be finite",
                          got=str(difference[index]),
                          do="nothing is known of the gradient there: check it where the function is finite"
                          )  # fmt: skip

    # --- In reverse mode <gradient, step> is <upstream, difference> ---

    def _check_reverse(self, changes: Sequence[_Change]) -> None:
        """Check with a random upstream of one output at a time, and then of all outputs at once.

        The last upstreams have another scale and sign, for a rule such as `abs(u)`. Gradients of
        only one input test a rule that skips the other gradients.
        """
        outputs, upstreams = self.derived(self.values), list[Array]()
        for at, output in enumerate(outputs):
            upstreams = [np.zeros_like(y) for y in outputs]
            upstreams[at] = _random(self.random, output)
            self._compare_in_reverse(changes, outputs, upstreams, self.derived.outputs[at])
        upstreams = [
            np.asarray(-3 * u if u.any() else _random(self.random, u), u.dtype) for u in upstreams
        ]
        together = "all outputs at once" if len(outputs) > 1 else self.derived.outputs[0]
        self._compare_in_reverse(changes, outputs, upstreams, together)
        if evened := self._evened(changes, outputs, upstreams):
            self._compare_in_reverse(changes, outputs, evened, together)
        state = len(self.derived.variables)  # the gradients of state are always needed
        for at in range(state, len(self.values) if len(self.values) > 1 else 0):
            own = [change for change in changes if change.input == at]
            through = f"{together}, needed by itself"
            self._compare_in_reverse(own, outputs, upstreams, through, only=at)

    def _evened(
        self, changes: Sequence[_Change], outputs: Sequence[Array], upstreams: Sequence[Array]
    ) -> list[Array] | None:
        """Return smaller upstreams for outputs that change far more than others.

        Otherwise errors in the other outputs would be lost, unlike in forward mode.
        """
        per_output = zip(*(change.differences for change in changes), strict=True)
        sizes = [abs(np.stack(each)).max(axis=0) for each in per_output]
        is_known = [
            size > _FAR * self._tolerance(0, 0.0, abs(y))
            for size, y in zip(sizes, outputs, strict=True)
        ]
        known = np.concatenate([size[has] for size, has in zip(sizes, is_known, strict=True)])
        if not known.size or known.max() < _FAR * known.min():
            return None
        return [
            np.asarray(np.where(has, u * known.min() / np.where(has, size, 1.0), 0.0), u.dtype)
            for u, size, has in zip(upstreams, sizes, is_known, strict=True)
        ]

    def _compare_in_reverse(
        self,
        changes: Sequence[_Change],
        outputs: Sequence[Array],
        upstreams: Sequence[Array],
        through: str,
        only: int | None = None,
    ) -> None:
        gradients = self.derived.vjp(self.values, upstreams, only)
        noise = sum(abs(u * y).sum() for u, y in zip(upstreams, outputs, strict=True))

        def is_far(change: _Change) -> bool:
            got, expected, size = self._paired(gradients, upstreams, change)
            return not abs(got - expected) <= self._tolerance(change.input, size, noise)

        for change in changes:
            if is_far(change) and is_far(self._refined(change)):
                self._fail_in_reverse(through, gradients, upstreams, change.input)

    def _paired(
        self, gradients: Sequence[Array], upstreams: Sequence[Array], change: _Change
    ) -> tuple[float, float, float]:
        """Return the outputs' change by the gradient and by the differences, and its terms' size."""
        terms = self._conjugated(gradients[change.input]) * change.step
        expected = [
            self._conjugated(u) * difference
            for u, difference in zip(upstreams, change.differences, strict=True)
        ]
        got, wanted = np.real(terms.sum()), sum(np.real(each.sum()) for each in expected)
        return got, wanted, sum(abs(each).sum() for each in expected)

    def _conjugated(self, gradient: Array) -> Array:
        conjugates = np.iscomplexobj(gradient) and self.derived.has_conjugate_gradients()
        return np.conj(gradient) if conjugates else gradient

    def _fail_in_reverse(
        self, through: str, gradients: Sequence[Array], upstreams: Sequence[Array], input: int
    ) -> NoReturn:
        """Raise the error for the input's element with the largest gradient error."""
        comparisons = [
            (self._paired(gradients, upstreams, self._refined(self._change(input, unit))), spelled)
            for spelled, unit in _units(self.values[input])
        ]
        (got, expected, _), spelled = max(
            comparisons, key=lambda each: _distance(each[0][0], each[0][1])
        )
        self._fail(
            f"the gradient of {self.derived.inputs[input]}{spelled} through {through}",
            "reverse",
            got,
            expected,
        )

    # --- In forward mode the tangent is the difference ---

    def _check_forward(self, changes: Sequence[_Change]) -> None:
        outputs = self.derived(self.values)
        for change in [change for change in changes if change.input >= len(self.derived.variables)]:
            tangents = [np.zeros_like(value) for value in self.values]
            tangents[change.input] = change.step
            pairs = zip(self.derived.jvp(self.values, tangents), outputs, strict=True)
            for at, (tangent, output) in enumerate(pairs):
                self._check_tangent(at, tangent, abs(output), change)

    def _check_tangent(self, at: int, tangent: Array, sizes: Array, change: _Change) -> None:
        def are_far(expected: Array) -> Array:
            tolerance = self._tolerance(change.input, abs(expected), sizes)
            return ~(abs(tangent - expected) <= tolerance)

        if not are_far(change.differences[at]).any():
            return
        expected = self._refined(change).differences[at]
        if (far := are_far(expected)).any():
            index = tuple(np.argwhere(far)[0])
            output = f"{self.derived.outputs[at]}{_spelled(index)}"
            what = f"the tangent of {output} along {self.derived.inputs[change.input]}"
            self._fail(what, "forward", tangent[index], expected[index])

    # --- Tolerances ---

    def _tolerance(self, input: int, size: Any, of_function: Any) -> Any:
        """Return the allowed error of a difference of this size, of a function of that size."""
        step = _step_size(self.values[input])
        rounding = min(step, 1000 * step**2) * of_function + 10 * step**2
        return (rounding if self.atol is None else self.atol) + (
            step if self.rtol is None else self.rtol
        ) * size

    @property
    def _heading(self) -> str:
        return f"{self.op}, order {self.order}"

    def _fail(self, what: str, mode: str, got: complex, expected: complex) -> NoReturn:
        raise refusal(AssertionError, self._heading,
                      must=f"{what} must be that of central differences{self.surrogate} ({mode} mode)",
                      got=f"{got:.6g} where {expected:.6g} is expected",
                      do=FIRST_ORDER if self.order == 1 else HIGHER_ORDER)  # fmt: skip


def _step_size(value: Array) -> float:
    """Return the step at which truncation and rounding errors of central differences balance.

    That error is the step squared.
    """
    return float(np.finfo(value.dtype).eps ** (1 / 3))


def _random(generator: np.random.Generator, like: Array) -> Array:
    """Return random numbers in the shape and the dtype of an array."""
    numbers = generator.normal(size=like.shape)
    if np.iscomplexobj(like):
        numbers = numbers + 1j * generator.normal(size=like.shape)
    return np.asarray(numbers, like.dtype)


def _units(value: Array) -> Iterator[tuple[str, Array]]:
    """Yield a unit step for each real number in an array, with its name for messages."""
    parts = [(".real", 1), (".imag", 1j)] if np.iscomplexobj(value) else [("", 1)]
    for index in np.ndindex(value.shape):
        for part, one in parts:
            unit = np.zeros_like(value)
            unit[index] = one
            yield _spelled(index) + part, unit


def _spelled(index: Sequence[int]) -> str:
    return f"[{','.join(map(str, index))}]" if index else ""


def _distance(got: complex, expected: complex) -> float:
    return float(np.nan_to_num(abs(got - expected), nan=np.inf))
