"""A sparse linear solver with its factorization kept for the gradient: heat flows through a plate,
and is measured.

SciPy factors the matrix once, in f; the rule solves with the same factors, transposed. What grad_fn
keeps is SciPy's own object, which no framework can look into. In compiled code too it is made once
for value and gradient.
"""

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_custom_gradient, op_grad, op_sum

SIDE = 24
factorizations = []


def conduction(conductivity):
    """The matrix of heat that flows between the cells of a plate, and out of it at its edges."""
    between = scipy.sparse.diags(
        [-np.ones(SIDE - 1), 2 * np.ones(SIDE), -np.ones(SIDE - 1)], [-1, 0, 1]
    )
    plate = scipy.sparse.kronsum(between, between)
    return (scipy.sparse.diags(conductivity) @ plate).tocsc(), plate


@op_custom_gradient(host_outputs=lambda conductivity, heat: heat)
def temperature(conductivity, heat):
    """The temperature of each cell, if that much heat is put into it."""
    matrix, plate = conduction(np.asarray(conductivity, "float64"))
    factors = scipy.sparse.linalg.splu(matrix)
    factorizations.append(matrix.shape)
    solution = factors.solve(np.asarray(heat, "float64"))

    def grad_fn(upstream):
        of_heat = factors.solve(np.asarray(upstream, "float64"), trans="T")
        return -of_heat * (plate @ solution), of_heat

    return solution, grad_fn


def misfit(conductivity, heat, measured):
    return op_sum((temperature(conductivity, heat) - measured) ** 2)


def main():
    generator = np.random.default_rng(0)
    truth = 1.0 + generator.random(SIDE * SIDE)
    heat = op_convert_to_tensor(generator.random(SIDE * SIDE))
    measured = temperature(op_convert_to_tensor(truth), heat)
    guess = op_convert_to_tensor(np.full(SIDE * SIDE, 1.5))

    factorizations.clear()
    gradient = op_convert_to_numpy(op_grad(misfit)(guess, heat, measured))
    print(f"factorizations for a value and its gradient: {len(factorizations)}")

    at, step = int(np.argmax(np.abs(gradient))), 1e-4
    moved = [op_convert_to_tensor(np.full(SIDE * SIDE, 1.5) + sign * step * np.eye(1, SIDE * SIDE, at)[0])
             for sign in (1, -1)]  # fmt: skip
    values = [float(op_convert_to_numpy(misfit(x, heat, measured))) for x in moved]
    difference = (values[0] - values[1]) / (2 * step)
    print(f"gradient in cell {at}: {gradient[at]:.3f}; by finite differences: {difference:.3f}")


if __name__ == "__main__":
    main()
