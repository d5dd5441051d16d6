"""The ops that the cells transform. Every rule is wrong on purpose by a factor, so that autodiff's
number shows.
"""

import functools

from cgshim import op_custom_gradient, op_exp, op_host, op_stop_gradient

X = [0.5, -2.0, 3.0]
"""where every cell is evaluated, unless it says otherwise"""


def cube(x):
    """x**3, with the rule 15 x**2 (five times the true one) through a residual."""
    i = x * x
    return i * x, lambda upstream: upstream * 15.0 * i


reverse = op_custom_gradient(cube, name="cube")
both_modes = op_custom_gradient(cube, name="cube", forward_mode=True)


@op_custom_gradient
def product(x, y):
    """x * y, with the rules 7 y and 11 x."""
    return x * y, lambda upstream: (upstream * 7.0 * y, upstream * 11.0 * x)


@functools.partial(
    op_custom_gradient, vmap=lambda size, in_batched, x: (*cube(x), True), name="cube"
)
def with_batches(x):
    """cube, where it is mapped; else nothing is right."""
    return -x, lambda upstream: -upstream


def by_rule(x, order=1):
    """The derivatives of x * cube(x), as the rule has them."""
    return {1: 16 * x**3, 2: 60 * x**2, 3: 120 * x, 4: 120 + 0 * x}[order]


@op_custom_gradient(name="cube")
def kept(x):
    """exp(x), cut off from x, with a rule that keeps it: each derivative is 5 times the last one."""
    y = op_stop_gradient(op_exp(x))
    return y, lambda upstream: upstream * 5.0 * y


@op_custom_gradient(name="cube")
def with_op_in_rule(x):
    """x**3, with the rule 5 * slope(x) for 5 * 3 x**2, whose own rule is wrong too: 42 x for 6 x."""
    return x * x * x, lambda upstream: upstream * 5.0 * slope(x)


@op_custom_gradient(name="cube")
def slope(x):
    return 3.0 * x * x, lambda upstream: upstream * 42.0 * x


# --- On the host ----------------------------------------------------------------------------------


def cube_of_array(x):
    """x**3 in NumPy, with the same rule in NumPy, for each mode."""
    return x * x * x, lambda upstream: upstream * 15.0 * x * x, lambda dx: 15.0 * x * x * dx


@op_host(outputs=lambda x: x, name="cube")
def opaque_cube(x):
    return x * x * x


FOREIGN = "A function of another framework, here of NumPy with autograd"
ON_HOST = {
    "f on the host, its rule in ops": op_custom_gradient(
        lambda x: (opaque_cube(x), lambda upstream: upstream * 15.0 * x * x),
        name="cube",
        forward_mode=True,
    ),
    "f and its rule on the host": op_custom_gradient(
        cube_of_array, host_outputs=lambda x: x, name="cube", forward_mode=True
    ),
    FOREIGN: op_host(lambda x: reverse(x), outputs=lambda x: x, backend="numpy", name="cube"),
}
"""x**3 with the rule of `cube`, by the heading of its table"""
