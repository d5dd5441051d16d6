"""A symmetric eigenproblem (Giles 2008): the rule is written in the eigenvalues and eigenvectors,
the op's outputs.

f computes in NumPy, so no autodiff sees through it. The derivative of the derivative goes through
what the rule keeps, the op's own output, whose derivative is again the rule's.
"""

import numpy as np

from cgshim import Spec, op_custom_gradient, op_host, ops


@op_host(outputs=lambda matrix: (Spec(matrix.shape[:1], matrix.dtype), matrix))
def solve(matrix):
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return values, vectors * np.sign(vectors[abs(vectors).argmax(0), range(len(values))])


@op_custom_gradient
def eigh(matrix):
    """The eigenvalues and eigenvectors of the symmetric part of a matrix."""
    values, vectors = solve(matrix)

    def grad(of_values, of_vectors):
        identity = ops.diag(ops.ones_like(values))
        gaps = values[None, :] - values[:, None] + identity
        mixing = (1 - identity) / gaps * ops.matmul(ops.transpose(vectors), of_vectors)
        inner = identity * of_values[:, None] + mixing
        gradient = ops.matmul(ops.matmul(vectors, inner), ops.transpose(vectors))
        return (gradient + ops.transpose(gradient)) / 2

    return (values, vectors), grad
