"""Functions whose plain autodiff is nan where it matters, with rules that are right there, at every
order.

Each rule asks for the op again instead of keeping its value: what is differentiated once more is
then the rule, and never the formula underneath.
"""

import math

import numpy as np

from cgshim import (
    op_abs,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_exp,
    op_expm1,
    op_log,
    op_log1p,
    op_max,
    op_maximum,
    op_ones_like,
    op_sinh,
    op_sqrt,
    op_sum,
    op_tanh,
    op_value_and_grad,
    op_where,
)


@op_custom_gradient(forward_mode=True)
def log1pexp(x):
    value = op_maximum(x, 0.0) + op_log1p(op_exp(-op_abs(x)))
    return value, lambda upstream: upstream * op_exp(x - log1pexp(x))


@op_custom_gradient(forward_mode=True)
def logsumexp(x):
    largest = op_max(x)
    value = largest + op_log(op_sum(op_exp(x - largest)))
    return value, lambda upstream: upstream * op_exp(x - logsumexp(x))


@op_custom_gradient(forward_mode=True)
def safe_norm(x):
    def grad(upstream):
        norm = safe_norm(x)
        return upstream * x / op_where(norm > 0.0, norm, op_ones_like(norm))

    return op_sqrt(op_sum(x * x)), grad


@op_custom_gradient(forward_mode=True)
def log_sinh(x):
    value = x + op_log(-op_expm1(-2.0 * x)) - math.log(2.0)
    return value, lambda upstream: upstream / op_tanh(x)


CASES = {
    "log1pexp": (log1pexp, lambda x: op_log(1.0 + op_exp(x)), 100.0),
    "logsumexp": (logsumexp, lambda x: op_log(op_sum(op_exp(x))), [100.0, 99.0]),
    "safe norm": (safe_norm, lambda x: op_sqrt(op_sum(x * x)), [0.0, 0.0]),
    "log sinh": (log_sinh, lambda x: op_log(op_sinh(x)), 100.0),
}


def shown(tensor):
    return np.array2string(op_convert_to_numpy(tensor), precision=4, floatmode="fixed")


def main():
    print(f"{'':12}{'at':15}{'':8}{'value':>10}  gradient")
    for name, (op, plain, at) in CASES.items():
        x = op_convert_to_tensor(at, "float32")
        for spelling, fn in [("plain", plain), ("op", op)]:
            value, gradient = op_value_and_grad(fn)(x)
            print(f"{name:12}{at!s:15}{spelling:8}{shown(value):>10}  {shown(gradient)}")


if __name__ == "__main__":
    with np.errstate(all="ignore"):  # NumPy alone warns of an overflow
        main()
