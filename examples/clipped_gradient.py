"""A recurrent network on a cliff of its loss: the gradient would throw the descent away, and so it
is clipped.

The network h <- w * h + b, ten times over, is to arrive at 1. Where w is larger than 1 its gradient
explodes. (Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
2013.)
"""

import numpy as np
from _picture import panels, picture_path

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_minimum,
    op_sqrt,
    op_sum,
    op_value_and_grad,
)

START = [1.2, 0.5]
STEPS = 200
RATE = 0.005


@op_custom_gradient
def clip_gradient(x, norm):
    def grad(upstream):
        length = op_sqrt(op_sum(upstream * upstream))
        return upstream * op_minimum(1.0, norm / (length + 1e-12))

    return x, grad


def loss(weights):
    w, b = weights[0], weights[1]
    h = 0.0 * w
    for _ in range(10):
        h = w * h + b
    return (h - 1.0) ** 2


def clipped_loss(weights):
    return loss(clip_gradient(weights, 1.0))


def descend(of):
    """The loss and the weights at each step, as far as they are finite, and the length of the first
    step.
    """
    weights, losses, path, steps = op_convert_to_tensor(START, "float32"), [], [], []
    for _ in range(STEPS):
        value, gradient = op_value_and_grad(of)(weights)
        if not np.isfinite(op_convert_to_numpy(value)):
            break
        losses.append(float(op_convert_to_numpy(value)))
        path.append(op_convert_to_numpy(weights))
        steps.append(RATE * float(np.linalg.norm(op_convert_to_numpy(gradient))))
        weights = weights - RATE * gradient
    return losses, np.array(path), steps[0]


def main(picture=None):
    with np.errstate(over="ignore", invalid="ignore"):  # NumPy alone warns of it
        descents = {"plain gradient": descend(loss), "clipped gradient": descend(clipped_loss)}
    for name, (losses, _, first_step) in descents.items():
        end = "" if len(losses) == STEPS else ", and is no longer finite"
        print(f"{name}: a first step of {first_step:.3g}; ", end="")
        print(f"the loss goes from {losses[0]:.3g} to {losses[-1]:.2g} in {len(losses)} steps{end}")
    if picture:
        draw(descents, picture)


def draw(descents, path):
    w, b = np.meshgrid(np.linspace(0.3, 1.7, 80), np.linspace(-0.6, 0.8, 80))
    with panels(path, 2) as (left, right):
        landscape = left.contourf(w, b, np.log10(loss([w, b]) + 1e-6), 20)
        left.figure.colorbar(landscape, ax=left, label="log10 of the loss")
        for (name, (losses, way, _)), style in zip(descents.items(), ["ro-", "w.-"], strict=True):
            left.plot(*way.T, style, markersize=3, label=name)
            right.semilogy(losses, style.replace("w", "C0"), markersize=3, label=name)
        left.set(title="down the cliff", xlabel="w", ylabel="b", xlim=(0.3, 1.7), ylim=(-0.6, 0.8))
        left.legend(loc="lower right", facecolor="grey")
        right.set(title="the loss, as long as it is finite", xlabel="step", ylim=(1e-15, 1e18))
        right.legend()


if __name__ == "__main__":
    main(picture_path())
