"""PyTorch: the operations by which inductor's programs call the host.

The derivatives are in the graph before inductor gets it. So a program needs no kernel for autograd, which would cost it
a call of Python at each run. It needs no list for one tensor: that would cost as much, and the C++ wrapper of 2.13
crashes on a list of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cgshim_torch._host_names import call_of
from cgshim_torch._host_operation import fake, run
from cgshim_torch._private import forward_ad, tags_of_host, with_all_kernels

Tensor = Any


def in_program(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return the results of cgshim::host by the operation that stands for it in a program."""
    operations = torch.ops.cgshim
    if len(fake(inputs, name)) != 1:
        return list(operations.host_from_many_to_many(inputs, name))
    return [operations.host_from_one(*inputs, name) if len(inputs) == 1 else operations.host_from_many(inputs, name)]


def _from_many_to_many(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    if forward_ad._current_level < 0:
        return run(call_of(name, len(inputs)), inputs)
    with with_all_kernels():  # torch.compile drops tangents; cgshim::host refuses those that are there
        return list(torch.ops.cgshim.host(inputs, name))


def _from_many(inputs: Sequence[Tensor], name: str) -> Tensor:
    return _from_many_to_many(inputs, name)[0]


def _from_one(x: Tensor, name: str) -> Tensor:
    return _from_many_to_many((x,), name)[0]


def _fake_from_many(inputs: Sequence[Tensor], name: str) -> Tensor:
    return fake(inputs, name)[0]


def _fake_from_one(x: Tensor, name: str) -> Tensor:
    return fake((x,), name)[0]


_library = torch.library.Library("cgshim", "FRAGMENT")
for _schema, _kernel, _fake in (
    ("host_from_one(Tensor input, str call) -> Tensor", _from_one, _fake_from_one),
    ("host_from_many(Tensor[] inputs, str call) -> Tensor", _from_many, _fake_from_many),
    ("host_from_many_to_many(Tensor[] inputs, str call) -> Tensor[]", _from_many_to_many, fake),
):
    _name = _library.define(_schema, tags=tags_of_host)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cgshim::{_name}", _fake, lib=_library)
