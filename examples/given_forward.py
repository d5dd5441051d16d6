"""logsumexp with one rule, given forward: the tangent of the output along that of the argument.

It is the derivative as a textbook has it. Forward mode calls it, and reverse mode takes its
transpose, the softmax. It reads the output, so that every order is as stable as the first.
"""

import numpy as np

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_jvp,
    op_exp,
    op_grad,
    op_log,
    op_max,
    op_sum,
)


@op_custom_jvp
def logsumexp(x):
    largest = op_max(x)
    value = largest + op_log(op_sum(op_exp(x - largest)))
    return value, lambda dx: op_sum(op_exp(x - value) * dx)


def along(direction):
    """The derivative of logsumexp along a direction, as a function of x."""
    return lambda x: op_sum(op_grad(logsumexp)(x) * direction)


def shown(tensor):
    return np.array2string(op_convert_to_numpy(tensor), precision=4, floatmode="fixed")


def main():
    x, direction = (op_convert_to_tensor(v, "float32") for v in ([100.0, 99.0], [1.0, -1.0]))
    print("value                    ", shown(logsumexp(x)))
    print("gradient                 ", shown(op_grad(logsumexp)(x)))
    print("along (1, -1)            ", shown(along(direction)(x)))
    print("gradient along (1, -1)   ", shown(op_grad(along(direction))(x)))


if __name__ == "__main__":
    main()
