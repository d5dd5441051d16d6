"""PyTorch: find in autograd's graph the tensors that reached f, but not as arguments."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from cgshim.backend import Call, Tensor
from cgshim_torch._graph.existing import Reach, put_in_modules
from cgshim_torch._graph.levels import levels, requires_grad
from cgshim_torch._versions.private import (
    FakeTensor,
    FunctionalTensor,
    forward_ad,
    functorch,
    sequence_number,
    temporarily_pop_interpreter_stack,
)

Edge = tuple[Any, int]


def since(start: int) -> range:
    """Return the numbers of the nodes that this thread has made since this one was the next."""
    return range(start, sequence_number())


def is_made_in(tensor: Tensor, during: range) -> bool:
    """Return True if a node of the graph with one of these numbers has made a tensor."""
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() in during


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor holds numbers, and not only a shape and a dtype."""
    return not (tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor)))


def is_captured(tensor: Tensor) -> bool:
    """Return True while a CUDA graph is captured: it would hold no number that is read."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def recordable(tensor: Tensor) -> Tensor:
    """Return tensor so that autograd can record it: a copy if it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def own_node(x: Tensor) -> Tensor:
    """Return a tensor as a node of its own in the graph; a view takes no memory."""
    if not x.requires_grad:
        return x.detach()
    return x.view_as(x) if x.layout is torch.strided and not x.is_nested else x.clone()


# --- Leaves that f makes --------------------------------------------------------------------------
#
# By a leaf of its own f differentiates something itself; any other on which its output depends is a
# variable. Which is which, only the objects tell that hold it, and to look through all of them takes
# 20 ms. So what is known of a leaf is noted; and once a function was found to make leaves,
# `NoteLeaves` watches it in later calls.

_leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""for what f makes the number of the next node when it did, for a variable `_VARIABLE`"""
_VARIABLE = -1
_over: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""those whose function has returned"""
_makers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""the code of functions that make leaves, by identity"""


def new_leaf(x: Tensor) -> Tensor:
    """Return a tensor as a leaf, to differentiate by it what is made of it from now on."""
    leaf = x.detach().requires_grad_()
    _leaves[leaf] = sequence_number()
    return leaf


def note_over(leaves: Iterable[Tensor]) -> None:
    """Note that the function has returned which is differentiated by these leaves."""
    for leaf in leaves:
        _over[leaf] = True


def is_new_leaf(leaf: Tensor, during: range) -> bool | None:
    """Return True for a leaf that was made when nodes of these numbers were; None if that is not
    known.
    """
    number = _leaves.get(leaf)
    return number in during or (False if number == _VARIABLE else None)


def note_leaf(leaf: Tensor, maker: Callable[..., Any] | None) -> None:
    """Note that a function was found to make a leaf; or that none has."""
    if maker is None:
        _leaves[leaf] = _VARIABLE
    else:
        code = _code_of(maker)
        _makers[id(code)] = code


def makes_leaves(f: Callable[..., Any]) -> bool:
    """Return True for a function that was found to make leaves."""
    return bool(_makers) and id(_code_of(f)) in _makers


class NoteLeaves(TorchFunctionMode):  # type: ignore[misc]
    """Notes what becomes a leaf."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_made_one = func in _MAKE_A_LEAF and not args[0].requires_grad
        result = func(*args, **kwargs)
        leaf = args[0] if is_made_one else result
        if is_made_one or (kwargs.get("requires_grad") and isinstance(leaf, torch.Tensor)):
            _leaves[leaf] = sequence_number()
        return result


_MAKE_A_LEAF = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)


def _code_of(f: Any) -> Any:
    """Return what all calls of a function share, whatever it is bound to; the class of an object."""
    for name in ("held_function", "func", "__func__"):
        f = getattr(f, name, f)
    return getattr(f, "__code__", type(f))


# --- What f has captured --------------------------------------------------------------------------


