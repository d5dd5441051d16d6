"""Boxes are autograd's to others."""

import autoray

from cgshim import op_custom_gradient, op_grad


def test_a_library_sees_autograd_in_the_boxes_of_a_second_order():
    seen = []

    @op_custom_gradient
    def square(x):
        def grad(upstream):
            seen.append(autoray.infer_backend(x))
            return upstream * 2 * x

        return x * x, grad

    assert op_grad(op_grad(square))(3.0) == 2.0
    assert set(seen) == {"autograd"}
