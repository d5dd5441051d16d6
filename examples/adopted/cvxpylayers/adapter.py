"""cvxpylayers 1.2: one layer for PyTorch and JAX, compiled or not, by one function in NumPy.

It stands in the place of a torch.autograd.Function (diffcp_if.py), a jax.custom_vjp that cannot be
compiled (jax/cvxpylayer.py), and JAX's own copies of what prepares, solves and differentiates.
"""

from __future__ import annotations

from typing import Any

import diffcp
import numpy as np
from cvxpy.reductions.solvers.conic_solvers.scs_conif import dims_to_solver_dict
from cvxpylayers.interfaces.diffcp_if import _build_diffcp_matrices, _compute_gradients

from cgshim import Spec, op_custom_gradient


def primal_and_dual(q: Spec, constraints: Spec, *, solver: Any, **_: Any) -> tuple[Spec, Spec]:
    """Return the shapes of the solution: rows for problems, which come in columns."""
    problems = 1 if len(constraints.shape) == 1 else constraints.shape[1]
    rows, columns = solver.A_shape
    return tuple(Spec((problems, size), constraints.dtype) for size in (columns - 1, rows))


@op_custom_gradient(host_outputs=primal_and_dual, once_differentiable=True, name="CvxpyLayer")
def solve(q, constraints, *, solver, solver_args, needs_input_grad):
    columns = [x.reshape(len(x), -1).astype(np.float64) for x in (constraints, q)]
    count = columns[0].shape[1]
    matrices, bs, cs, places = _build_diffcp_matrices(
        *columns, solver.A_structure, solver.A_shape, solver.b_idx, count
    )
    problems = matrices, bs, cs, [dims_to_solver_dict(solver.dims)] * count
    options = {**solver.options, **(solver_args or {})}
    if any(needs_input_grad):
        primal, dual, _, _, adjoint = diffcp.solve_and_derivative_batch(*problems, **options)
    else:
        primal, dual, _ = diffcp.solve_only_batch(*problems, **options)

    def grad(of_primal, of_dual):
        of_q, of_constraints = _compute_gradients(adjoint, of_primal, of_dual, bs, places, count)
        return tuple(
            np.stack(of_x, axis=1).reshape(x.shape).astype(x.dtype)
            for of_x, x in ((of_q, q), (of_constraints, constraints))
        )

    return tuple(np.stack(x).astype(q.dtype) for x in (primal, dual)), grad


def install():
    """Let cvxpylayers solve by this function, in both frameworks."""
    from cvxpylayers.interfaces import diffcp_if
    from cvxpylayers.jax import cvxpylayer as in_jax

    class CvxpyLayer:
        """What PyTorch's layer applies."""

        @staticmethod
        def apply(quadratic, q, constraints, layer, solver_args, needs_grad, warm_start):
            solver = layer.solver_ctx
            return *solve(q, constraints, solver=solver, solver_args=solver_args), None, None

    def solve_with_custom_vjp(self, quadratic, q, constraints, batch, solver_args):
        solver = self.ctx.solver_ctx
        solution = solve(q, constraints, solver=solver, solver_args=solver_args)
        return in_jax._recover_results(*solution, self.ctx, batch)

    diffcp_if._CvxpyLayer = CvxpyLayer
    in_jax.CvxpyLayer._solve_with_custom_vjp = solve_with_custom_vjp
