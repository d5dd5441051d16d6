"""A matrix product in float8: e4m3 in the forward pass and e5m2 for the upstream gradient, each
scaled to its range.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Published as
matmul_with_hp_or_float8_args in pytorch/ao, `torchao/float8/float8_linear.py`. The rounding is
emulated in the tensors' own dtype, because not every framework has float8, and is the same on all.
"""

from cgshim import op_custom_gradient, ops

E4M3 = 3, range(-6, 9), 448.0
E5M2 = 2, range(-14, 16), 57344.0
"""how many bits the mantissa has, the exponents, and the largest number"""


def round_to(x, mantissa, exponents, largest):
    """x, rounded to the nearest number of the format, and of two as near to the even one."""
    powers = ops.convert_to_tensor([2.0**exponent for exponent in exponents], x.dtype)
    below = ops.searchsorted(powers, ops.ravel(ops.abs(x))) - 1
    spacing = ops.take(powers, ops.maximum(below, 0)) / 2**mantissa
    spacing = ops.reshape(spacing, x.shape)
    return ops.clip(ops.rint(x / spacing) * spacing, -largest, largest)


def in_float8(x, kind):
    """x as a scaled float8 tensor holds it: the largest element becomes the largest number of the
    format.
    """
    scale = kind[-1] / ops.maximum(ops.max(ops.abs(x)), 1e-12)
    return round_to(x * scale, *kind) / scale


@op_custom_gradient(once_differentiable=True)
def matmul_in_float8(x, weight):
    """x @ weight for matrices, with both factors in e4m3, and the upstream gradient in e5m2."""
    x, weight = in_float8(x, E4M3), in_float8(weight, E4M3)

    def grad(upstream):
        upstream = in_float8(upstream, E5M2)
        return ops.matmul(upstream, ops.transpose(weight)), ops.matmul(ops.transpose(x), upstream)

    return ops.matmul(x, weight), grad
