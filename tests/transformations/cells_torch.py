import io

import numpy as np
import torch
from cells import cell
from ops import X, both_modes, by_rule, kept, product, reverse, with_batches, with_op_in_rule
from torch import func
from torch.utils.checkpoint import checkpoint

from cgshim import op_custom_gradient

X = torch.tensor(X, dtype=torch.float64)
V = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)


def leaf():
    return X.clone().requires_grad_()


def one(x):
    return x * reverse(x)


def loss(x):
    return one(x).sum()


def compiled(function, fullgraph=True):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=fullgraph)


def compiled_in_parts(function):
    """Dynamo drops custom rules under torch.func's transformations (PyTorch issue 192985): there
    the graph breaks.
    """
    return compiled(function, fullgraph=False)


@cell("gradient")
def gradient():
    x = leaf()
    loss(x).backward()
    return x.grad, by_rule(X)


@cell("derivatives of order 2, 3 and 4")
def orders():
    x = leaf()
    y, found = one(x), []
    for _ in range(4):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(y.detach())
    return torch.stack(found[1:]), torch.stack([by_rule(X, n) for n in (2, 3, 4)])


@cell("mixed partial derivatives")
def mixed():
    x, y = leaf(), leaf()
    (of_x,) = torch.autograd.grad(product(x, y).sum(), x, create_graph=True)
    return torch.autograd.grad((y**2 * of_x).sum(), y)[0], 21 * X**2


@cell("Hessian, reverse over reverse")
def reverse_over_reverse():
    return torch.autograd.functional.hessian(loss, X), torch.diag(by_rule(X, 2))


@cell("Hessian, forward over reverse")
def forward_over_reverse():
    return func.hessian(loss)(X), torch.diag(by_rule(X, 2))


def second_derivative(op):
    x = leaf()
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


@cell("second order, rule keeps the output")
def kept_output():
    return second_derivative(kept), 25 * X.exp()


@op_custom_gradient(name="cube")
def in_numpy(x):
    y = torch.from_numpy(np.exp(x.numpy()))
    return y, lambda upstream: 5 * upstream * y


@cell("second order, f is opaque")
def opaque():
    return second_derivative(in_numpy), 25 * X.exp()


@op_custom_gradient(name="cube")
def noisy(x):
    noise = torch.rand_like(x) * x
    return noise.clone(), lambda upstream: upstream * noise


@cell("second order, f draws random numbers")
def random():
    torch.manual_seed(0)
    noise = torch.rand_like(X)
    torch.manual_seed(0)
    return second_derivative(noisy), noise


@cell("second order of an op inside a rule")
def op_in_rule():
    return second_derivative(with_op_in_rule), 5 * 42 * X


@cell("gradient of a gradient penalty")
def penalty():
    x = leaf()
    (of_x,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (of_x**2).sum().backward()
    return x.grad, 2 * by_rule(X) * by_rule(X, 2)


@cell("Jacobian")
def of_vector():
    return func.jacrev(reverse)(X), torch.diag(15 * X**2)


@cell("vmap")
def mapped():
    return func.vmap(reverse)(X), X**3


@cell("gradient of vmap")
def gradient_of_vmap():
    x = leaf()
    (V * func.vmap(reverse)(x)).sum().backward()
    return x.grad, 15 * V * X**2


@cell("vmap of gradient")
def vmap_of_gradient():
    return func.vmap(func.grad(one))(X), by_rule(X)


@cell("vmap, by a rule for batches")
def vmap_by_rule():
    return func.vmap(with_batches)(X), X**3


@cell("gradient of vmap, by a rule for batches")
def gradient_of_vmap_by_rule():
    return func.grad(lambda x: (V * func.vmap(with_batches)(x)).sum())(X), 15 * V * X**2


@cell("vmap of gradient, by a rule for batches")
def vmap_of_gradient_by_rule():
    return func.vmap(func.grad(lambda x: x * with_batches(x)))(X), by_rule(X)


@cell("nested vmap, over one of two arguments")
def nested():
    gradient = func.grad(product)
    return func.vmap(func.vmap(gradient, (None, 0)), (0, None))(X, V), (7 * V).tile(3, 1)


@cell("vmap over batches of 0 and 1")
def small_batches():
    # torch.vmap itself refuses a batch of 0
    return func.vmap(func.grad(one))(X[:1]), by_rule(X[:1])


@cell("forward mode, promised")
def promised():
    return func.jvp(both_modes, (X,), (V,))[1], 15 * V * X**2


@cell("forward mode, not promised")
def not_promised():
    return func.jvp(reverse, (X,), (V,))[1], 15 * V * X**2


@cell("compiled gradient")
def compiled_gradient():
    x = leaf()
    compiled(loss)(x).backward()
    return x.grad, by_rule(X)


@cell("compiled gradient of the gradient")
def compiled_second():
    return compiled_in_parts(func.grad(lambda x: func.grad(loss)(x).sum()))(X), by_rule(X, 2)


@cell("compiled vmap of gradient")
def compiled_vmap():
    return compiled_in_parts(func.vmap(func.grad(one)))(X), by_rule(X)


@cell("compiled forward mode, promised")
def compiled_forward():
    return compiled_in_parts(func.jacfwd(both_modes))(X), torch.diag(15 * X**2)


@cell("checkpointing")
def checkpointed():
    x = leaf()
    checkpoint(loss, x, use_reentrant=False).backward()
    return x.grad, by_rule(X)


@cell("mixed precision")
def mixed_precision():
    weight = torch.eye(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = reverse(X.float() @ weight)
    y.sum().backward()
    return weight.grad, torch.outer(X, 15 * X**2).bfloat16().float()


@cell("export")
def exported():
    class Model(torch.nn.Module):
        def forward(self, x):
            return reverse(x)

    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (X,)), file)
    file.seek(0)
    return torch.export.load(file).module()(X), X**3


@cell("several devices or processes")
def data_parallel():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = torch.nn.parallel.DistributedDataParallel(_Op())
        model(X).sum().backward()
        return model.module.weight.grad, 15 * X**2
    finally:
        # its thread has let go of all by then: the group's end waits for it, and holds the GIL
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class _Op(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(X.clone())

    def forward(self, x):
        return reverse(self.weight) + 0 * x


@cell("another library's model")
def module():
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    reverse(model(X)).sum().backward()
    return model.bias.grad, 15 * model(X).detach() ** 2
