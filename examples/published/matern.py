"""The Matern covariance for nu = 1/2, 3/2 and 5/2, safe where two points coincide.

Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 4.2. Published as
MaternCovariance in cornellius-gp/gpytorch, `gpytorch/functions/matern_covariance.py`. No derivative
goes through the square root of a distance, which is infinite at 0, and the rule keeps its arguments
alone, no matrix of pairs.
"""

import math

from cgshim import op_custom_gradient, op_vjp, ops


def squared(x1, x2, lengthscale, nu):
    """Twice nu times the squared distance of each pair of points, in lengthscales."""
    return 2 * nu * ops.sum((x1[:, None] - x2[None, :]) ** 2, axis=-1) / lengthscale**2


@op_custom_gradient
def covariance(q, nu):
    a = ops.sqrt(q)
    k = {0.5: 1, 1.5: 1 + a, 2.5: 1 + a + q / 3}[nu] * ops.exp(-a)
    return k, lambda upstream: upstream * slope(q, nu)


def slope(q, nu):
    """The derivative of the covariance by q, which is that of the next smaller nu."""
    if nu > 1:
        return -covariance(q, nu - 1) / (4 * nu - 4)
    a = ops.sqrt(ops.where(q > 0, q, ops.full_like(q, math.inf)))  # for nu = 1/2, 0 at the kink
    return -ops.exp(-a) / (2 * a)


@op_custom_gradient
def matern(x1, x2, lengthscale, *, nu=2.5):
    """The covariances [n, m] of the points x1 [n, d] and x2 [m, d]; the lengthscale is one number."""

    def grad(upstream):
        q, pullback = op_vjp(lambda *args: squared(*args, nu), x1, x2, lengthscale)
        return pullback(upstream * slope(q, nu))

    return covariance(squared(x1, x2, lengthscale, nu), nu), grad
