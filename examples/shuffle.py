"""A function without a derivative, whose rule hands the upstream gradient through.

The rows are shuffled in NumPy, and the result is a constant to every framework: the rule alone
makes it trainable.
"""

import numpy as np

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_stop_gradient,
    op_vjp,
)


@op_custom_gradient
def shuffle(x, *, seed=0):
    rows = np.random.default_rng(seed).permutation(x.shape[0])
    shuffled = op_stop_gradient(op_convert_to_numpy(x)[rows])
    return shuffled, lambda upstream: upstream


def main():
    x = op_convert_to_tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], "float32")
    value, pullback = op_vjp(shuffle, x)
    print(op_convert_to_numpy(value))
    print(
        op_convert_to_numpy(
            pullback(op_convert_to_tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32"))[0]
        )
    )


if __name__ == "__main__":
    main()
