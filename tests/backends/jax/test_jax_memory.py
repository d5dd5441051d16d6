"""An op keeps for the backward pass what it keeps by hand: counted, for a peak in bytes is mostly
chance.
"""

import contextlib
import gc
import io
import weakref

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import op_custom_gradient

X = jnp.linspace(0.5, 1.5, 1001)


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new():
    """A collection looks at what these tests make, and not at the million objects of those before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def by_hand(forward, backward):
    op = jax.custom_vjp(lambda x: forward(x)[0])
    op.defvjp(forward, lambda kept, upstream: (backward(kept, upstream),))
    return op


def by_rule(forward, backward):
    def f(x):
        output, kept = forward(x)
        return output, lambda upstream: backward(kept, upstream)

    return op_custom_gradient(f)


def keeps_the_argument(x):
    return x * x * x, x


def keeps_a_residual(x):
    square = x * x
    return square * x, square


def keeps_both(x):
    return x * x * x, (x, x * x)


BACKWARD = {
    keeps_the_argument: lambda x, upstream: 7 * upstream * x * x,
    keeps_a_residual: lambda square, upstream: 7 * upstream * square,
    keeps_both: lambda kept, upstream: 7 * upstream * kept[1] + 0 * kept[0],
}


def chain(op):
    return lambda x: op(op(op(op(x))))


def checkpointed(op):
    twice = jax.checkpoint(lambda x: op(op(x)))
    return lambda x: twice(twice(x))


def arrays_alive(f):
    """How many arrays a pullback keeps alive, and how many outlive it."""
    jax.vjp(f, X)  # whatever is made once
    gc.collect()
    before = len(jax.live_arrays())
    output, pullback = jax.vjp(f, X)
    during = len(jax.live_arrays())
    gradient = pullback(output)
    del output, pullback, gradient
    return during - before, len(jax.live_arrays()) - before


def saved(f):
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        jax.ad_checkpoint.print_saved_residuals(f, X)
    return sorted(line.partition(" ")[0] for line in lines.getvalue().splitlines())


def compiled(f):
    memory = jax.jit(lambda x: jax.vjp(f, x)[1](x)).lower(X).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes


@pytest.mark.parametrize("count", [arrays_alive, saved, compiled])
@pytest.mark.parametrize("program", [chain, checkpointed])
@pytest.mark.parametrize("forward", BACKWARD)
def test_an_op_keeps_what_it_keeps_by_hand(forward, program, count):
    mine, other = (count(program(make(forward, BACKWARD[forward]))) for make in (by_rule, by_hand))
    assert mine == other


def test_the_counts_tell_more_from_less():
    less, more = (
        chain(by_rule(forward, BACKWARD[forward])) for forward in (keeps_a_residual, keeps_both)
    )
    assert arrays_alive(more)[0] == arrays_alive(less)[0] + 3  # four arguments, one of which is X
    assert len(saved(more)) == len(saved(less)) + 4


def _given(made):
    return op_custom_gradient(lambda x, c: (x * c.factor, lambda u: (7 * u, None))), (made(),)


def _returned(made):
    op = op_custom_gradient(lambda x: ((2 * x, made), lambda u: 7 * u[0]))
    return lambda x: op(x)[0], ()


def _kept(made):
    def f(x):
        keeper = made()
        return 2 * x, lambda u: 7 * u * keeper.factor / 2

    return op_custom_gradient(f), ()


@pytest.mark.parametrize("use", [_given, _returned, _kept])
@pytest.mark.parametrize("compiler", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_classes_and_ops_that_are_made_in_a_loop_die(use, compiler):
    def made_and_used(number):
        made = type(f"Made{number}", (), {"factor": 2.0})
        op, args = use(made)
        assert compiler(jax.grad(lambda x: op(x, *args)))(3.0) == 7
        return [weakref.ref(made), weakref.ref(op)]

    alive = [reference for number in range(3) for reference in made_and_used(number)]
    jax.clear_caches()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 6


def test_a_subclass_that_is_made_in_a_loop_dies():
    op = op_custom_gradient(lambda x: (2 * x, lambda u: 7 * u))
    made = type("Made", (np.ndarray,), {})
    assert op(np.ones(3).view(made)).tolist() == [2, 2, 2]
    reference = weakref.ref(made)
    del made
    gc.collect()
    assert reference() is None
