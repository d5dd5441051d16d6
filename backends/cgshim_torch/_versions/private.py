"""What PyTorch does not document and this backend needs, each with its use. Seen in 2.6 to 2.15.

`_compile.dynamo` and `_compile.guards` import what only Dynamo needs, because Dynamo takes a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch._functorch.autograd_function
import torch._functorch.pyfunctorch
import torch._subclasses.functional_tensor
import torch.fx.experimental.proxy_tensor
import torch.utils.checkpoint
from torch.autograd import forward_ad as _forward_ad
from torch.fx import _symbolic_trace
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from cgshim_torch._versions.limits import GIVES_AWAY_CALLBACK

functorch: Any = torch._C._functorch
"""the levels of torch.func: which are active, and how tensors are wrapped"""
current_level: Callable[[], int | None] = functorch.maybe_current_level
"""returns the innermost level of torch.func; None if no transformation is active"""
is_dead_wrapper: Callable[[Any], bool] = functorch.is_dead_tensor_wrapper
"""returns True for a tensor that has outlived its transformation"""
custom_function_call: Any = torch._functorch.autograd_function.custom_function_call
"""applies a Function at the levels of torch.func"""
vmapify_autograd_function: Any = torch._functorch.autograd_function.vmapify_autograd_function
"""returns a Function over a batch, which also returns where its outputs have it; before torch 2.7 a
function tells that
"""
temporarily_clear_interpreter_stack: Any = (
    torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
)
"""leaves all levels of torch.func for a while"""
temporarily_pop_interpreter_stack: Any = (
    torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack
)
"""lets a tensor be read from the outer levels"""
forward_ad: Any = _forward_ad
"""documented, except _current_level, which shows dual numbers, and _set_fwd_grad_enabled"""
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
"""calls the kernel of an operation, without its derivative"""

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""returns the number of the next node that this thread adds to the graph"""
pack_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None
)  # fmt: skip
"""returns the hooks on saved tensors that are active, None if there are none, and in 2.6, which does not tell"""
StopRecomputation: type[Exception] = torch.utils.checkpoint._StopRecomputationError
"""what a checkpoint raises from within an operation, to end what it recomputes"""
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
"""does what torch.autograd.grad does, which looks at its arguments for half of the time of a small graph"""
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""returns True if autocast is on for any kind of device"""

len_function_stack: Callable[[], int] = torch._C._len_torch_function_stack
"""returns how many modes see functions of torch"""
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
"""returns one of these modes, the outermost first"""
len_dispatch_stack: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""returns how many modes see operations: make_fx, fake tensors"""
jit_is_tracing: Callable[[], bool] = torch._C._is_tracing
"""returns True while torch.jit traces: torch.jit.is_tracing without its look at scripts"""
fx_is_tracing: Callable[[], bool] = getattr(
    _symbolic_trace, "_get_is_fx_tracing", lambda: bool(_symbolic_trace._is_fx_tracing_flag)
)  # fmt: skip
"""returns True while torch.fx traces"""
get_proxy_mode: Any = torch.fx.experimental.proxy_tensor.get_proxy_mode
"""returns the mode of make_fx, None if it is not tracing"""
disable_proxy_modes_tracing: Any = torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing
"""keeps operations out of the graph that make_fx is making"""
FakeTensor: Any = torch._subclasses.FakeTensor
"""has a shape and no values: torch.export and torch.compile trace with such tensors"""
FunctionalTensor: Any = torch._subclasses.functional_tensor.FunctionalTensor
"""stands for one, where AOTAutograd traces"""
tags_of_host: list[Any] = [
    tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe"
]
"""says of an operation that CUDA graphs cannot hold it, in versions that have such a tag"""


class SingleLevelFunction(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]
    """A Function that is applied only outside of torch.func: its apply does not look at that, which
    takes time.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """Return the key of such a node for compiled autograd, as for any Function."""
        return (ctx._autograd_function_id,)


def functions_are_seen() -> bool:
    """Return True if a mode sees functions of torch; that of torch.set_default_device only says where
    tensors are made.
    """
    count = len_function_stack()
    return count > 1 or (count == 1 and type(function_mode_at(0)) is not DeviceContext)


def default_device() -> torch.device | None:
    """Return where torch makes tensors in this thread, by the innermost mode that says so; None if none
    does.
    """
    if not len_function_stack():
        return None
    modes = map(function_mode_at, reversed(range(len_function_stack())))
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def outside_of_func() -> Any:
    """Let what follows run outside of all levels of torch.func."""
    is_outside = functorch.peek_interpreter_stack() is None
    return contextlib.nullcontext() if is_outside else temporarily_clear_interpreter_stack()


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Let what follows run outside of torch.func, and unseen by modes that see operations."""
    unseen = _disable_current_modes() if len_dispatch_stack() else contextlib.nullcontext()
    with outside_of_func(), unseen:
        yield


def apply_over_batch(
    function: Any, info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Apply a Function over a batch; return its outputs, and where they have the batch."""
    batched = vmapify_autograd_function(function, in_dims, info.batch_size, info.randomness)
    if isinstance(batched, tuple):
        batched, get_out_dims = batched
        return custom_function_call(batched, *args), get_out_dims()
    *outputs, out_dims = custom_function_call(batched, *args)
    return tuple(outputs), out_dims


def alive_in(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that a weak reference leads to.

    Before torch 2.10 a tensor that Python has let go of may be torch's: it has to be told that
    Python holds it again, or it warns that it lets go of an object with references. TensorWeakRef of
    torch.utils.weak does so, too, and takes twice as long: a call notes each buffer of a module.
    """
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()
    return tensor


def keeps_graph() -> bool:
    """Return True if the backward pass in progress may run again, as far as one can tell: of that of
    compiled autograd Dynamo cannot trace the question.
    """
    is_traced = torch.compiler.is_dynamo_compiling()
    return is_traced or bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _callback_of_its_own() -> object:
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    return callback


frame_callback: Callable[[], object] = (
    _callback_of_its_own
    if GIVES_AWAY_CALLBACK
    else torch._C._dynamo.eval_frame.get_eval_frame_callback
)
"""returns what Dynamo does with every frame that runs, and may compile; None if it looks at none"""
