"""geomstats 2.8: custom_gradient once, for its backends of PyTorch and of autograd.

It stands in the place of geomstats/_backend/pytorch/autodiff.py's, a torch.autograd.Function, and
of geomstats/_backend/autograd/autodiff.py's, a primitive with as many copies of a line as it has
arguments, three at most.
"""

from cgshim import op_custom_gradient, ops


def custom_gradient(*grad_funcs):
    """Return a decorator that gives a function these gradients, one for each argument."""

    def decorator(func):
        def f(*args):
            def grad(*args, upstream, needs_input_grad):
                return [
                    scaled(of_x(*args), upstream) if is_needed else None
                    for of_x, is_needed in zip(grad_funcs, needs_input_grad, strict=False)
                ]

            return func(*args), grad

        return op_custom_gradient(f, name=func.__name__)

    return decorator


def scaled(gradients, upstream):
    """Return a gradient for each point, times the upstream gradient of its value."""
    missing = [1] * (ops.ndim(gradients) - ops.ndim(upstream))
    return ops.reshape(upstream, [*upstream.shape, *missing]) * gradients


def install():
    """Let geomstats have this custom_gradient."""
    import geomstats.backend as gs

    gs.autodiff.custom_gradient = custom_gradient
