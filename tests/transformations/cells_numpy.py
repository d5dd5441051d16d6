import math

import autograd.numpy as anp
import numpy as np
from autograd import elementwise_grad, grad, hessian, jacobian
from autograd.differential_operators import make_jvp
from cells import cell
from ops import X, both_modes, by_rule, kept, product, reverse, with_op_in_rule

from cgshim import op_custom_gradient

X = np.array(X)


def loss(x):
    return anp.sum(x * reverse(x))


@cell("gradient")
def gradient():
    return grad(loss)(X), by_rule(X)


@cell("derivatives of order 2, 3 and 4")
def orders():
    second = elementwise_grad(elementwise_grad(lambda x: x * reverse(x)))
    third = elementwise_grad(second)
    found = [second(X), third(X), elementwise_grad(third)(X)]
    return found, [by_rule(X, 2), by_rule(X, 3), by_rule(X, 4)]


@cell("mixed partial derivatives")
def mixed():
    return grad(lambda y: anp.sum(y**2 * grad(lambda x: anp.sum(product(x, y)))(X)))(X), 21 * X**2


@cell("Hessian, reverse over reverse")
def reverse_over_reverse():
    return hessian(loss)(X), np.diag(by_rule(X, 2))


@cell("Hessian, forward over reverse")
def forward_over_reverse():
    gradient = grad(lambda x: anp.sum(reverse(x)))
    return [make_jvp(gradient)(X)(v)[1] for v in np.eye(3)], np.diag(30 * X)


def second(op):
    return elementwise_grad(elementwise_grad(op))(X)


@cell("second order, rule keeps the output")
def output():
    return second(kept), 25 * np.exp(X)


@op_custom_gradient(name="cube")
def opaque_exp(x):
    """exp(x), which autograd cannot see through, with 5 for 1 in its rule."""
    y = np.array([math.exp(value) for value in x])
    return y, lambda upstream: upstream * 5.0 * y


@cell("second order, f is opaque")
def opaque():
    return second(opaque_exp), 25 * np.exp(X)


@op_custom_gradient(name="cube")
def noisy_cube(x):
    drawn.append(np.random.default_rng().normal())
    i = x * x * (1 + drawn[-1])
    return i * x, lambda upstream: upstream * 15.0 * i


drawn = []


@cell("second order, f draws random numbers")
def random():
    return second(noisy_cube), 30 * X * (1 + drawn[-1])


@cell("second order of an op inside a rule")
def inside_a_rule():
    return second(with_op_in_rule), 210 * X


@cell("gradient of a gradient penalty")
def penalty():
    return grad(lambda x: anp.sum(grad(loss)(x) ** 2))(X), 2 * by_rule(X) * by_rule(X, 2)


@cell("Jacobian")
def of_vector():
    return jacobian(reverse)(X), np.diag(15 * X**2)


@cell("forward mode, promised")
def promised():
    return make_jvp(both_modes)(X)(2 * X)[1], 30 * X**3


@cell("forward mode, not promised")
def not_promised():
    return make_jvp(reverse)(X)(2 * X)[1], 30 * X**3
