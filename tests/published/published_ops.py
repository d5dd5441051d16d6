"""Five published custom gradients, as they are usually written: each rule keeps the output of an f that is opaque.

f computes in NumPy, or under stop_gradient, so no autodiff sees through it. The derivative of the derivative goes
through what the rule keeps, the op's own output, whose derivative is again the rule's.
"""

import numpy as np

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_dtype,
    op_stop_gradient,
    op_vjp,
    ops,
)


def in_numpy(kernel, *tensors):
    """The arrays that a kernel makes of arrays, as tensors; the framework knows nothing of how they came about."""
    results = kernel(*map(op_convert_to_numpy, tensors))
    return [op_convert_to_tensor(result, op_dtype(tensors[0])) for result in results]


def constant(array, like):
    return op_convert_to_tensor(array, op_dtype(like))


# --- entmax, a sparse softmax (Peters, Niculae and Martins 2019): a threshold, found by bisection --------------------


def bisect_threshold(scores):
    """The t at which the squares of what exceeds it, of scores / 2, sum to one."""
    halves = scores / 2
    low, high = halves.max(-1, keepdims=True) - 1, halves.max(-1, keepdims=True)
    for _ in range(60):
        middle = (low + high) / 2
        too_low = (np.maximum(halves - middle, 0) ** 2).sum(-1, keepdims=True) >= 1
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    return [np.maximum(halves - low, 0) ** 2]


@op_custom_gradient
def entmax(scores):
    """1.5-entmax over the last axis."""
    (probabilities,) = in_numpy(bisect_threshold, scores)

    def grad(upstream):
        support = probabilities > 0
        roots = ops.sqrt(ops.where(support, probabilities, ops.ones_like(probabilities)))
        slopes = ops.where(support, roots, ops.zeros_like(roots))
        weighted = slopes * upstream
        mean = ops.sum(weighted, axis=-1) / ops.sum(slopes, axis=-1)
        return weighted - slopes * mean[..., None]

    return probabilities, grad


# --- A deep equilibrium (Bai, Kolter and Koltun 2019): the implicit function theorem at the point that was found ------


def iterate(weights, x):
    z = np.zeros_like(x)
    for _ in range(200):
        z = np.tanh(weights @ z + x)
    return [z]


@op_custom_gradient
def equilibrium(weights, x):
    """The column z of z = tanh(weights z + x)."""
    (z,) = in_numpy(iterate, weights, x)

    def grad(upstream):
        slope = 1 - z * z
        identity = constant(np.eye(x.shape[0]), x)
        adjoint = ops.linalg.solve(ops.transpose(identity - slope * weights), upstream)
        of_sum = slope * adjoint
        return ops.matmul(of_sum, ops.transpose(z)), of_sum

    return z, grad


# --- A reversible block (Gomez, Ren, Urtasun and Grosse 2017): the rule gets the inputs back from the outputs ---------


def layer(x, weights):
    return ops.tanh(ops.matmul(x, weights))


@op_custom_gradient
def reversible(x1, x2, weights1, weights2):
    """y1 = x1 + layer(x2), y2 = x2 + layer(y1); of the activations it keeps the outputs alone."""
    y1 = op_stop_gradient(x1 + layer(x2, weights1))
    y2 = op_stop_gradient(x2 + layer(y1, weights2))

    def grad(upstream):
        of_y1, of_y2 = upstream
        moved, pullback = op_vjp(layer, y1, weights2)
        of_first, of_weights2 = pullback(of_y2)
        of_x1 = of_y1 + of_first
        _, pullback = op_vjp(layer, y2 - moved, weights1)
        of_second, of_weights1 = pullback(of_x1)
        return of_x1, of_y2 + of_second, of_weights1, of_weights2

    return (y1, y2), grad


# --- A symmetric eigenproblem (Giles 2008): the rule is written in eigenvalues and eigenvectors -----------------------


def solve_eigenproblem(matrix):
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return values, vectors * np.sign(vectors[abs(vectors).argmax(0), range(len(values))])


@op_custom_gradient
def eigh(matrix):
    """The eigenvalues and eigenvectors of the symmetric part of a matrix."""
    values, vectors = in_numpy(solve_eigenproblem, matrix)

    def grad(of_values, of_vectors):
        identity = constant(np.eye(matrix.shape[0]), matrix)
        gaps = values[None, :] - values[:, None] + identity
        mixing = (1 - identity) / gaps * ops.matmul(ops.transpose(vectors), of_vectors)
        inner = identity * of_values[:, None] + mixing
        gradient = ops.matmul(ops.matmul(vectors, inner), ops.transpose(vectors))
        return (gradient + ops.transpose(gradient)) / 2

    return (values, vectors), grad


# --- A neural differential equation (Chen, Rubanova, Bettencourt and Duvenaud 2018): the adjoint, back from the end ---

STEPS = 20


def runge_kutta(slope, state):
    """The state after one unit of time, of `slope(state)`: lists of arrays, or of tensors."""
    step = 1 / STEPS
    moved = lambda by, slopes: [x + by * k for x, k in zip(state, slopes, strict=True)]
    for _ in range(STEPS):
        first = slope(state)
        second = slope(moved(step / 2, first))
        third = slope(moved(step / 2, second))
        fourth = slope(moved(step, third))
        slopes = [(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(first, second, third, fourth, strict=True)]
        state = moved(step, slopes)
    return state


def integrate(weights, y):
    return runge_kutta(lambda state: [np.tanh(weights @ state[0])], [y])


@op_custom_gradient
def neural_ode(weights, y):
    """The column y after one unit of time, of y' = tanh(weights y)."""
    (end,) = in_numpy(integrate, weights, y)

    def grad(upstream):
        def backwards(state):
            y, adjoint, _ = state
            change = ops.tanh(ops.matmul(weights, y))
            of_sum = (1 - change * change) * adjoint
            return [-change, ops.matmul(ops.transpose(weights), of_sum), ops.matmul(of_sum, ops.transpose(y))]

        _, of_y, of_weights = runge_kutta(backwards, [end, upstream, 0 * weights])
        return of_weights, of_y

    return end, grad
