"""What a call leaves behind: nothing, whether it succeeds or fails."""

import gc
import weakref
from collections.abc import Iterator

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from cgshim import CustomGradientError, op_custom_gradient, op_grad

X = np.array([1.0, 2.0])


class AuthorsError(Exception):
    """What goes wrong in the code of an author."""


def failing(faults):
    """x^3, whose rule has 7 x^2 and keeps an intermediate, with faults in some places."""

    def fail(at):
        if at in faults:
            raise AuthorsError

    def f(x):
        fail("f")
        square = x * x

        def rule(upstream):
            fail("the rule")
            inner = op_custom_gradient(
                lambda u: (fail("an op in the rule") or 7.0 * u * square, lambda v: v * square)
            )
            return inner(upstream)

        return square * x, rule

    return op_custom_gradient(f)


@pytest.mark.parametrize("where", ["f", "the rule", "an op in the rule"])
@pytest.mark.parametrize("order", [1, 2])
def test_after_a_fault_all_is_as_before(where, order):
    faults = [where]
    op = failing(faults)
    derivative = lambda x: anp.sum(op(x))
    for _ in range(order):
        derivative = lambda x, fn=derivative: anp.sum(op_grad(fn)(x))
    with pytest.raises(AuthorsError):
        derivative(X)
    faults.clear()
    np.testing.assert_allclose(op_grad(lambda x: anp.sum(op(x)))(X), 7.0 * X * X)
    captured = lambda w: anp.sum(op_custom_gradient(lambda x: (x * w * w, lambda u: u))(X))
    with pytest.raises(CustomGradientError, match="as an argument"):
        grad(captured)(3.0)


@pytest.fixture
def _without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_the_collector")
@pytest.mark.parametrize("times", [0, 1, 2])
def test_counting_references_frees_all(times):
    """The op, f, the rule, and what it keeps, with the last reference to them: nothing is in a
    cycle.
    """
    watched = []

    def run():
        def f(x):
            kept = np.full(2, 7.0)

            def rule(upstream):
                return upstream * kept * x

            watched.extend(map(weakref.ref, (kept, rule)))
            return x * x, rule

        op = op_custom_gradient(f)
        watched.extend(map(weakref.ref, (op, f)))
        derivative = lambda x: anp.sum(op(x))
        for _ in range(times):
            derivative = lambda x, fn=derivative: anp.sum(op_grad(fn)(x))
        return derivative(X)

    assert run() == [5.0, 21.0, 14.0][times]
    assert len(watched) >= 4
    assert [each() for each in watched] == [None] * len(watched)
