"""The k nearest neighbours: found by SciPy's tree on the host, at differentiable distances.

Published as _knn_points in facebookresearch/pytorch3d, `pytorch3d/ops/knn.py`, whose search is a
C++ and a CUDA kernel. The rule keeps the points and the indices, which are integers: so no order
runs the search again.
"""

import scipy.spatial

from cgshim import Spec, op_custom_gradient, op_host, ops


@op_host(outputs=lambda queries, points, *, k: Spec((queries.shape[0], k), "int32"))
def search(queries, points, *, k):
    return scipy.spatial.cKDTree(points).query(queries, range(1, k + 1))[1].astype("int32")


@op_custom_gradient
def nearest_neighbours(queries, points, *, k):
    """Squared distances [n, k] of queries [n, d] to the nearest of points [m, d], and indices."""
    if k > (n := points.shape[0]):
        raise ValueError(
            f"nearest_neighbours: k must be at most {n}, the number of points, got {k}"
        )
    indices = search(queries, points, k=k)
    differences = lambda: queries[:, None] - ops.take(points, indices, axis=0)

    def grad(upstream):
        of_differences = 2 * upstream[0][..., None] * differences()
        rows = ops.reshape(of_differences, (-1, points.shape[1]))
        of_points = ops.index_add(ops.zeros_like(points), ops.ravel(indices), -rows)
        return ops.sum(of_differences, axis=1), of_points

    return (ops.sum(differences() ** 2, axis=-1), indices), grad
