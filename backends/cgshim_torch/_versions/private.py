"""What PyTorch does not document and this backend needs, each with its use. Seen in 2.6 to 2.15.

`_compile.dynamo` and `_compile.guards` import what only Dynamo needs, because Dynamo takes a second.
"""

# one import a module, with a comment for each name

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    _AutoDispatchBelowAutograd as below_autograd,  # calls an operation's kernel, without derivative
    _functorch as functorch,  # the levels of torch.func: which are active, how tensors are wrapped
    _is_any_autocast_enabled as is_any_autocast_enabled,  # for any kind of device
    _is_tracing as jit_is_tracing,  # torch.jit.is_tracing without its look at scripts
    _len_torch_dispatch_stack as len_dispatch_stack,  # how many modes see operations: make_fx, fakes
    _len_torch_function_stack as len_function_stack,  # how many modes see functions of torch
)
from torch._C._autograd import (
    _get_sequence_nr as sequence_number,  # of the next node that this thread adds to the graph
)
from torch._C._functorch import (
    is_dead_tensor_wrapper as is_dead_wrapper,  # of a tensor that has outlived its transformation
    maybe_current_level as current_level,  # of torch.func, the innermost; None if there is none
)
from torch._functorch.autograd_function import (
    custom_function_call as custom_function_call,  # applies a Function at the levels of torch.func
    vmapify_autograd_function as vmapify_autograd_function,  # makes a Function over a batch,
    # which also returns where its outputs have it
)
from torch._functorch.pyfunctorch import (
    temporarily_pop_interpreter_stack as temporarily_pop_interpreter_stack,  # to the outer levels
)
from torch._subclasses import (
    FakeTensor as FakeTensor,  # has a shape and no values: torch.export and torch.compile use it
)
from torch.autograd import (
    forward_ad as forward_ad,  # documented, except _current_level, which shows dual numbers, and
    # _set_fwd_grad_enabled
)
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing as disable_proxy_modes_tracing,  # operations stay out of the graph
    get_proxy_mode as get_proxy_mode,  # the mode of make_fx, None if it is not tracing
)

from cgshim_torch._versions.limits import GIVES_AWAY_CALLBACK

# for type checkers, which take only what keeps its name for exported
__all__ = [
    "below_autograd", "current_level", "functorch", "is_any_autocast_enabled", "is_dead_wrapper", "jit_is_tracing",
    "len_dispatch_stack", "len_function_stack", "sequence_number",
]  # fmt: skip

pack_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None
)  # fmt: skip
"""returns the hooks on saved tensors that are active, None if there are none, and in 2.6, which does not tell"""
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
"""does what torch.autograd.grad does, which looks at its arguments for half of the time of a small graph"""
fx_is_tracing: Callable[[], bool] = getattr(
    _symbolic_trace, "_get_is_fx_tracing", lambda: bool(_symbolic_trace._is_fx_tracing_flag)
)  # fmt: skip
"""returns True while torch.fx traces"""
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


def outside_of_func() -> Any:
    """Let what follows run outside of all levels of torch.func."""
    is_outside = functorch.peek_interpreter_stack() is None
    return contextlib.nullcontext() if is_outside else temporarily_pop_interpreter_stack()


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
