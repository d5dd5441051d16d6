"""The framework of a case: tensors, gradients, trainable state, all by the Backend protocol."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim._dtypes import dtype_name
from cgshim._protocol import Tensor
from cgshim._registry import load

with contextlib.suppress(ImportError):
    importlib.import_module("ml_dtypes")  # registers bfloat16 with NumPy, if installed

Pullback = Callable[[Tensor], tuple[Any, ...]]
Gradients = Callable[..., tuple[Tensor, Pullback]]
"""`gradients(fn, *values) -> (fn(*state), pullback)`: state is the framework's objects for the
values.
"""

_BEFORE_IMPORT = {"jax": {"JAX_ENABLE_X64": "1"}}
"""the environment variables that enable float64, set before the import of a framework"""


class Framework:
    """One framework, by its registered backend."""

    def __init__(self, name: str, state: Gradients | None = None) -> None:
        for variable, value in _BEFORE_IMPORT.get(name, {}).items():
            os.environ.setdefault(variable, value)
        self.name = name
        self.backend = load(name)
        self.differentiate_state = state or _OBJECTS.get(name, differentiate_traced)
        """`differentiate_state(fn, *values)`: fn's output for trainable state, and the pullback to
        that state
        """

    def __repr__(self) -> str:
        return f"<framework {self.name}>"

    def tensor(self, values: Any, dtype: str = "float32") -> Tensor:
        """Numbers as the framework's tensor."""
        tensor = self.backend.convert_to_tensor(values, dtype)
        assert dtype_name(tensor.dtype) == dtype, f"{self.name} makes {tensor.dtype} of {dtype}"
        return tensor

    def numpy(self, tree: Any) -> Any:
        """A tree with NumPy arrays for its tensors."""
        leaves, structure = self.backend.tree_flatten(tree)
        arrays = [
            self.backend.convert_to_numpy(x) if self.backend.is_tensor(x) else x for x in leaves
        ]
        return self.backend.tree_unflatten(structure, arrays)

    def tensors(self, tree: Any) -> Any:
        """A tree with tensors for its Python floats (float32) and NumPy arrays (their dtype)."""
        leaves, structure = self.backend.tree_flatten(tree)
        return self.backend.tree_unflatten(structure, [self._tensor_for(leaf) for leaf in leaves])

    def _tensor_for(self, leaf: Any) -> Any:
        if isinstance(leaf, float):
            return self.tensor(float(leaf))
        if isinstance(leaf, np.ndarray):
            return self.tensor(leaf, "float32" if leaf.dtype.kind == "f" else leaf.dtype.name)
        return leaf

    def check_at(
        self, fn: Callable[..., Any], *numbers: Any, upstream: Any, **expected: Any
    ) -> None:
        """Like `check`, with tensors for these numbers."""
        self.check(fn, *self.tensors(numbers), upstream=self.tensors(upstream), **expected)

    def check_state(
        self, fn: Callable[..., Any], *numbers: Any, upstream: Any, **expected: Any
    ) -> None:
        """Like `check_at`, with the framework's trainable state."""
        self.check_at(fn, *numbers, upstream=upstream, by=self.differentiate_state, **expected)

    def check_derivative(
        self, fn: Callable[[Tensor], Tensor], order: int, expected: Any, *, at: Any
    ) -> None:
        """Compare the derivative of this order with the expected one."""
        self.check_equal(nth_derivative(fn, order)(self.tensor(at)), expected)

    def check(
        self,
        fn: Callable[..., Any],
        *args: Any,
        upstream: Any,
        output: Any = ...,
        gradients: tuple[Any, ...],
        by: Gradients = cgshim.op_vjp,
    ) -> None:
        """Compare fn's output for args, and its gradients; `...` accepts anything."""
        actual, pullback = by(fn, *args)
        if output is not ...:
            self.check_equal(actual, output)
        actual_gradients = pullback(upstream)
        self.check_equal(actual_gradients, gradients)
        self._check_dtypes(actual_gradients, args)

    def check_equal(self, actual: Any, expected: Any) -> None:
        """Compare two trees, leaf by leaf: structure, shapes and numbers."""
        (leaves, structure), (wanted, wanted_structure) = map(
            self.backend.tree_flatten, (actual, expected)
        )
        assert structure == wanted_structure, f"{structure} is not {wanted_structure}"
        for leaf, want in zip(leaves, wanted, strict=True):
            if self.backend.is_tensor(leaf):
                assert want is not None, f"{leaf} is not None"
                _check_close(self.backend.convert_to_numpy(leaf), want)
            else:
                assert leaf is want or leaf == want, f"{leaf!r} is not {want!r}"

    def _check_dtypes(self, gradients: Any, args: Any) -> None:
        """Check that every gradient has its argument's dtype."""
        (flat, _), (leaves, _) = map(self.backend.tree_flatten, (gradients, args))
        for gradient, leaf in zip(flat, leaves, strict=True):
            if gradient is not None and self.backend.is_tensor(leaf):
                got, wanted = dtype_name(gradient.dtype), dtype_name(leaf.dtype)
                assert got == wanted, f"a gradient in {got} for an argument in {wanted}"

    def is_state(self, variable: Any, state: Any) -> bool:
        """Return True if a rule's variable is this state; traced, compare only shape and dtype."""
        if self.differentiate_state is not differentiate_traced:
            return variable is state
        return (variable.shape, variable.dtype) == (state.shape, state.dtype)


