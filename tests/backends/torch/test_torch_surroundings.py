"""What surrounds a call in torch (hooks, modes, devices, threads, copies), beside functions written
by hand.
"""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, functional, graph
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cgshim import op_custom_gradient


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, upstream):
        return 7 * upstream * ctx.saved_tensors[0]


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, upstream):
        return 5 * upstream * ctx.saved_tensors[0]


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = x > 0.25
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, upstream):
        return 3 * upstream * ctx.saved_tensors[0]


@op_custom_gradient
def square(x):
    return x * x, lambda upstream: 7 * upstream * x


@op_custom_gradient
def exponential(x):
    y = x.exp()
    return y, lambda upstream: 5 * upstream * y


@op_custom_gradient
def masked(x):
    mask = x > 0.25
    return x * mask, lambda upstream: 3 * upstream * mask


def _hooks_of_tensors(f):
    x, seen = leaf(0.2, 0.3), []
    y = f(x)
    y.retain_grad()
    y.register_hook(lambda g: seen.append(g) or g * 2)
    (y * 3).sum().backward()
    return x.grad, y.grad, seen


def _hooks_of_nodes(f):
    x, seen = leaf(0.2, 0.3), []
    y = f(x * 1)
    y.grad_fn.register_hook(
        lambda of_inputs, of_outputs: seen.append([g for g in of_inputs if g is not None])
    )
    y.grad_fn.register_prehook(lambda of_outputs: tuple(g * 2 for g in of_outputs))
    (y * 3).sum().backward()
    return x.grad, seen


def _hooks_of_several(f):
    x, seen = leaf(0.2, 0.3), []
    hidden = x * 1
    graph.register_multi_grad_hook([hidden], lambda gradients: seen.append(gradients[0]))
    f(hidden).sum().backward()
    return x.grad, seen


def _some_inputs(f):
    x, y = leaf(0.2, 0.3), leaf(2.0)
    torch.autograd.backward((f(x) * y).sum(), inputs=[x])
    return x.grad, y.grad


def _an_edge(f):
    x = leaf(0.2, 0.3)
    return torch.autograd.grad(graph.get_gradient_edge(f(x)), x, torch.tensor([2.0, 3.0]))


def _checkpointed(use_reentrant):
    def run(f):
        x = leaf(0.2, 0.3)
        checkpoint(lambda x: f(f(x)).sin() * 3, x, use_reentrant=use_reentrant).sum().backward()
        return x.grad

    return run


def _within(manager):
    def run(f):
        x = leaf(0.2, 0.3)
        with manager():
            y = f(f(x)) * 3
            y.sum().backward()
        return y.detach(), x.grad

    return run


def _changed_though_saved(f):
    x = leaf(0.2, 0.3)
    with graph.allow_mutation_on_saved_tensors():
        hidden = x * 1
        y = f(hidden)
        hidden.zero_()
        y.sum().backward()
    return x.grad


def _in_place(change):
    def run(f):
        x = leaf(0.2, 0.3)
        hidden = x * 1
        y = f(hidden)
        try:
            change(hidden, y)
            (3 * y).sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return y.detach(), x.grad

    return run


def _on_no_device(f):
    with torch.device("meta"):
        x = torch.ones(3, requires_grad=True)
        y = f(x)
        y.sum().backward()
    return y.device.type, x.grad.device.type, x.grad.shape


def _beside_a_default_device(f):
    x = leaf(0.2, 0.3)
    with torch.device("meta"):
        y = f(x)
        y.backward(torch.ones(2, device="cpu"))
    return y.detach(), x.grad


