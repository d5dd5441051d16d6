"""The focal loss, a cross entropy in which examples that are already classified well count less.

Lin, Goyal, Girshick, He and Dollar 2017, "Focal Loss for Dense Object Detection". Published as
sigmoid_focal_loss_jit in facebookresearch/fvcore, `fvcore/nn/focal_loss.py`. The rule is the closed
form of the derivative, in logarithms of probabilities: it is finite at every order, where autodiff
meets powers of a probability that is rounded to 0.
"""

from cgshim import op_custom_gradient, ops


@op_custom_gradient
def softplus(z):
    value = ops.maximum(z, 0.0) + ops.log1p(ops.exp(-ops.abs(z)))
    return value, lambda upstream: upstream * ops.exp(z - softplus(z))


@op_custom_gradient
def focal_loss(logits, targets, *, alpha=0.25, gamma=2.0):
    """The loss of each logit, for a target of 0 or 1 of the same shape and dtype."""
    sign = 1 - 2 * targets
    weight = ops.abs(targets - 1 + alpha)  # alpha for a target of 1, 1 - alpha for one of 0
    surprise = softplus(sign * logits)  # minus the logarithm of the target's probability
    # the other class's probability, to the power gamma
    focus = ops.exp(-gamma * softplus(-sign * logits))

    def grad(upstream):
        right, wrong = ops.exp(-surprise), ops.exp(-softplus(-sign * logits))
        return upstream * sign * weight * focus * (gamma * right * surprise + wrong), None

    return weight * focus * surprise, grad
