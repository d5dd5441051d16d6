"""log(1 + exp(x)), whose value and gradient overflow where exp(x) does, with both as they are.

It runs on the backend that CGSHIM_BACKEND names, or else on NumPy. The documented example of
tf.custom_gradient and of keras.ops.custom_gradient has a stable rule for a value that still
overflows: docs/learn.md shows it.
"""

import numpy as np

from cgshim import (
    config_backend,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_value_and_grad,
    ops,
)


@op_custom_gradient
def log1pexp(x):
    value = ops.maximum(x, 0.0) + ops.log1p(ops.exp(-ops.abs(x)))

    def grad(upstream):
        return upstream * ops.exp(x - log1pexp(x))

    return value, grad


def plain(x):
    return ops.log(1.0 + ops.exp(x))


def main():
    x = op_convert_to_tensor(100.0, "float32")
    print(f"log(1 + exp(x)) at x = 100 in float32, on {config_backend() or 'numpy'}")
    print(f"{'':20}{'value':>8}{'gradient':>10}")
    for name, fn in [("plain autodiff", plain), ("log1pexp", log1pexp)]:
        value, gradient = (float(op_convert_to_numpy(t)) for t in op_value_and_grad(fn)(x))
        print(f"{name:20}{value:8}{gradient:10}")


if __name__ == "__main__":
    with np.errstate(all="ignore"):  # NumPy alone warns that exp(100) overflows a float32
        main()
