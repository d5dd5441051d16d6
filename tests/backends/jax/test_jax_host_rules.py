"""f and grad_fn as NumPy code in JAX's transformations: the numbers, and how often f runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cgshim
from cgshim import TransformationError, op_custom_gradient, op_host

X = np.array([0.5, -2.0, 3.0])


class Cube:
    """x cubed, with 7 for its rule's 3, and a residual that no framework knows."""

    def __init__(self, keep=8):
        self.runs = 0
        self.op = op_custom_gradient(self.f, host_outputs=lambda x: x, keep=keep, name="cube")

    def f(self, x):
        self.runs += 1
        kept = {"square": [x * x]}
        return x**3, lambda upstream: 7 * upstream * kept["square"][0]

    def during(self, program, *args):
        """The results of a program, and how often it runs f when it is compiled already."""
        jax.block_until_ready(program(*args))
        before = self.runs
        return jax.block_until_ready(program(*args)), self.runs - before


def total(op, times=1.0):
    return lambda x: (times * op(x)).sum()


@pytest.mark.parametrize("keep", [8, 0])
def test_a_gradient_in_compiled_code(keep):
    cube = Cube(keep)
    found, runs = cube.during(jax.jit(jax.grad(total(cube.op, 5.0))), X)
    np.testing.assert_allclose(found, 35 * X**2)
    assert runs == (1 if keep else 2)


@pytest.mark.parametrize("outer", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_batch_of_gradients(outer):
    cube = Cube()
    xs = np.stack([X, 2 * X, -X, X + 1])
    found, runs = cube.during(outer(jax.vmap(jax.grad(total(cube.op, 5.0)))), xs)
    np.testing.assert_allclose(found, 35 * xs**2)
    assert runs == 4


def test_nested_batches():
    cube = Cube(keep=50)
    xs = np.arange(24.0).reshape(2, 3, 4)
    gradient = jax.vmap(jax.vmap(jax.grad(total(cube.op))), in_axes=2, out_axes=2)
    np.testing.assert_allclose(jax.jit(gradient)(xs), 7 * xs**2)


def test_more_runs_than_are_kept():
    """A loop of ten with two rules kept: f runs again for the others, and for nothing else."""
    cube = Cube(keep=2)

    def in_loop(x):
        return jax.lax.scan(lambda x, _: (0.3 * cube.op(x), None), x, length=10)[0].sum()

    def by_hand(x):
        @jax.custom_vjp
        def f(x):
            return x**3

        f.defvjp(lambda x: (x**3, x), lambda x, u: (7 * u * x**2,))
        return jax.lax.scan(lambda x, _: (0.3 * f(x), None), x, length=10)[0].sum()

    x = jnp.array([1.1, -1.2, 0.9])
    found, runs = cube.during(jax.jit(jax.grad(in_loop)), x)
    np.testing.assert_allclose(found, jax.grad(by_hand)(x), rtol=1e-6)
    assert runs == 18


def test_checkpoint_and_jacobian():
    cube = Cube()
    gradient = jax.jit(jax.grad(jax.checkpoint(lambda x: total(cube.op)(cube.op(x)))))
    np.testing.assert_allclose(gradient(X), 7 * (X**3) ** 2 * 7 * X**2)
    np.testing.assert_allclose(jax.jit(jax.jacrev(cube.op))(X), np.diag(7 * X**2))


def test_a_value_alone_runs_f_once_and_an_unused_one_never():
    cube = Cube()
    value, runs = cube.during(jax.jit(cube.op), X)
    np.testing.assert_allclose(value, X**3)
    assert runs == 1
    _, runs = cube.during(jax.jit(lambda x: (cube.op(x), 2 * x)[1]), X)
    assert runs == 0


@pytest.mark.parametrize("compiler", [jax.jit, lambda f: f])
def test_a_batch_of_a_vectorized_rule_is_one_call(compiler):
    """Over ten elements: one call of f and one of its rule, whichever transformation comes first."""
    runs = []

    @op_custom_gradient(host_outputs=lambda x, w: x, vectorized=True)
    def op(x, w):
        runs.append("f")

        def grad(upstream):
            runs.append("rule")
            return 7 * upstream * x * w[..., None], 11 * (upstream * x * x).sum(-1)

        return x * x * w[..., None], grad

    x, w = jnp.arange(30.0).reshape(10, 3), jnp.array(2.0)
    loss = lambda x, w: op(x, w).sum()
    of_x, of_w = 7 * x * w, 11 * (x * x).sum(-1)
    for program, expected in {
        jax.vmap(jax.grad(loss, (0, 1)), (0, None)): (of_x, of_w),
        jax.grad(lambda x, w: jax.vmap(loss, (0, None))(x, w).sum(), (0, 1)): (of_x, of_w.sum()),
    }.items():
        runs.clear()
        found = jax.block_until_ready(compiler(program)(x, w))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert runs == ["f", "rule"]
    runs.clear()
    jacobian = compiler(jax.jacrev(op))(x[0], w)  # the rule of one run, for each unit vector
    np.testing.assert_allclose(jacobian, np.diag(7 * x[0] * w))
    assert runs == ["f", "rule", "rule", "rule"]


def test_the_second_order_is_refused():
    cube = Cube()
    for transform in (jax.jit, lambda f: f):
        with pytest.raises(
            TransformationError,
            match=r"^the gradient of cube: what runs on the host has no derivative",
        ):
            transform(jax.grad(total(jax.grad(total(cube.op)))))(X)


def test_the_rules_of_two_threads():
    import threading

    cube = Cube()
    gradient = jax.jit(jax.grad(total(cube.op)))
    found = {}

    def work(at):
        for _ in range(20):
            found[at] = gradient(at + X)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(4):
        np.testing.assert_allclose(found[at], 7 * (at + X) ** 2)


# --- Functions of NumPy's autograd as the foreign ones --------------------------------------------


def test_a_foreign_function_in_compiled_code_at_two_orders():
    sine = op_host(
        lambda x: cgshim.op_sin(x) * x, outputs=lambda x: x, backend="numpy", name="sine"
    )
    first = jax.grad(lambda x: (sine(x) * jnp.array([1.0, 5.0, -2.0])).sum())
    second = jax.grad(lambda x: (first(x) * jnp.array([2.0, -3.0, 7.0])).sum())
    w, v = np.array([1.0, 5.0, -2.0]), np.array([2.0, -3.0, 7.0])
    np.testing.assert_allclose(jax.jit(first)(X), w * (np.cos(X) * X + np.sin(X)), rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(second)(X), w * v * (2 * np.cos(X) - np.sin(X) * X), rtol=1e-6
    )
    xs = np.stack([X, 2 * X])
    np.testing.assert_allclose(
        jax.jit(jax.vmap(first))(xs), w * (np.cos(xs) * xs + np.sin(xs)), rtol=1e-6
    )
