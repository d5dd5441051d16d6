"""A product of two arguments, with one gradient for each, asked twice.

The documented example of several arguments: 6 at (2, 3), with the gradients 3 and 2.
"""

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_custom_gradient, op_vjp


@op_custom_gradient
def product(x, y):
    return x * y, lambda upstream: (upstream * y, upstream * x)


def main():
    x, y = (op_convert_to_tensor(value, "float32") for value in (2.0, 3.0))
    value, pullback = op_vjp(product, x, y)
    print("product at (2, 3):", float(op_convert_to_numpy(value)))
    for upstream in (1.0, 10.0):
        gradients = pullback(op_convert_to_tensor(upstream, "float32"))
        print(
            f"gradients for upstream {upstream}:",
            *(float(op_convert_to_numpy(g)) for g in gradients),
        )


if __name__ == "__main__":
    main()
