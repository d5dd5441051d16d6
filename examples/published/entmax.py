"""Entmax, a softmax that gives exact zeros: alpha, which is learnt, is 2 for sparsemax.

Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models"; the gradient of alpha:
Correia, Niculae and Martins 2019, "Adaptively Sparse Transformers". Published as
EntmaxBisectFunction in deep-spin/entmax, `entmax/root_finding.py`. The rule keeps the
probabilities, the op's output: every order is right, whatever the solver.
"""

from cgshim import op_custom_gradient, ops


def total(x):
    return ops.sum(x, axis=-1, keepdims=True)


def bisect(scores, alpha):
    """max((alpha - 1) scores - t, 0) ** (1 / (alpha - 1)), for the t at which the sum is one."""
    scaled = (alpha - 1) * scores
    at = lambda t: ops.maximum(scaled - t, 0.0) ** (1 / (alpha - 1))
    t, width = ops.max(scaled, axis=-1, keepdims=True) - 1, 1.0
    for _ in range(50):
        width = width / 2
        t = ops.where(total(at(t + width)) >= 1, t + width, t)
    return at(t) / total(at(t))


@op_custom_gradient
def entmax(scores, alpha):
    """The probabilities over the last axis; alpha, above 1, is a tensor that broadcasts to scores."""
    p = bisect(ops.stop_gradient(scores), ops.stop_gradient(alpha))  # nothing records its steps

    def grad(upstream):
        support = p > 0
        # without zeros, whose logarithms and powers are infinite
        inside = ops.where(support, p, ops.ones_like(p))
        slopes = ops.where(support, inside ** (2 - alpha), ops.zeros_like(p))
        share = slopes / total(slopes)
        entropy = -p * ops.log(inside)
        by_alpha = (p - share) / (alpha - 1) ** 2 + (entropy - share * total(entropy)) / (alpha - 1)
        of_scores = slopes * (upstream - total(share * upstream))
        return of_scores, ops.sum_to_shape(upstream * by_alpha, alpha)

    return p, grad
