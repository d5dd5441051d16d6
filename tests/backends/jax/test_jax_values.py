"""f and rules that read values, as a simulator does, where a library has words of its own about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import op_custom_gradient


def simulated(x):
    """A library's way to NumPy: it says in its own words that a tracer has no value."""
    try:
        return np.asarray(x)
    except jax.errors.TracerArrayConversionError as error:
        raise ValueError("the simulator needs numbers") from error


@pytest.fixture
def cube():
    """x**3 by a library, whose rules are wrong on purpose: 5 x**2 backward, and 7 x**2 forward."""
    runs = []

    @op_custom_gradient(forward_mode=True)
    def cube(x):
        runs.append("f")

        def grad(upstream):
            return upstream * jnp.asarray(5.0 * simulated(x) ** 2)

        def jvp(tangent):
            return tangent * jnp.asarray(7.0 * simulated(x) ** 2)

        return jnp.asarray(simulated(x) ** 3), grad, jvp

    cube.runs = runs
    return cube


def test_a_rule_of_values_serves_one_gradient_in_one_run(cube):
    np.testing.assert_allclose(jax.grad(lambda x: 2.0 * cube(x))(3.0), 90.0)
    assert len(cube.runs) == 1


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd])
def test_a_rule_of_values_under_vmap_of_its_upstreams(cube, transform):
    expected = 63.0 if transform is jax.jacfwd else 45.0
    found = transform(lambda x: cube(x))(3.0)
    np.testing.assert_allclose(found, expected)


def test_forward_mode_by_a_jvp_fn_of_values(cube):
    value, tangent = jax.jvp(lambda x: 2.0 * cube(x), (3.0,), (10.0,))
    np.testing.assert_allclose([value, tangent], [54.0, 1260.0])
    np.testing.assert_allclose(jax.linearize(cube, 3.0)[1](10.0), 630.0)


def test_an_op_in_a_rule_of_values_gets_the_argument():
    """Its input is an argument that no operation has read before."""

    @op_custom_gradient
    def slope(x):
        return jnp.asarray(3.0 * simulated(x) ** 2), lambda upstream: upstream * 11.0 * x

    @op_custom_gradient
    def cube(x):
        def grad(upstream):
            if upstream > 1000.0:  # so that it cannot be traced
                raise AssertionError
            return upstream * slope(x)

        return x**3, grad

    np.testing.assert_allclose(jax.grad(jax.grad(cube))(2.0), 22.0)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_an_argument_that_f_also_holds_is_not_read_from_there(transform):
    class Circuit:
        def __init__(self, parameter):
            self.parameter = parameter

    def loss(x):
        circuit = Circuit(x)

        @op_custom_gradient(forward_mode=True)
        def energy(x):
            assert circuit is not None
            return jnp.asarray(np.asarray(x) ** 2), lambda upstream: upstream * 13.0

        return energy(circuit.parameter)

    np.testing.assert_allclose(transform(loss)(3.0), 13.0)
