import io

import torch
from cells import host_cell
from cells_torch import compiled, compiled_in_parts, leaf
from ops import X, by_rule
from torch import func
from torch.utils.checkpoint import checkpoint

X = torch.tensor(X, dtype=torch.float64)
V = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)


def one(op):
    return lambda x: x * op(x)


def loss(op):
    return lambda x: (x * op(x)).sum()


def gradient_of(function):
    x = leaf()
    function(x).backward()
    return x.grad


@host_cell("gradient")
def gradient(op):
    return gradient_of(loss(op)), by_rule(X)


@host_cell("Jacobian")
def of_vector(op):
    return func.jacrev(op)(X), torch.diag(15 * X**2)


@host_cell("second order")
def second(op):
    return torch.autograd.functional.hessian(loss(op), X), torch.diag(by_rule(X, 2))


@host_cell("second order, compiled")
def compiled_second(op):
    return compiled_in_parts(func.grad(lambda x: func.grad(loss(op))(x).sum()))(X), by_rule(X, 2)


@host_cell("vmap")
def mapped(op):
    return func.vmap(op)(X), X**3


@host_cell("gradient of vmap")
def gradient_of_vmap(op):
    return gradient_of(lambda x: (V * func.vmap(op)(x)).sum()), 15 * V * X**2


@host_cell("vmap of gradient")
def vmap_of_gradient(op):
    return func.vmap(func.grad(one(op)))(X), by_rule(X)


@host_cell("forward mode, promised")
def promised(op):
    return func.jvp(op, (X,), (V,))[1], 15 * V * X**2


@host_cell("Hessian, forward over reverse, promised")
def forward_over_reverse(op):
    return func.hessian(loss(op))(X), torch.diag(by_rule(X, 2))


@host_cell("compiled")
def compiled_value(op):
    return compiled(lambda x: op(x))(X), X**3


@host_cell("compiled gradient")
def compiled_gradient(op):
    return gradient_of(compiled(loss(op))), by_rule(X)


@host_cell("compiled vmap")
def compiled_vmap(op):
    return compiled_in_parts(func.vmap(op))(X), X**3


@host_cell("compiled vmap of gradient")
def compiled_vmap_of_gradient(op):
    return compiled_in_parts(func.vmap(func.grad(one(op))))(X), by_rule(X)


@host_cell("compiled forward mode, promised")
def compiled_forward(op):
    return compiled_in_parts(func.jacfwd(op))(X), torch.diag(15 * X**2)


@host_cell("checkpointing")
def checkpointed(op):
    gradients = [
        gradient_of(lambda x, reentrant=reentrant: checkpoint(loss(op), x, use_reentrant=reentrant))
        for reentrant in (False, True)
    ]
    return torch.stack(gradients), by_rule(X).expand(2, 3)


@host_cell("mixed precision")
def mixed_precision(op):
    weight = torch.eye(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(X.float() @ weight)
    y.sum().backward()
    return weight.grad, torch.outer(X, 15 * X**2).bfloat16().float()


@host_cell("export")
def exported(op):
    class Model(torch.nn.Module):
        def forward(self, x):
            return op(x)

    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (X,)), file)
    file.seek(0)
    return torch.export.load(file).module()(X), X**3


@host_cell("several devices or processes")
def data_parallel(op):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = torch.nn.parallel.DistributedDataParallel(_Weight(op))
        model(X).sum().backward()
        return model.module.weight.grad, 15 * X**2
    finally:
        # its thread has let go of all by then: the group's end waits for it, and holds the GIL
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class _Weight(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(X.clone())

    def forward(self, x):
        return self.op(self.weight) + 0 * x


@host_cell("a pipeline of data")
def loader(op):
    loader = torch.utils.data.DataLoader(
        _Rows(op), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    return torch.stack(list(loader)), torch.stack([(n * X) ** 3 for n in range(3)])


class _Rows(torch.utils.data.Dataset):
    def __init__(self, op):
        self.op = op

    def __len__(self):
        return 3

    def __getitem__(self, n):
        return self.op(n * X)