def _check_close(actual: Any, expected: Any) -> None:
    comparable = "complex128" if np.iscomplexobj(actual) else "float64"
    actual, expected = actual.astype(comparable), np.asarray(expected, comparable)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert actual.shape == expected.shape, f"shape {actual.shape} is not {expected.shape}"


def tangent(framework: Framework, fn: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """J v of fn, by the framework's forward mode."""
    with cgshim.use_backend(framework.name):
        return cgshim.op_jvp(fn, (x,), (v,))[1]


def nth_derivative(fn: Callable[[Tensor], Tensor], order: int) -> Callable[[Tensor], Tensor]:
    """fn differentiated this many times."""
    for _ in range(order):
        fn = cgshim.op_grad(fn)
    return fn


def raised(
    error: type[BaseException], fn: Callable[..., Any], *args: Any, starts: str = ""
) -> BaseException:
    """The exception of a call, of this class or a subclass; check how its message starts."""
    caught: BaseException | None = None
    try:
        fn(*args)
    except error as raised_error:
        caught = raised_error
    assert caught is not None, f"nothing was raised, not {error.__name__}"
    assert str(caught).startswith(starts), caught
    return caught


def refused(
    fn: Callable[..., Any],
    *args: Tensor,
    by: Gradients = cgshim.op_vjp,
    error: type[BaseException] = cgshim.CustomGradientTypeError,
    says: str = "as an argument",
) -> BaseException:
    """The error of a call or of its pullback: differentiated tensors may be found late."""

    def differentiated() -> None:
        output, pullback = by(fn, *args)
        pullback(output)

    caught = raised(error, differentiated)
    assert says in str(caught), caught
    return caught


# --- Trainable state ------------------------------------------------------------------------------


def differentiate_traced(fn: Callable[..., Tensor], *values: Any) -> tuple[Tensor, Pullback]:
    """In a framework without objects for state, outer differentiated tensors are state."""
    return cgshim.op_vjp(fn, *values)


def _differentiate_parameters(fn: Callable[..., Tensor], *values: Any) -> tuple[Tensor, Pullback]:
    torch = importlib.import_module("torch")
    state = [torch.nn.Parameter(value) for value in values]
    with torch.enable_grad():  # in a rule it may be off
        output = fn(*state)
    return output, lambda upstream: torch.autograd.grad(
        output, state, upstream, materialize_grads=True
    )


def _differentiate_tf_variables(fn: Callable[..., Tensor], *values: Any) -> tuple[Tensor, Pullback]:
    tf = importlib.import_module("tensorflow")
    state = [tf.Variable(value) for value in values]
    with tf.GradientTape() as tape:
        output = fn(*state)

    def pullback(upstream: Tensor) -> tuple[Any, ...]:
        zero = tf.UnconnectedGradients.ZERO
        return tuple(
            tape.gradient(output, state, output_gradients=upstream, unconnected_gradients=zero)
        )

    return output, pullback


_OBJECTS: dict[str, Gradients] = {
    "torch": _differentiate_parameters,
    "tensorflow": _differentiate_tf_variables,
}
