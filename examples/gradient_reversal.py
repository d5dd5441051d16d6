"""Domain adaptation: digits with a watermark that tells the label away teach a network to read
those without.

The labelled digits bear their label in binary in the left margin; the digits that the network is
for bear none, and no label. A classifier leans on the watermark. Gradient reversal puts a second
classifier behind its features, which learns to tell where a digit comes from, while the features
learn, by the gradient of the opposite sign, to hide it. (Ganin and Lempitsky, "Unsupervised domain
adaptation by backpropagation", 2015.)
"""

import numpy as np
from _picture import panels, picture_path
from _training import accuracy, adam, cross_entropy, digits, first_weights, one_hot

from cgshim import (
    op_abs,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_exp,
    op_log1p,
    op_maximum,
    op_mean,
    op_tanh,
)

LABELLED = 600
STEPS = 300


@op_custom_gradient(forward_mode=True)
def reverse_gradient(x, strength):
    return x, lambda upstream: -strength * upstream


def watermarked(images, labels):
    marked = images.copy()
    marked[:, [0, 16, 32, 48]] = 2.0 * (labels[:, None] >> np.arange(4) & 1)
    return marked


def unmarked(images):
    return watermarked(images, np.zeros(len(images), int))


def features(images, weights):
    return op_tanh(images @ weights[0])


def logits(images, weights):
    return features(images, weights) @ weights[1]


def origin(features, weights):
    """The log-odds that a digit comes from the labelled ones."""
    return op_tanh(features @ weights[2]) @ weights[3]


def softplus(x):
    return op_mean(op_maximum(x, 0.0) + op_log1p(op_exp(-op_abs(x))))


def train(strength):
    """Weights that classify the labelled digits and, as far as strength says, hide which they are."""
    (images, labels), _ = digits()
    labelled = op_convert_to_tensor(watermarked(images[:LABELLED], labels[:LABELLED]))
    others = op_convert_to_tensor(unmarked(images[LABELLED:]))
    target = one_hot(labels[:LABELLED])

    def loss(weights):
        of_labelled, of_others = features(labelled, weights), features(others, weights)
        loss_of_labels = cross_entropy(of_labelled @ weights[1], target)
        hidden = [reverse_gradient(of, strength) for of in (of_labelled, of_others)]
        loss_of_origin = 0.5 * (
            softplus(-origin(hidden[0], weights)) + softplus(origin(hidden[1], weights))
        )
        return loss_of_labels + loss_of_origin

    *_, weights = adam(loss, first_weights(0, 64, 64, 10) + first_weights(1, 64, 64, 1), STEPS)
    return weights


def main(picture=None):
    _, (images, labels) = digits()
    seen_by = {}
    for name, strength in [("no reversal", 0.0), ("with reversal", 0.2)]:
        weights = train(strength)
        marked, plain = (
            op_convert_to_tensor(x) for x in (watermarked(images, labels), unmarked(images))
        )
        right = [accuracy(logits(x, weights), labels) for x in (marked, plain)]
        print(
            f"{name}: {right[0]:.0%} of the unseen watermarked digits right, {right[1]:.0%} of the plain ones"
        )
        seen_by[f"{name}: {right[1]:.0%}"] = [
            op_convert_to_numpy(features(x, weights)) for x in (marked, plain)
        ]
    if picture:
        draw(seen_by, picture)


def draw(seen_by, path):
    with panels(path, 2) as axes:
        for axis, (name, seen) in zip(axes, seen_by.items(), strict=True):
            stacked = np.concatenate(seen)
            directions = np.linalg.svd(stacked - stacked.mean(0), full_matrices=False)[2][:2].T
            for label, of in zip(("watermarked", "plain"), seen, strict=True):
                axis.scatter(*((of - stacked.mean(0)) @ directions).T, s=4, label=label)
            axis.set(
                title=f"{name} of the plain digits right",
                xlabel="features, by principal components",
            )
        axes[0].legend()


if __name__ == "__main__":
    main(picture_path())
