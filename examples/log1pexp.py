"""log(1 + exp(x)), whose gradient autodiff loses where exp(x) overflows, with the gradient that it has.

The numerically stable rule is the documented example of tf.custom_gradient and of keras.ops.custom_gradient. Here it
runs on the backend that CGSHIM_BACKEND names, or else on NumPy.
"""

import numpy as np

from cgshim import (
    config_backend,
    op_add,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_exp,
    op_log,
    op_multiply,
    op_value_and_grad,
)


@op_custom_gradient
def log1pexp(x):
    e = op_exp(x)

    def grad(upstream):
        return op_multiply(upstream, 1.0 - 1.0 / op_add(1.0, e))

    return op_log(op_add(1.0, e)), grad


def plain(x):
    return op_log(op_add(1.0, op_exp(x)))


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
