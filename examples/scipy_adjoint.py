"""A SciPy routine with its adjoint: digits are sharpened by gradient descent through
scipy.ndimage.convolve.

The adjoint of the blur is the correlation with the same kernel, and that of the correlation is the
blur: two ops, each the rule of the other, so that every order is right. `op_host` runs SciPy's
routines in compiled code too.
"""

import numpy as np
import scipy.ndimage
from _picture import panels, picture_path
from _training import digits

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_grad,
    op_host,
    op_sum,
)

KERNEL = np.array([[0.4, 0.2, 0.0], [0.1, 0.2, 0.0], [0.0, 0.0, 0.1]], "float32")
STEPS = 100


@op_host(outputs=lambda image: image)
def convolve(image):
    return scipy.ndimage.convolve(image, KERNEL, mode="constant")


@op_host(outputs=lambda image: image)
def correlate(image):
    return scipy.ndimage.correlate(image, KERNEL, mode="constant")


@op_custom_gradient
def blur(image):
    return convolve(image), lambda upstream: adjoint_of_blur(upstream)


@op_custom_gradient
def adjoint_of_blur(image):
    return correlate(image), lambda upstream: blur(upstream)


def misfit(image, observed):
    return op_sum((blur(image) - observed) ** 2)


def sharpen(observed, step):
    """The image whose blur is the observed one, by Nesterov's accelerated gradient descent."""
    image, ahead = observed, observed
    for at in range(STEPS):
        last, image = image, ahead - 0.4 * step(ahead, observed)
        ahead = image + at / (at + 3) * (image - last)
    return image


def main(picture=None):
    (images, _), _ = digits()
    framed = np.pad(images[:8].reshape(2, 4, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])
    truth = framed.swapaxes(1, 2).reshape(20, 40)
    observed = blur(op_convert_to_tensor(truth))
    sharp = sharpen(observed, op_grad(misfit))
    shown = {"blurred": op_convert_to_numpy(observed), "sharpened": op_convert_to_numpy(sharp)}
    for name, image in shown.items():
        print(f"{name}: {np.sqrt(np.mean((image - truth) ** 2)):.4f} away from the truth")
    if picture:
        draw({"truth": truth, **shown}, picture)


def draw(images, path):
    with panels(path, 3, height=2.4) as axes:
        for axis, (name, image) in zip(axes, images.items(), strict=True):
            axis.imshow(image, cmap="gray", vmin=0, vmax=1)
            axis.set(title=name, xticks=[], yticks=[])


if __name__ == "__main__":
    main(picture_path())
