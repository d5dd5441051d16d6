"""The cross entropy of a linear layer's logits, a chunk of rows at a time: the logits are never in
memory as a whole.

Published as LigerFusedLinearCrossEntropyFunction in linkedin/Liger-Kernel,
`src/liger_kernel/ops/fused_linear_cross_entropy.py` (Hsu et al. 2024, "Liger Kernel: Efficient
Triton Kernels for LLM Training"), with kernels in Triton. f finds the gradients too, and keeps them
alone; as there, they have no derivative.
"""

from cgshim import op_custom_gradient, ops


def chunk_of_loss(x, weight, labels):
    """The sum of the rows' losses, and its gradients by the logits."""
    log_p = ops.special.log_softmax(ops.matmul(x, ops.transpose(weight)), axis=-1)
    target = ops.cast(labels[:, None] == ops.arange(weight.shape[0]), log_p.dtype)
    return -ops.sum(target * log_p), ops.exp(log_p) - target


@op_custom_gradient(once_differentiable=True)
def linear_cross_entropy(x, weight, labels, *, chunk=256):
    """The mean loss of the rows x [n, d], for a weight [classes, d] and integer labels [n]."""
    rows, loss, of_x, of_weight = x.shape[0], 0.0, [], ops.zeros_like(weight)
    for start in range(0, rows, chunk):
        part = x[start : start + chunk]
        of_part, of_logits = chunk_of_loss(part, weight, labels[start : start + chunk])
        loss = loss + of_part / rows
        of_x.append(ops.matmul(of_logits, weight) / rows)
        of_weight = of_weight + ops.matmul(ops.transpose(of_logits), part) / rows
    of_x = ops.concatenate(of_x)
    return loss, lambda upstream: (upstream * of_x, upstream * of_weight, None)
