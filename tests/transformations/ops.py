"""The ops that the cells transform. Every rule is wrong on purpose by a factor, so that autodiff's number shows."""

from cgshim import op_custom_gradient

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


def by_rule(x, order=1):
    """The derivatives of x * cube(x), as the rule has them."""
    return {1: 16 * x**3, 2: 60 * x**2, 3: 120 * x, 4: 120 + 0 * x}[order]
