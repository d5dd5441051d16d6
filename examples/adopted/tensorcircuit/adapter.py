"""TensorCircuit-ng 1.10: the gradient of QR once, for JAX, PyTorch and TensorFlow.

It stands in the place of jax_ops.adaware_qr, pytorch_ops.torchqr and tf_ops.tfqr, which write the
same formula three times. All of them give a small entry on the diagonal of r a floor: the bond of a
tensor network may have more dimensions than its state.
"""

from cgshim import op_custom_gradient, ops

FLOOR = 1e-8


@op_custom_gradient
def qr(a):
    q, r = ops.linalg.qr(a)

    def grad(dq, dr):
        rows = q.shape[-1]
        if r.shape[-1] <= rows:
            return of_deep(q, r, dq, dr)
        wide, of_wide = (
            a[..., rows:],
            dr[..., rows:],
        )  # r's other columns are q's adjoint times these
        of_q = dq + wide @ adjoint(of_wide)
        of_rest = of_deep(q, r[..., :rows], of_q, dr[..., :rows])
        return ops.concatenate([of_rest, q @ of_wide], axis=-1)

    return (q, r), grad


def of_deep(q, r, dq, dr):
    """Return the gradient of a matrix with as many rows as columns, or more."""
    diagonal = ops.diagonal(r, axis1=-2, axis2=-1)
    lifted = ops.where(ops.abs(diagonal) < FLOOR, ops.full_like(diagonal, FLOOR), diagonal)
    eye = ops.eye(r.shape[-1], dtype=ops.dtype(r))
    r = r + eye * (lifted - diagonal)

    def divided(x):  # by the adjoint of r
        return adjoint(ops.linalg.solve_triangular(r, adjoint(x)))

    qdq, rdr = adjoint(q) @ dq, r @ adjoint(dr)
    inner = ops.tril(qdq - adjoint(qdq) + rdr - adjoint(rdr))
    if ops.dtype(q).startswith("complex"):
        surplus = ops.diagonal(rdr - adjoint(qdq), axis1=-2, axis2=-1)
        imaginary = (surplus - ops.conj(surplus)) / 2
        inner = inner + eye * ops.conj(imaginary)
    return q @ (dr + divided(inner)) + divided(dq - q @ qdq)


def adjoint(x):
    return ops.conj(ops.swapaxes(x, -1, -2))


def install():
    """Let TensorCircuit's backends have this gradient."""
    from tensorcircuit.backends import jax_ops, pytorch_ops, tf_ops

    jax_ops.adaware_qr_jit = tf_ops.tfqr = qr
    pytorch_ops.torchqr.apply = qr
