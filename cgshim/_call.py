"""One call of an op, as a backend sees it: tensors in, tensors and a rule out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from cgshim._backend import Backend, Tensor, config_backend, is_numpy_array, name_of, select
from cgshim._contents import SIMPLE, tensors_inside
from cgshim._convention import Rule
from cgshim._errors import BackendError, CustomGradientTypeError, TransformationError, describe, function_name, sentence
from cgshim._tree import ONE_TENSOR, Parts, fill_each, take_apart

T = TypeVar("T")


class Call:
    """What a backend is given: calling it runs f on tensors, and returns the output's tensors and the rule.

    A backend may call it as often as its framework needs (a retrace, a second order), with other tensors of the same
    shapes and dtypes: tracers, boxes, copies.
    """

    __slots__ = (
        "arguments", "backend", "f", "forward_mode", "name", "names", "once_differentiable", "options", "output",
    )  # fmt: skip

    output: Parts
    """the parts of what f returned, once it has run"""

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        forward_mode: bool,
        backend: Backend,
        names: Sequence[str],
        arguments: Sequence[Parts],
        options: Mapping[str, Any],
        once_differentiable: bool = False,
    ) -> None:
        self.name = name
        self.f = f
        self.forward_mode = forward_mode
        self.backend = backend
        self.names = names
        self.arguments = arguments
        self.options = options
        self.once_differentiable = once_differentiable

    def __call__(self, inputs: Sequence[Tensor], f: Callable[..., Any] | None = None) -> tuple[list[Tensor], Rule]:
        """Run f once on inputs; the tensors of its output, and the rule that goes with them.

        A backend may give an f of its own: the author's, round other captured tensors.
        """
        output, grad_fn = pair(self.name, self.f, (f or self.f)(*fill_each(self.arguments, inputs), **self.options))
        try:
            outputs, self.output = take_apart(self.name, self.backend, output)
        except BackendError as error:
            raise ForeignOutputError(output, error) from None
        if inputs and not outputs:
            raise CustomGradientTypeError(
                sentence(self.name, "the output of f must hold a tensor when an argument does", describe(output),
                         f"return a tensor of {name_of(self.backend)}")
            )  # fmt: skip
        if self.output is not ONE_TENSOR:
            self._refuse_tensors_in(self.output.static_leaves())
        return outputs, Rule(self, grad_fn, self.output, inputs)

    def _refuse_tensors_in(self, leaves: Sequence[Any]) -> None:
        """Raise where a leaf of the output that is no tensor holds one: no rule speaks for it."""
        for leaf in leaves:
            if type(leaf) in SIMPLE or any(
                leaf is given for parts in self.arguments for given in parts.static_leaves()
            ):
                continue
            for tensor in tensors_inside(leaf, self.backend.is_tensor):
                raise CustomGradientTypeError(
                    sentence(self.name, "the output of f must hold its tensors in containers that the backend knows",
                             f"{describe(tensor)} in {describe(leaf)}", "return the tensor itself")
                )  # fmt: skip

    def refuse(self, rule: str, transformation: str, instead: str) -> NoReturn:
        """Raise the error for a transformation under which the gradient cannot be the rule's."""
        raise TransformationError(sentence(self.name, rule, transformation, instead))

    def refuse_forward_mode(self, transformation: str) -> NoReturn:
        """Raise the error for forward mode that the author did not promise: J v is the transpose of a linear rule."""
        self.refuse("forward mode needs a rule that is linear in upstream", transformation,
                    "if it is, say so with op_custom_gradient(forward_mode=True)")  # fmt: skip

    def refuse_nonlinear(self, what: str) -> NoReturn:
        """Raise the error for forward mode of a rule that is seen not to be linear, whatever was promised."""
        self.refuse("forward mode needs a rule that is linear in upstream", what,
                    "write it in linear operations, or use reverse mode")  # fmt: skip

    def refuse_second_order(self, transformation: str) -> NoReturn:
        """Raise the error for the derivative of a gradient that is once_differentiable."""
        self.refuse("a rule that is once_differentiable gives a gradient without derivatives", transformation,
                    "leave out once_differentiable=True if the rule can be differentiated")  # fmt: skip

    def refuse_captured(self, tensor: object) -> NoReturn:
        """Raise the error for a tensor that is differentiated and reached f by another way than its arguments."""
        option = self.option_of(tensor)
        got = f"a captured {describe(tensor)}" if option is None else f"{describe(tensor)} in the option {option}"
        raise CustomGradientTypeError(
            sentence(self.name, "f must be given every tensor that is differentiated", got, "pass it as an argument")
        )

    def option_of(self, tensor: object) -> str | None:
        """The name of the option that holds a tensor."""
        for name, option in self.options.items():
            if any(held is tensor for held in (option, *self.backend.tree_flatten(option)[0])):
                return name
        return None


class ForeignOutputError(BackendError):
    """What f returned belongs to another framework than its arguments."""

    def __init__(self, output: Any, error: BackendError) -> None:
        super().__init__(*error.args)
        self._output = output

    def constant_of(self, inputs: Sequence[Tensor]) -> Any:
        """The output, if f was given NumPy arrays, which are everybody's constants, and nobody chose a backend."""
        if config_backend() or not all(map(is_numpy_array, inputs)):
            raise BackendError(*self.args) from None
        return self._output


def pair(op: str, f: Callable[..., Any], result: Any) -> tuple[Any, Callable[..., Any]]:
    """What f returned, when it is what f must return."""
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):
        return result
    got = describe(result)
    if isinstance(result, tuple) and len(result) == 2:
        got = f"({describe(result[0])}, {describe(result[1])})"
    raise CustomGradientTypeError(
        sentence(op, f"{function_name(f)} must return a pair (output, grad_fn)", got,
                 "return the output and a function that turns upstream gradients into gradients of the arguments")
    )  # fmt: skip


def constant(op: str, output: T) -> T:
    """The output of an f that was given no tensor; refused where it depends on one that is differentiated."""
    backend = select([output])
    if backend is None:
        return output
    tensors, parts = take_apart(op, backend, output)
    if not tensors:
        return output
    call = Call(op, partial(_made, tensors), False, backend, [], [], {})
    try:
        constants: T = parts.fill(backend.custom_gradient(call, []))
    except CustomGradientTypeError:
        raise CustomGradientTypeError(
            sentence(op, "f must be given every tensor that is differentiated", "none among its arguments",
                     "pass it as an argument")
        ) from None  # fmt: skip
    return constants


def _made(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[..., None]]:
    return tensors, _no_gradients


def _no_gradients(*upstreams: Tensor) -> None:
    """The rule of no arguments."""


_made.autograph_info__ = _no_gradients.autograph_info__ = {}  # type: ignore[attr-defined]  # not to be converted