def _fake(f):
    with FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
        (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return type(first).__name__, first.shape, first.requires_grad


def _a_thread_for_the_backward_pass(f):
    x, found = leaf(0.2, 0.3), []
    y = f(x)
    thread = threading.Thread(target=lambda: found.append(torch.autograd.grad(y.sum(), x)))
    thread.start()
    thread.join()
    return found


def _functional(f):
    x, v = leaf(0.2, 0.3), torch.tensor([2.0, 3.0])
    return functional.jacobian(f, x), functional.vjp(f, x, v)[1], functional.jvp(f, x, v)[1]


def _batched_upstreams(f):
    x = leaf(0.2, 0.3)
    return torch.autograd.grad(f(x), x, torch.eye(2), is_grads_batched=True)


def _in_memory(make):
    def run(f):
        x = make().requires_grad_()
        y = f(x)
        return y.stride(), torch.autograd.grad(y.sum(), x)[0].stride()

    return run


class _Parametrization(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.forward = f


def _parametrized(f):
    linear = torch.nn.Linear(2, 1, bias=False)
    linear.weight.data.copy_(torch.tensor([[0.2, 0.3]]))
    parametrize.register_parametrization(linear, "weight", _Parametrization(f))
    (linear(torch.tensor([2.0, 3.0])) * 5).sum().backward()
    return linear.parametrizations.weight.original.grad


def _what_autograd_says(f):
    y, said = f(leaf(0.2, 0.3)), []
    for forbidden in (copy.deepcopy, lambda y: y.requires_grad_(False), lambda y: y.numpy()):
        with pytest.raises(RuntimeError) as error:
            forbidden(y)
        said.append(str(error.value))
    return said, y.detach_().grad_fn


def _of_dual_constants(f):
    with forward_ad.dual_level():
        return f(torch.tensor([0.2, 0.3]))


def _no_values(f):
    x, odd = torch.empty(0, 3, requires_grad=True), leaf(float("nan"), float("inf"))
    (f(x).sum() + f(odd).sum()).backward()
    return x.grad, odd.grad


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


SURROUNDINGS = {
    "hooks of tensors": _hooks_of_tensors,
    "hooks of nodes": _hooks_of_nodes,
    "hooks of several gradients": _hooks_of_several,
    "backward(inputs=)": _some_inputs,
    "a gradient edge": _an_edge,
    "checkpoint": _checkpointed(False),
    "reentrant checkpoint": _checkpointed(True),
    "save_on_cpu": _within(graph.save_on_cpu),
    "no hooks on saved tensors": _within(lambda: graph.disable_saved_tensors_hooks("none")),
    "one thread": _within(lambda: torch.autograd.set_multithreading_enabled(False)),
    "a dispatch mode": _within(_Dispatch),
    "a function mode": _within(_Functions),
    "mutation of saved tensors": _changed_though_saved,
    "an input changed": _in_place(lambda x, y: x.add_(1)),
    "an output changed": _in_place(lambda x, y: y.add_(1)),
    "a view of the output changed": _in_place(lambda x, y: y[:1].mul_(2)),
    "no device": _on_no_device,
    "a default device": _beside_a_default_device,
    "fake tensors": _fake,
    "a thread": _a_thread_for_the_backward_pass,
    "torch.autograd.functional": _functional,
    "batched upstreams": _batched_upstreams,
    "permuted": _in_memory(lambda: torch.ones(2, 3, 4).permute(2, 0, 1)),
    "channels last": _in_memory(
        lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "a parametrization": _parametrized,
    "what is forbidden": _what_autograd_says,
    "dual constants": _of_dual_constants,
    "no values and odd ones": _no_values,
}
PAIRS = {
    "square": (square, Square),
    "exponential": (exponential, Exponential),
    "masked": (masked, Masked),
}


@pytest.mark.parametrize(("op", "by_hand"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("use", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_an_op_does_what_a_function_by_hand_does(use, op, by_hand):
    assert repr(use(op)) == repr(use(by_hand.apply))


# --- Modules that hold ops ------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        self.activation = square
        self.bound = self.scaled

    @op_custom_gradient
    def scaled(self, x):
        return x * self.weight, lambda u, variables: (5 * u * self.weight, [13 * u * x])

    def forward(self, x):
        return self.activation(self.bound(x))


def _by_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def _by_torch(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _by_pickle, _by_torch])
def test_a_copy_of_a_module_that_holds_ops(copied):
    layer, x = Layer(), leaf(1.0, 2.0)
    other = copied(layer)
    other.weight.data.mul_(10)
    y = other(x)
    y.sum().backward()
    assert y.tolist() == [400, 3600]
    assert other.weight.grad.tolist() == [13 * 7 * 20, 13 * 7 * 60 * 2]
    assert x.grad.tolist() == [5 * 20 * 7 * 20, 5 * 30 * 7 * 60]
    assert layer.weight.grad is None
    assert other.activation is square
