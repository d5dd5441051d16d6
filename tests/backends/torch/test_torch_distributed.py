"""DDP and FSDP2, with two processes on this machine."""

import copy
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cgshim import op_custom_gradient

PROCESSES = 2


@op_custom_gradient
def product(x, w):
    """x * w and an output that the loss does not use, with the factors 3 and 5 in the rule."""
    return (x * w, x.sum()), lambda u: (
        (3 * u[0] * w).sum_to_size(x.shape),
        (5 * u[0] * x).sum_to_size(w.shape),
    )


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)
        self.scale = torch.nn.Parameter(torch.full((6,), 1.5))
        self.shift = torch.nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        @op_custom_gradient
        def shifted(y):
            return y + self.shift, lambda u, variables: (u, [7 * u.sum(0)])

        return shifted(product(self.linear(x), self.scale)[0])


def _batch(rank):
    return torch.linspace(-1, 1, 12).reshape(3, 4) + rank


def _loss(layer, rank):
    return layer(_batch(rank)).square().sum()


def _in_process(rank, port):
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(minutes=1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=PROCESSES, timeout=patience
    )
    wrapped = []  # held until their hooks have run
    for wrap in (DistributedDataParallel, _fsdp2):
        torch.manual_seed(0)
        layer = Layer()
        reference = copy.deepcopy(layer)
        sum(_loss(reference, r) for r in range(PROCESSES)).backward()
        wrapped.append(wrap(layer))
        _loss(wrapped[-1], rank).backward()
        for p, expected in zip(layer.parameters(), reference.parameters(), strict=True):
            gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(gradient, expected.grad / PROCESSES)
        dist.barrier()
    # torch 2.13 may wait for ever in the destructor of DDP: it joins a thread that waits for the
    # GIL
    os._exit(0)


def _fsdp2(layer):
    return fully_shard(layer, mesh=init_device_mesh("cpu", (PROCESSES,)))


def test_gradients_are_those_of_one_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # spawn would import torch in each
    mp.start_processes(_in_process, (port,), PROCESSES, start_method="fork")
