"""A fused kernel that returns its value and its first derivative: an op inside the rule gives the
second.

The kernel is opaque (it computes in NumPy, detached), so no autodiff can see through it. The inner
op says what the derivative of the derivative is: on purpose 5 times the true one, to show that it
is asked.
"""

import numpy as np

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_custom_gradient, op_grad


def fused_kernel(x):
    """x**4 and its derivative, in one go."""
    return x**4, 4 * x**3


@op_custom_gradient
def quartic(x):
    value, derivative = fused_kernel(x)

    @op_custom_gradient
    def first_derivative(x):
        return derivative, lambda upstream: upstream * (5 * 12 * x**2)

    return value, lambda upstream: upstream * first_derivative(x)


def main():
    x = op_convert_to_tensor(2.0, "float32")
    first, second = op_grad(quartic), op_grad(op_grad(quartic))
    for name, fn in [
        ("value", quartic),
        ("first derivative", first),
        ("second derivative, times 5", second),
    ]:
        print(f"{name}: {np.round(op_convert_to_numpy(fn(x)), 3)}")


if __name__ == "__main__":
    main()
