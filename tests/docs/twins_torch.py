"""Rows of docs/porting.md by hand, as a torch.autograd.Function, and with cgshim."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import jvp, vmap
from twins import Twins

from cgshim import op_custom_gradient, op_custom_jvp, op_stop_gradient, op_sum_to_shape, op_vjp

W = torch.tensor([2.0, -3.0, 5.0, 0.5], dtype=torch.float64)
twins = Twins(
    {
        "`forward`, `setup_context`": "sorted_values",
        "`backward`": "linear",
        "`MyFunction.apply`": "linear",
        "`ctx.save_for_backward(x)`, `ctx.number = 2`": "linear",
        "`ctx` passed to helpers": "softsign",
        "`ctx.needs_input_grad`": "linear",
        "parameters that forward reads in a module": "test_parameters_of_a_module_in_torch",
        "`vmap(info, in_dims, *args)`": "test_torch_rules_for_batches.py",
        "`info.batch_size`, `in_dims`, `out_dims`": "test_torch_rules_for_batches.py",
        "`torch.amp.custom_fwd`, `custom_bwd`": "test_torch_mixed_precision.py",
    }
)


class Scaled(Function):
    """w * x, which saves what the gradients need."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w if x.requires_grad else None, x if w.requires_grad else None)
        return x * w

    @staticmethod
    def backward(ctx, upstream):
        w, x = ctx.saved_tensors
        return None if w is None else 5 * upstream * w, None if x is None else 7 * upstream * x


@twins.add("`x.requires_grad` in forward")
def _():
    @op_custom_gradient
    def scaled(x, w, *, needs_input_grad):
        assert needs_input_grad == (True, False)
        return x * w, lambda upstream: (5 * upstream * w, None)

    return lambda x: Scaled.apply(x, W), lambda x: scaled(x, W)


