import autograd.numpy as anp
import numpy as np
from autograd import elementwise_grad, grad, jacobian
from autograd.differential_operators import make_jvp
from cells import host_cell
from ops import X, by_rule

X = np.array(X)
V = np.array([1.0, 10.0, 100.0])


def loss(op):
    return lambda x: anp.sum(x * op(x))


@host_cell("gradient")
def gradient(op):
    return grad(loss(op))(X), by_rule(X)


@host_cell("Jacobian")
def of_vector(op):
    return jacobian(op)(X), np.diag(15 * X**2)


@host_cell("second order")
def second(op):
    return elementwise_grad(elementwise_grad(lambda x: x * op(x)))(X), by_rule(X, 2)


@host_cell("forward mode, promised")
def promised(op):
    return make_jvp(op)(X)(V)[1], 15 * V * X**2


@host_cell("Hessian, forward over reverse, promised")
def forward_over_reverse(op):
    return make_jvp(grad(loss(op)))(X)(V)[1], V * by_rule(X, 2)
