"""needs_input_grad: what the front end does about it, before any backend does."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

from cgshim import CustomGradientTypeError, op_custom_gradient, op_vjp
from cgshim._call import Call
from cgshim._gradients import Arguments
from cgshim._pytree import ONE_TENSOR
from cgshim._registry import load


def _scaled(x: Any, w: Any, *, scale: float = 2.0, needs_input_grad: Any) -> Any:
    factors = scale * w if needs_input_grad[0] else None, scale * x if needs_input_grad[1] else None
    return scale * x * w, lambda upstream: [
        None if f is None else 7.0 * f * upstream for f in factors
    ]


scaled = op_custom_gradient(_scaled)


def test_a_caller_does_not_see_it() -> None:
    assert (
        str(inspect.signature(scaled)) == "(x: 'Any', w: 'Any', *, scale: 'float' = 2.0) -> 'Any'"
    )


def test_a_misspelt_option_is_told_by_its_name() -> None:
    with pytest.raises(
        CustomGradientTypeError,
        match=r"^_scaled: got an unexpected keyword argument 'need_input_grad'$",
    ):
        scaled(np.ones(2), np.ones(2), need_input_grad=True)


def test_a_function_with_a_part_of_its_arguments() -> None:
    op = op_custom_gradient(functools.partial(_scaled, scale=3.0))
    _, pullback = op_vjp(lambda x: op(x, np.array([3.0, 5.0])), np.ones(2))
    np.testing.assert_allclose(pullback(np.array([1.0, 10.0]))[0], [63.0, 1050.0])


def test_a_class_whose_objects_are_called() -> None:
    class Rule:
        told: Any = None

        def __call__(self, upstream: Any, *, needs_input_grad: Any) -> Any:
            self.told = needs_input_grad
            return 7.0 * upstream, None

    rule = Rule()
    _, pullback = op_vjp(lambda x: op_custom_gradient(lambda x, n: (x * n, rule))(x, 3), np.ones(2))
    np.testing.assert_allclose(pullback(np.array([1.0, 10.0]))[0], [7.0, 70.0])
    assert rule.told == (True, None)


def test_options_of_any_name_are_the_authors() -> None:
    """Without a parameter of this name f is told nothing, and what its **options get is the
    caller's.
    """

    def f(x: Any, **options: Any) -> Any:
        assert options == {"needs_input_grad": "mine"}
        return x, lambda upstream, **keywords: upstream * len(keywords)

    _, pullback = op_vjp(lambda x: op_custom_gradient(f)(x, needs_input_grad="mine"), np.ones(2))
    np.testing.assert_array_equal(pullback(np.ones(2))[0], [0.0, 0.0])


def test_what_a_backend_tells_stays_with_a_call() -> None:
    told = []

    def f(x: Any, w: Any, *, needs_input_grad: Any) -> Any:
        told.append(needs_input_grad)
        return (
            x * w,
            lambda upstream, needs_input_grad: told.append(needs_input_grad) or (None, None),
        )

    arguments = Arguments("op", load("numpy"), ["x", "w"], [ONE_TENSOR] * 2, True)
    call = Call(arguments, f, {}, takes_needs_input_grad=True)
    inputs = [np.ones(2), np.ones(2)]
    knowing = call.with_needs_input_grad([True, False])
    for each in (
        call,
        knowing,
        knowing.with_f(lambda *args, **options: f(*args, **options)),
    ):
        outputs, rule = each(inputs)
        rule(inputs, outputs)
        rule(inputs, outputs, needed=(False, False))
    expected = [[(True, True)] * 2 + [(False, False)]] + [
        [(True, False)] * 2 + [(False, False)]
    ] * 2
    assert told == [flags for of_call in expected for flags in of_call]


def test_any_gradient_that_is_not_needed_is_dropped() -> None:
    op = op_custom_gradient(
        lambda x, w: (x * w, lambda upstream, needs_input_grad: (7.0 * upstream, "no gradient"))
    )
    x, w = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    _, pullback = op_vjp(lambda x: op(x, w), x)
    np.testing.assert_array_equal(pullback(np.array([1.0, 10.0]))[0], [7.0, 70.0])
    _, pullback = op_vjp(op, x, w)
    with pytest.raises(
        CustomGradientTypeError, match="the gradient of w must be a tensor or None, got str"
    ):
        pullback(np.ones(2))
