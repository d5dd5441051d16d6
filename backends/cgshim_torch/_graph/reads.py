"""PyTorch: a rule that makes a graph reads tensors that are functions of the arguments.

The rule is the very function that f returned, and holds the tensors that f saw: detached inputs,
raw outputs. While it runs under create_graph, a function mode sees each operation of torch, and
puts in the place of each tensor, by identity, the one that is connected: the input itself, the op's
own output, a residual with its derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from cgshim.backend import Call, Tensor, place_of
from cgshim_torch._graph.existing import Existing
from cgshim_torch._graph.levels import levels
from cgshim_torch._graph.walk import is_made_in, since
from cgshim_torch._versions.private import (
    forward_ad,
    functorch,
    len_function_stack,
    outside_of_func,
    sequence_number,
)

Refuse = Callable[[str], NoReturn]
FLOATS = frozenset(
    x
    for x in vars(torch).values()
    if isinstance(x, torch.dtype) and (x.is_floating_point or x.is_complex)
)
"""the dtypes of tensors that have gradients"""


class Reads(TorchFunctionMode):  # type: ignore[misc]
    """Substitutes what a rule, or another run of f, reads.

    A tensor is known if it was made since: by an operation under this mode. It is constant if it
    existed before f ran. Of any other float nobody knows how it depends on the arguments: `place`,
    which is called with this mode, returns what to read for it. It does not hold the mode, nor does a
    node of the graph: nothing waits for the garbage collector.
    """

    refuses_cut = True
    """False if what is made while gradients are off is a constant, as by hand"""
    gave_numbers = False
    """True if what runs may make tensors of the numbers of other tensors"""

    def __init__(
        self,
        call: Call,
        existing: Existing,
        place: Callable[[Reads, Tensor], Tensor],
        known: Iterable[Tensor],
        anchors: Sequence[Tensor] = (),
        may_hide: bool = True,
    ) -> None:
        super().__init__()
        self.call = call
        self._anchors = anchors
        """what the derivatives are taken by that `refused` refuses"""
        self._may_hide = may_hide
        """False if what this mode does not see (Functions, vmap, TorchScript) can read only what is connected"""
        self._wrapped: Tensor | None = None  # what such a callee has read that is not
        self.existing = existing
        self._place = place
        self._start = sequence_number()
        self._substitutes: dict[int, tuple[Tensor, Tensor]] = {}
        self._raw: dict[int, Tensor] = {}
        self._known = {id(t): t for t in known}
        self._cut: dict[int, bool] = {}
        """made while gradients were off: True if of what was substituted. Else a Function may yet give a derivative"""
        self._substituted = self._differentiated = False  # what the operation in progress has read

    def put(self, tensor: Tensor, substitute: Tensor) -> Tensor:
        """Let `substitute` be read in the place of a tensor."""
        if substitute is not tensor:
            self._substitutes[id(tensor)] = tensor, substitute
            self._raw[id(substitute)] = tensor
        self._known[id(substitute)] = substitute
        return substitute

    def raw_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor in whose place this one is read; else the tensor itself."""
        return self._raw.get(id(tensor), tensor)

    def knows(self, *tensors: Tensor) -> None:
        """Take these tensors as they are."""
        self._known.update((id(t), t) for t in tensors)

    def made(self, tensor: Tensor) -> bool:
        """Return True if an operation under this mode has made a tensor, with its derivative."""
        return id(tensor) in self._known and not self._is_cut(tensor)

    def _is_cut(self, t: Tensor) -> bool:
        is_cut = self.refuses_cut and id(t) in self._cut
        return is_cut and (self._cut[id(t)] or not t.requires_grad)

    def read(self, t: Tensor) -> Tensor:
        """Return what to read for a tensor."""
        if t.dtype not in FLOATS:
            return t
        key = id(t)
        if key in self._known:
            self._differentiated = self._differentiated or t.requires_grad
            if torch.is_grad_enabled() and self._is_cut(t):
                return self.put(t, self.refused(t, "was made while gradients were off"))
        if key in self._substitutes:
            self._substituted = True
            return self._substitutes[key][1]
        if key in self._known or self.existing.has(t) or isinstance(t, torch.nn.Parameter):
            return t
        if functorch.is_functorch_wrapped_tensor(t):
            return self._read_wrapped(t)
        self._substituted = True
        # on a GPU in a thread of torch's own, which has made fewer nodes than f's
        if is_made_in(t, since(self._start)):
            why = "was made by code that torch does not show"
            return self.put(t, self.refused(t, why) if self._may_hide else t)
        with outside_of_func(), torch.enable_grad():
            return self.put(t, self._place(self, t))

    def _read_wrapped(self, t: Tensor) -> Tensor:
        """Return a tensor of torch.func, which the rule itself has called: that wraps without
        asking this mode, and at several levels it makes tensors so.
        """
        inner = levels(t)[-1]
        is_known = id(inner) in self._known and id(inner) not in self._substitutes
        if self._may_hide and not (is_known or self.existing.has(inner)):
            self._wrapped = inner
        return t

    def result(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients that the rule has returned; some are what it has read."""
        with torch._C.DisableTorchFunction():
            connected: list[Tensor | None] = self.read_each(list(gradients))
            if self._wrapped is not None:
                why = "torch.func has wrapped, in grad_fn"
                connected = [g if g is None else self.refused(g, why) for g in connected]
        return connected

    def refused(self, t: Tensor, why: str) -> Tensor:
        """Return an alias of a tensor whose derivative is refused, if it is taken."""
        call, place, shown = self.call, place_of(t), torch.empty_like(t, device="meta")
        why = f"{why} (it is kept as {place})" if place else why
        with outside_of_func(), torch.enable_grad():
            (alias,) = without_derivative(
                lambda _: call.refuse_unconnected(shown, why), [t], self._anchors
            )
        return alias

    def read_each(self, x: Any) -> Any:
        """Return an argument of an operation with what to read for the tensors in it."""
        if isinstance(x, torch.Tensor):
            return self.read(x)
        kind = type(x)
        if kind is tuple or kind is list:
            return kind([self.read_each(item) for item in x])
        if kind is dict and x:
            return {key: self.read_each(item) for key, item in x.items()}
        return x

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with_graph = torch.is_grad_enabled()
        self._substituted = self._differentiated = False
        with torch._C.DisableTorchFunction():
            self.before_operation(func, args, kwargs)
            asks_a_graph = func is torch.autograd.grad
            is_known = not asks_a_graph or self._knows_graph(args, kwargs)
            if is_known:
                # of its roots and leaves the graph is wanted, which no substitute has
                whole = 2 if asks_a_graph else 0
                args = *args[:whole], *self.read_each(args[whole:])
                kwargs = {
                    name: x if asks_a_graph and name in _ASKED else self.read_each(x)
                    for name, x in kwargs.items()
                }
        result = func(*args, **kwargs)
        if func is _GETS_GRADIENT:  # which it has not made
            return result
        with torch._C.DisableTorchFunction():
            for t in tensors_in(result):
                if not is_known:
                    self.put(t, self.refused(t, "comes from a graph that f made"))
                elif id(t) not in self._substitutes:
                    # torch.func unwraps it without asking this mode
                    self._known.update((id(level), level) for level in levels(t))
                    if not with_graph and (self._substituted or self._differentiated):
                        self._cut[id(t)] = self._substituted
        return result

    def _knows_graph(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if torch.autograd.grad is asked of what was made since: f's own graph ends at
        numbers.
        """
        asked = [*args[:2], *[kwargs.get(name) for name in _ASKED]]
        return all(id(t) in self._known for t in tensors_in(asked))

    def before_operation(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Do nothing: another run of f looks at what is written."""


_ASKED = ("outputs", "inputs")
_GETS_GRADIENT = torch.Tensor.grad.__get__


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in the result of an operation."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from tensors_in(item)


def reads_now() -> Reads | None:
    """Return what substitutes the reads of the innermost rule that makes a graph; None if no such
    rule runs.
    """
    if not len_function_stack():  # torch makes a list of them
        return None
    return next(
        (mode for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, Reads)),
        None,
    )


def known_constant(t: Tensor) -> Tensor:
    """Return a tensor of NumPy's numbers, which no operation has made: a rule reads it as it is.

    Where it may be made of numbers of what the rule reads, nobody knows.
    """
    reads = None if torch.compiler.is_dynamo_compiling() else reads_now()
    if reads is not None and not reads.gave_numbers:
        reads.knows(t)
    return t


def note_numbers() -> None:
    """Note that what runs reads the numbers of a tensor."""
    reads = None if torch.compiler.is_dynamo_compiling() else reads_now()
    if reads is not None:
        reads.gave_numbers = True


# --- What has no derivative -----------------------------------------------------------------------


def without_derivative(
    refuse: Refuse, tensors: Sequence[Tensor | None], connected: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return tensors as functions of the connected ones; differentiating them raises an error."""
    present = [t for t in tensors if t is not None]
    if any(
        map(functorch.is_legacy_batchedtensor, present)
    ):  # the batch would not record a Function
        refuse("create_graph with is_grads_batched")
    aliases = iter(
        _WithoutDerivative.apply(refuse, len(present), *present, *connected) if present else ()
    )
    return [None if t is None else next(aliases) for t in tensors]


def without_second_order(
    call: Call, made: Sequence[Tensor | None], of: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Return gradients or tangents; if the op is once_differentiable, without a derivative by what
    they are made of.
    """
    is_watched = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if not (call.once_differentiable and is_watched):
        return made
    return without_derivative(call.refuse_second_order, made, [t for t in of if t is not None])


class _WithoutDerivative(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(refuse: Refuse, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.refuse = inputs[0]

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> None:
        ctx.refuse("reverse mode over its gradient")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        ctx.refuse("forward mode over its gradient")