def captured(
    call: Call,
    made: Sequence[Tensor],
    inputs: Sequence[Tensor],
    during: range,
    in_a_rule: bool = False,
) -> list[Tensor]:
    """Return the variables on which tensors made in a run depend; raise for all else that is not an
    input.

    In a rule, a tensor that the run did not make is a constant if it depends only on the inputs:
    their gradients come from the op's own rule.
    """
    variables: list[Tensor] = []
    known = _Known(inputs)
    in_batch = False
    while made:  # first as they are, then inside each wrapping of torch.func
        leaves, strange = known.reached_beyond([t for t in made if t.requires_grad], during)
        known.add([leaf for leaf, _ in leaves])
        if strange or (in_batch and leaves):
            leaves, strange = _as_read(call, leaves, strange, in_batch)
        variables += [leaf for leaf, _ in sorted(leaves, key=_first_use)]
        known.add(variables)
        for edge, _ in strange:
            if not in_a_rule or known.reached_beyond((), edges=[edge])[0]:
                call.refuse_captured(edge[0]._input_metadata[edge[1]])
        in_batch = in_batch or any(map(functorch.is_batchedtensor, made))
        made = [
            functorch.get_unwrapped(t) for t in made if functorch.is_functorch_wrapped_tensor(t)
        ]
    return variables


Use = tuple[Any, tuple[float, int]]
"""what tensors depend on, and the number of the first node in the graph that uses it, with its place among several"""
_first_use = operator.itemgetter(1)


def _as_read(
    call: Call, leaves: list[Use], strange: list[Use], in_batch: bool
) -> tuple[list[Use], list[Use]]:
    """Return the leaves as f read them, with tensors in the places of Parameters, and the other
    strange edges.

    A leaf that is a batch of vmap is what vmap has made of it; if the search of f does not find it,
    raise an error.
    """
    if in_batch:
        as_read = {id(level): t for t in within_reach(call) for level in levels(t)}
        for leaf, _ in leaves:
            if id(leaf) not in as_read:
                call.refuse_captured(leaf)
        leaves = [(as_read[id(leaf)], used) for leaf, used in leaves]
    state = {
        (level.grad_fn, level.output_nr): put.tensor
        for put in put_in_modules(call.f) for level in levels(put.tensor) if not level.is_leaf
    }  # fmt: skip
    in_place = [(state[edge], used) for edge, used in strange if edge in state]
    return [*leaves, *in_place], [(edge, used) for edge, used in strange if edge not in state]


