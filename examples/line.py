"""A line whose weights the function reads without being given them: the rule takes them as
`variables`.

The documented example of captured trainable state. The gradients that the rule gives the weights
are, in its order, the sums of dpoly * x and of dpoly: 6 and 3 at x = [1, 2, 3].
"""

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_stack,
    op_sum,
    op_vjp,
)


def line(x, weights):
    @op_custom_gradient
    def line_of(x):
        def grad(dpoly, variables=None):
            (w,) = variables
            return dpoly * w[1], [op_stack([op_sum(dpoly * x**1), op_sum(dpoly * x**0)])]

        return weights[1] * x + weights[0], grad

    return line_of(x)


def main():
    x = op_convert_to_tensor([1.0, 2.0, 3.0], "float32")
    weights = op_convert_to_tensor([1.0, 1.0], "float32")
    value, pullback = op_vjp(line, x, weights)
    of_x, of_weights = pullback(op_convert_to_tensor([1.0, 1.0, 1.0], "float32"))
    print("line:", op_convert_to_numpy(value))
    print("gradient of x:", op_convert_to_numpy(of_x))
    print("gradient of the weights:", op_convert_to_numpy(of_weights))


if __name__ == "__main__":
    main()
