"""A digits classifier whose weights are -1, 0 or 1 and whose units have five levels, trained
straight through them.

The derivative of rounding is zero wherever it exists, so plain autodiff learns nothing. The
straight-through rule hands the upstream gradient on as if nothing had been rounded, wherever
nothing was clipped.
"""

from _picture import panels, picture_path
from _training import accuracy, adam, cross_entropy, digits, first_weights, one_hot

from cgshim import op_abs, op_cast, op_clip, op_convert_to_tensor, op_custom_gradient, op_floor

STEPS = 200


def rounded(x, levels):
    """x, clipped to -1 .. 1 and rounded to `levels` steps on each side of 0; autodiff finds no
    gradient.
    """
    return op_floor(op_clip(x, -1.0, 1.0) * levels + 0.5) / levels


@op_custom_gradient
def quantise(x, levels):
    not_clipped = op_cast(op_abs(x) <= 1.0, x.dtype)
    return rounded(x, levels), lambda upstream: upstream * not_clipped


def classify(images, weights, quantiser):
    """The logits of a 64-48-10 network, all of it quantised."""
    hidden, out = (quantiser(w, 1) for w in weights)
    return 0.5 * quantiser(0.5 * images @ hidden, 2) @ out


def train(quantiser):
    """The accuracy on unseen digits after each tenth step, with this quantiser's gradient."""
    (images, labels), (unseen, unseen_labels) = digits()
    images, unseen, target = (
        op_convert_to_tensor(images),
        op_convert_to_tensor(unseen),
        one_hot(labels),
    )
    weights = [2.0 * w for w in first_weights(0, 64, 48, 10)]
    steps = adam(lambda w: cross_entropy(classify(images, w, quantiser), target), weights, STEPS)
    return [
        accuracy(classify(unseen, w, quantiser), unseen_labels)
        for at, w in enumerate(steps, 1)
        if at % 10 == 0
    ]


def main(picture=None):
    curves = {"plain autodiff": train(rounded), "straight through": train(quantise)}
    for name, curve in curves.items():
        print(f"{name}: {curve[-1]:.0%} of the unseen digits right")
    if picture:
        draw(curves, picture)


def draw(curves, path):
    import numpy as np

    with panels(path, 2) as (left, right):
        for name, curve in curves.items():
            left.plot(range(10, STEPS + 1, 10), curve, label=name)
        left.set(
            title="a network of -1, 0 and 1",
            xlabel="step",
            ylabel="accuracy on unseen digits",
            ylim=(0, 1),
        )
        left.legend()
        x = np.linspace(-1.6, 1.6, 641)
        right.plot(x, rounded(x, 2), label="forward: five levels")
        right.plot(x, np.clip(x, -1, 1), "--", label="backward: as if it were this")
        right.set(title="the quantiser", xlabel="x")
        right.legend()


if __name__ == "__main__":
    main(picture_path())
