"""PyTorch: a call in a graph that torch.export, torch.jit.trace, make_fx or torch.fx.symbolic_trace
is making.

symbolic_trace records the op itself. The other graphs hold only operations on tensors: those of f.
They cannot hold a rule, so a gradient of what they compute would be autodiff's. If gradients are
enabled while the graph is made, one more operation follows f's: it returns its inputs, and raises
an error if it is differentiated. If they are not (for jit.trace: in inference mode), the graph is
only f's, for inference. A gradient that is taken while the graph is made is the rule's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.fx import Proxy

from cgshim.backend import (
    ONE_TENSOR,
    Call,
    CustomGradient,
    Tensor,
    TransformationError,
    combine_each,
    describe,
    refusal,
)
from cgshim_torch._eager.attach import Outputs, differentiable
from cgshim_torch._graph.levels import is_transformed, requires_grad
from cgshim_torch._graph.walk import within_reach
from cgshim_torch._versions.private import below_autograd, get_proxy_mode, jit_is_tracing


def staged(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return the outputs of a call in the graph that is being made, or as in any other call if none
    is.
    """
    # a call for each of thousands of tensors would take longer than the rest
    if not _OF_TORCH.issuperset(map(type, inputs)) and any(isinstance(x, Proxy) for x in inputs):
        return [_recorded(call, inputs)], ONE_TENSOR
    if jit_is_tracing() and not torch.is_inference_mode_enabled():
        # without gradients too: jit.trace then makes the graph again
        return without_gradient(call, inputs)
    outputs, spec = differentiable(call, inputs)
    if not torch.is_grad_enabled() or get_proxy_mode() is None:
        return outputs, spec
    following = [
        node for y in outputs if y.grad_fn is not None for node, _ in y.grad_fn.next_functions
    ]
    leaves = {id(node.variable): node.variable for node in following if hasattr(node, "variable")}
    # with Parameters
    return _Marked.apply(call.name, False, len(outputs), *outputs, *inputs, *leaves.values()), spec


_OF_TORCH = frozenset([torch.Tensor, torch.nn.Parameter])


def without_gradient(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs, whose gradient raises an error."""
    outputs, rule = call.with_needs_input_grad([False] * len(inputs))(inputs)
    return torch.ops.cgshim.without_gradient(outputs, list(inputs), call.name), rule.output


# --- torch.fx -------------------------------------------------------------------------------------


def _recorded(call: Call, inputs: Sequence[Tensor]) -> Proxy:
    """Record the op itself in the graph that symbolic_trace makes; its output is one node, whatever
    it holds.
    """
    for tensor in filter(requires_grad, within_reach(call)):
        call.refuse("torch.fx records an op without the state that f reads", describe(tensor),
                    "pass it as an argument")  # fmt: skip
    tracer = next(x.tracer for x in inputs if isinstance(x, Proxy))
    return tracer.create_proxy(
        "call_function",
        _op_of(call),
        tuple(combine_each(call.arguments.specs, inputs)),
        call.options,
    )


def _op_of(call: Call) -> CustomGradient[..., Any]:
    """Return the op that is called: the one found by f's name if its f is this one, else a new one."""
    module = sys.modules.get(getattr(call.f, "__module__", None) or "")
    op = getattr(module, getattr(call.f, "__qualname__", ""), None)
    if isinstance(op, CustomGradient) and op.held_function is call.f:
        return op
    return CustomGradient(
        call.f,
        forward_mode=call.forward_mode,
        once_differentiable=call.once_differentiable,
        name=call.name,
        kind_of_call=type(call),
    )


# --- The operation that refuses a gradient --------------------------------------------------------


class _Marked(torch.autograd.Function):  # type: ignore[misc]
    """Returns outputs by the operation that marks them, in autograd and at each level of
    torch.func.

    Their derivative is refused, except while the graph is made: then they keep what they have.
    """

    @staticmethod
    def forward(op: str, is_refused: bool, outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            return tuple(
                torch.ops.cgshim.without_gradient(tensors[:outputs], tensors[outputs:], op)
            )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op, ctx.is_refused, ctx.outputs, *tensors = inputs
        if not ctx.is_refused:
            ctx.save_for_backward(*tensors[ctx.outputs :])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_refused:
            _refuse(ctx.op)
        inputs = ctx.saved_tensors
        # a gradient's graph has no own gradient
        if get_proxy_mode() is not None and not is_transformed():
            upstreams = _Marked.apply(ctx.op, False, ctx.outputs, *upstreams, *inputs)
        return None, None, None, *upstreams, *[None] * len(inputs)

    @staticmethod
    def jvp(
        ctx: Any, _: None, __: None, ___: None, *tangents: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.is_refused:
            _refuse(ctx.op)
        return tuple([None if t is None else t.clone() for t in tangents[: ctx.outputs]])

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], op: str, is_refused: bool, outputs: int, *tensors: Tensor
    ) -> Any:  # fmt: skip
        return _Marked.apply(op, is_refused, outputs, *tensors), tuple(in_dims[3 : 3 + outputs])


def _refuse(op: str) -> NoReturn:
    raise refusal(TransformationError, op, must="the graph of an op is that of f alone",
                  got="a derivative of it", do="differentiate the op, or make the graph of its gradient")  # fmt: skip


def _copies(outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    return [y.clone() for y in outputs]


def _refusing(outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    return list(_Marked.apply(op, True, len(outputs), *outputs, *inputs))


_library = torch.library.Library("cgshim", "DEF")
_library.define("without_gradient(Tensor[] outputs, Tensor[] inputs, str op) -> Tensor[]")
_library.impl("without_gradient", _copies, "CompositeExplicitAutograd")
_library.impl("without_gradient", _refusing, "Autograd")
# else an outer level is left out
_library.impl("without_gradient", _refusing, "FuncTorchDynamicLayerFrontMode")
torch.library.register_fake("cgshim::without_gradient", _copies, lib=_library)