def refuse_captured_tangents(call: Call, made: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise an error if a tangent reached f, but not by its inputs: look at what f can read, and at
    what it made.
    """
    input_ids = set(map(id, inputs))
    suspects = [tensor for tensor in within_reach(call) if id(tensor) not in input_ids]
    if not any(map(_has_tangent, inputs)):
        suspects += made
    for tensor in filter(_has_tangent, suspects):
        call.refuse_captured(tensor)


def _has_tangent(tensor: Tensor) -> bool:
    """Return True if a tensor has a tangent at any level: outer ones see what an inner
    transformation hides.
    """
    current = functorch.maybe_current_level() or 0
    duals = [
        level
        for level in levels(tensor)
        if functorch.maybe_get_level(level) <= current and not functorch.is_batchedtensor(level)
    ]
    if any(forward_ad.unpack_dual(dual).tangent is not None for dual in duals):
        return True
    if not current:
        return False
    # where inference mode is around all, torch 2.13 cannot look at a tensor that was made in it
    with temporarily_pop_interpreter_stack(), torch.inference_mode(False):
        return _has_tangent(tensor)


def depends_on_more(tensors: Sequence[Tensor], than: Sequence[Tensor]) -> bool:
    """Return True if tensors are connected with anything else that requires grad, or the rule of an
    op on which they depend may read an unsaved tensor that does.

    What a vjp within has made to differentiate by it is nothing else, as soon as its function has
    returned.
    """
    known = _Known(than)
    ends, _ = known.reached_beyond(tensors)
    leaves = [leaf for leaf, _ in ends if leaf not in _over]
    runs = [run for node, _ in known.walked if (run := getattr(node, "run", None)) is not None]
    for run in runs:
        run.complete()
    read = [t for run in runs for t in within_reach(run.call)]
    return bool(leaves) or any(map(requires_grad, read))


def within_reach(call: Call) -> list[Tensor]:
    """Return the tensors that f can read as far as one can tell, Parameters of modules in modules
    too.
    """
    return Reach(call, levels=8).tensors


def leaf_of(tensor: Tensor) -> Tensor:
    """Return the leaf that gets a leaf's gradient: itself, except for the copies that hooks on
    saved tensors make.
    """
    transformed = (
        functorch.maybe_current_level() is not None or functorch.is_functorch_wrapped_tensor(tensor)
    )
    if transformed:
        return tensor
    # an object of a subclass would be made of the result, a view
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        node: Any = own_node(tensor).grad_fn
    gets_gradient = node.next_functions[0][0]
    # none for a view that was made while gradients were off
    return tensor if gets_gradient is None else gets_gradient.variable


class _Known:
    """Tensors at which a walk through the graph stops, at every level of torch.func that wraps
    them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._leaves: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._edges: set[Edge] = set()
        self.walked: set[Edge] = set()
        """the edges that the last walk has seen, and those at which it stopped"""
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for level in levels(tensor):
                self._tensors.append(level)
                if not level.is_leaf:
                    self._edges.add((level.grad_fn, level.output_nr))
                elif level.requires_grad:
                    self._leaves.append(leaf_of(level))

    def reached_beyond(
        self, tensors: Sequence[Tensor], during: range | None = None, edges: Iterable[Edge] = ()
    ) -> tuple[list[Use], list[Use]]:
        """Return the other leaves on which tensors, or what edges lead to, depend; and what a run
        did not make.

        Each thread counts its nodes itself: of two nodes with one number, one was made in another
        thread.
        """
        unused = float("inf")
        roots = [leaf_of(t) if t.is_leaf else (t.grad_fn, t.output_nr) for t in tensors]
        following: list[Use] = [(x, (unused, at)) for at, x in enumerate([*edges, *roots])]
        leaves: dict[int, Use] = {}
        strange: dict[Edge, tuple[float, int]] = {}
        node_of: dict[int, Any] = {}
        nodes: list[Any] = []
        self.walked = seen = set(self._edges)
        for x, used in following:  # which grows
            if isinstance(x, torch.Tensor):
                leaves[id(x)] = min(leaves.get(id(x), (x, used)), (x, used), key=_first_use)
            elif x in seen:
                if x in strange:
                    strange[x] = min(strange[x], used)
            else:
                seen.add(x)
                node = x[0]
                number = node._sequence_nr()
                if during is not None and (
                    number not in during or node_of.setdefault(number, node) is not node
                ):
                    strange[x] = used
                    continue
                nodes.append(node)
                following += [
                    (getattr(edge[0], "variable", edge), (number, at))
                    for at, edge in enumerate(node.next_functions)
                    if edge[0] is not None
                ]
        if len(nodes) > _DEEP:
            _let_go_in_turn(nodes, {x[0] for x in roots if not isinstance(x, torch.Tensor)})
        for leaf in self._leaves:
            leaves.pop(id(leaf), None)
        others = [use for use in leaves.values() if not self._is_view(use[0])]
        return others, list(strange.items())

    def _is_view(self, leaf: Tensor) -> bool:
        """Return True for another view of one of these tensors, made while gradients were off: it
        requires grad as that does, and is a constant.
        """
        base = _base_of(leaf)
        return base is not leaf and any(base is _base_of(t) for t in self._tensors)


def _base_of(t: Tensor) -> Tensor:
    """Return the tensor that another is a view of, or the tensor itself."""
    with torch._C.DisableTorchFunction():
        return t if t._base is None else t._base


# --- A deep graph ---------------------------------------------------------------------------------

_DEEP = 1000
"""how many nodes, one within the other, a stack holds for sure"""


class _InTurn:
    """Nodes of a graph, which are let go from its end on, one after the other."""

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes  # a node has a higher number than those that it leads to

    def __del__(self) -> None:
        while self._nodes:
            self._nodes.pop()


def _let_go_in_turn(nodes: Sequence[Any], roots: set[Any]) -> None:
    """Let the roots of a graph hold its other nodes, until the roots are let go.

    A node that Python has looked at, torch lets go within the one that leads to it: a loop of many
    thousands of steps would overflow the stack.
    """
    below = sorted({*nodes} - roots, key=operator.methodcaller("_sequence_nr"))
    in_turn = _InTurn(below)
    for root in roots:
        root.metadata["cgshim"] = in_turn
