"""PyTorch: tensors of anything else, NumPy's arrays of tensors, and the trees that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch.utils import _pytree as pytree

from cgshim.backend import Tensor, tensor_of_call
from cgshim_torch._compile import trees
from cgshim_torch._graph.reads import known_constant, note_numbers


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    if torch.compiler.is_dynamo_compiling():
        return trees.flatten(tree)
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    nodes = [kind for kind in set(map(type, leaves)) if kind in pytree.SUPPORTED_NODES]
    for kind in nodes:
        _register(kind)
    return tree_flatten(tree) if nodes else (leaves, structure)


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    if not isinstance(structure, optree.PyTreeSpec):
        return trees.unflatten(structure, leaves)
    return optree.tree_unflatten(structure, leaves)


# in optree's own namespace "torch" the order of a dict's keys would matter
_NAMESPACE = "cgshim_torch"


def _register(kind: type) -> None:
    """Let optree take apart a type that is registered with torch's pytree."""
    node = pytree.SUPPORTED_NODES[kind]
    if optree.register_pytree_node.get(kind, namespace=_NAMESPACE) is None:
        optree.register_pytree_node(
            kind, node.flatten_fn, lambda context, children: node.unflatten_fn(list(children), context),
            namespace=_NAMESPACE,
        )  # fmt: skip


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Tensor:
    if isinstance(dtype, str):
        if not hasattr(torch, dtype):
            raise TypeError(f"PyTorch has no dtype {dtype}")
        dtype = getattr(torch, dtype)
    if isinstance(x, (np.ndarray, np.generic)) and not torch.compiler.is_compiling():
        # a copy: NumPy's memory may change, or be locked
        return known_constant(from_numpy(np.array(x))).to(device_of_call(), dtype)
    if isinstance(x, torch.Tensor):
        return torch.as_tensor(x, dtype=dtype)
    device = device_of_call()
    if device is not None and device.type != "cpu" and isinstance(x, (int, float, complex)):
        return torch.full((), x, dtype=dtype, device=device)  # a copy would wait for the GPU
    return torch.as_tensor(x, dtype=dtype, device=device)


def device_of_call() -> torch.device | None:
    """Return the device of the running op's first tensor, for what f and grad_fn make; None for
    torch's default.
    """
    tensor: Any = tensor_of_call()
    return tensor.device if isinstance(tensor, torch.Tensor) else None


def from_numpy(array: Any) -> Tensor:
    """Return a tensor that shares the memory of an array."""
    # an extension of NumPy, which torch does not know
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def convert_to_numpy(x: Tensor, /) -> Any:
    note_numbers()
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.dtype is torch.bfloat16:  # float32 holds each value, and NumPy has no bfloat16 of its own
        x = x.float()
    return x.numpy(force=True)