@twins.add("`ctx.mark_non_differentiable(i)`")
def _():
    class Rounded(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            rounded = x.round()
            ctx.mark_non_differentiable(rounded)
            return x * x, rounded

        @staticmethod
        def backward(ctx, upstream, _):
            return 5 * upstream * ctx.saved_tensors[0]

    @op_custom_gradient
    def rounded(x):
        return (x * x, x.round()), lambda square, _: 5 * square * x

    def here(x):
        square, integer = rounded(x)
        return square * op_stop_gradient(integer)

    return lambda x: torch.mul(*Rounded.apply(x)), here


@twins.add("`ctx.mark_dirty(x)`")
def _():
    class Doubled(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, upstream):
            return 5 * upstream

    doubled = op_custom_gradient(lambda x: (2 * x, lambda upstream: 5 * upstream))
    return lambda x: Doubled.apply(x * x), lambda x: doubled(x * x)


@twins.add("`ctx.set_materialize_grads(False)`")
def _():
    class Pair(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x)
            return x * x, 3 * x

        @staticmethod
        def backward(ctx, square, triple):
            assert triple is None
            return 5 * square * ctx.saved_tensors[0]

    @op_custom_gradient
    def pair(x):
        return (x * x, 3 * x), lambda square, triple: 5 * square * x + 7 * triple

    return lambda x: Pair.apply(x)[0], lambda x: pair(x)[0]


@twins.add("`None` for an output that is not a tensor")
def _():
    class Powers(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x, 3 * x, 3.5

        @staticmethod
        def backward(ctx, square, triple, nothing):
            assert nothing is None
            return 5 * square * ctx.saved_tensors[0] + 7 * triple

    @op_custom_gradient
    def powers(x):
        return (x * x, 3 * x, 3.5), lambda square, triple: 5 * square * x + 7 * triple

    product = lambda outputs: outputs[0] * outputs[1] * outputs[2]
    return lambda x: product(Powers.apply(x)), lambda x: product(powers(x))


@twins.add("a gradient that torch sums to its argument's shape", [2.5])
def _():
    class Product(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, upstream):
            x, w = ctx.saved_tensors
            return 5 * upstream * w, 7 * upstream * x

    @op_custom_gradient
    def product(x, w):
        def grad(upstream):
            return 5 * upstream * w, op_sum_to_shape(7 * upstream * x, w)

        return x * w, grad

    return Product.apply, product


@twins.add("more `None`s than arguments")
def _():
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, upstream):
            return 5 * upstream * ctx.saved_tensors[0], None, None

    return Square.apply, op_custom_gradient(lambda x: (x * x, lambda u: (5 * u * x,)))


@twins.add("`torch.autograd.grad` in backward")
def _():
    def derivative(x, upstream):
        with torch.enable_grad():
            x = x.clone()
            return torch.autograd.grad(x.sin(), x.requires_grad_(), upstream, create_graph=True)[0]

    class Sine(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, upstream):
            return derivative(ctx.saved_tensors[0], 5 * upstream)

    same = op_custom_gradient(lambda x: (x.sin(), lambda u: derivative(x, 5 * u)))
    by_op_vjp = op_custom_gradient(lambda x: (x.sin(), lambda u: op_vjp(torch.sin, x)[1](5 * u)))
    return Sine.apply, same, by_op_vjp


@twins.add("`torch.func.vjp` in forward", orders=1)
def _():
    class Sine(Function):
        @staticmethod
        def forward(ctx, x):
            y, ctx.pullback = torch.func.vjp(torch.sin, x)
            return y

        @staticmethod
        def backward(ctx, upstream):
            return ctx.pullback(5 * upstream)

    @op_custom_gradient
    def sine(x):
        y, pullback = op_vjp(torch.sin, x)
        return y, lambda upstream: pullback(5 * upstream)

    return Sine.apply, sine


@twins.add("`with torch.no_grad():` in forward")
def _():
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            with torch.no_grad():
                ctx.save_for_backward(x)
                return x * x

        @staticmethod
        def backward(ctx, upstream):
            return 5 * upstream * ctx.saved_tensors[0]

    return Square.apply, op_custom_gradient(lambda x: (x * x, lambda u: 5 * u * x))


@twins.add("an attribute set on an output")
def _():
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = x * x
            y.factor = 3.5
            return y

        @staticmethod
        def backward(ctx, upstream):
            return 5 * upstream * ctx.saved_tensors[0]

    def by_hand(x):
        y = Square.apply(x)
        return y * y.factor

    square = op_custom_gradient(lambda x: ((x * x, 3.5), lambda upstream: 5 * upstream[0] * x))
    return by_hand, lambda x: torch.mul(*square(x))


@twins.add("`@once_differentiable`", orders=1)
def _():
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx, upstream):
            return 5 * upstream * ctx.saved_tensors[0]

    square = lambda x: (x * x, lambda upstream: 5 * upstream * x)
    return Square.apply, op_custom_gradient(square, once_differentiable=True)


class Cube(Function):
    """x**3, mapped by vmap, with a tangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, upstream):
        return 5 * upstream * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx, tangent):
        return 5 * tangent * ctx.saved_tensors[0] ** 2


@twins.add("`generate_vmap_rule`")
def _():
    cube = op_custom_gradient(lambda x: (x**3, lambda upstream: 5 * upstream * x**2))
    return vmap(Cube.apply), vmap(cube)


@twins.add("`info.randomness`")
def _():
    class Noisy(Function):
        @staticmethod
        def forward(x, noise):
            return x * noise

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, upstream):
            _, noise = ctx.saved_tensors
            return 5 * upstream * noise, None

        @staticmethod
        def vmap(info, in_dims, x, _):
            assert info.randomness == "different"
            torch.manual_seed(0)
            return Noisy.apply(x, torch.randn_like(x)), 0

    noisy = op_custom_gradient(lambda x, noise: (x * noise, lambda u: (5 * u * noise, None)))

    def here(x):
        torch.manual_seed(0)
        return vmap(noisy)(x, torch.randn_like(x))

    return lambda x: vmap(Noisy.apply, (0, None), randomness="different")(x, W[0]), here


@twins.add("`jvp`, `ctx.save_for_forward`", orders=0)
def _():
    tangent = lambda x: lambda dx: 5 * dx * x**2
    pair = op_custom_jvp(lambda x: (x**3, tangent(x)))
    triple = op_custom_gradient(lambda x: (x**3, tangent(x), tangent(x)), forward_mode=True)

    def with_tangent(op):
        return lambda x: torch.stack(jvp(op, (x,), (W,)))

    return with_tangent(Cube.apply), with_tangent(pair), with_tangent(triple)
