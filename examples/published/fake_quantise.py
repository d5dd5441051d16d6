"""Fake quantisation: x at the nearest of 2**bits levels between a trainable minimum and maximum.

Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference". Published as fake_quant_with_min_max_vars in TensorFlow, with a
gradient kernel of its own, and in keras-team/keras, `keras/src/quantizers/quantizers.py`. The
gradient goes straight through within the range; what was clipped moves it.
"""

from cgshim import op_custom_gradient, ops


def nudged(low, high, bits):
    """The range, moved a little so that 0 is a level, and the distance between levels."""
    step = (high - low) / (2**bits - 1)
    zero = ops.clip(ops.floor(0.5 - low / step), 0, 2**bits - 1)
    return -zero * step, (2**bits - 1 - zero) * step, step


@op_custom_gradient
def fake_quantise(x, low, high, *, bits=8):
    """x, quantised; low and high are one number each, or broadcast to x: one for each channel, for
    example.
    """
    bottom, top, step = nudged(low, high, bits)
    levels = ops.floor((ops.clip(x, bottom, top) - bottom) / step + 0.5)

    def grad(upstream):
        nothing = ops.zeros_like(upstream)
        below = ops.where(x < bottom, upstream, nothing)
        above = ops.where(x > top, upstream, nothing)
        within = ops.where((x < bottom) | (x > top), nothing, upstream)
        return within, ops.sum_to_shape(below, low), ops.sum_to_shape(above, high)

    return bottom + levels * step, grad
