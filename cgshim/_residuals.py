"""What the rule of one run of f keeps from it: arguments, outputs, and other tensors.

The second derivative goes through all of them. An argument is itself. An output stands for the op's own output, so
its derivative is the rule's: f may be opaque. Any other tensor is a function of the arguments, through f's own
operations: a framework that did not record these has to run f again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from cgshim._call import Call
from cgshim._closures import search_closure
from cgshim._contents import assigned_cells_of, contents_of
from cgshim._dtypes import is_differentiable
from cgshim._errors import CustomGradientError, TransformationError, describe, sentence
from cgshim._generators import Drawing, Generator, generators_of
from cgshim._hidden import globals_of, tensors_in, values_under, written
from cgshim._protocol import Tensor
from cgshim._rule import Rule
from cgshim._same import same

Agree = Callable[[Tensor, Tensor], bool]
"""Returns True if two tensors are equal except for the order of sums: a few units in the last place."""


class Residuals:
    """The tensors in a rule's closure, taken out of it; after that the rule itself holds none of them."""

    inputs: Sequence[int]
    """which inputs the rule keeps, or gets when it is called"""
    outputs: Sequence[int]
    """which outputs it keeps; one that is also an input counts as an input"""
    others: list[Tensor]
    """the other tensors; the backend empties this list when it saves them"""
    _objects: Sequence[Any] = ()
    _old: Sequence[Any] = ()
    _converted: Sequence[Any] = ()

    def __init__(
        self, call: Call, rule: Rule, is_tensor: Callable[[Any], bool], inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Take the residuals from a run: `call(inputs)` returned outputs and rule."""
        first_output, first_other = len(inputs), len(inputs) + len(outputs)
        grad_fn: Any = rule.grad_fn
        found = search_closure(grad_fn, is_tensor, call.f, [*inputs, *outputs], call.backend)
        self.inputs, self.outputs = _kept(tuple(found.held), first_output, first_other, rule.needs_inputs)
        self.others = found.tensors[first_other:]
        if found.objects or found.old:
            self._objects, self._old = found.objects, found.old
            self._converted = [x for x in found.objects if id(x) in rule.output.converted]
        self._f = call.f
        self._code = getattr(grad_fn, "__code__", None)
        self._globals: dict[str, Any] = getattr(grad_fn, "__globals__", {})
        self._rebuild = found.rebuild
        self._is_tensor = is_tensor
        self._facts = rule.facts

    def around(
        self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], others: Sequence[Tensor]
    ) -> Rule:
        """Return the rule around these tensors; what it does not keep may be None."""
        return Rule(self._facts, self._rebuild([*inputs, *outputs, *others]))

    @property
    def rule(self) -> Rule:
        """The rule with all its facts, but without its grad_fn."""
        return Rule(self._facts, _taken_apart)

    @property
    def objects(self) -> Sequence[Any]:
        """What the rule keeps and has not been searched yet, that is, objects, and what f may have written to."""
        named = globals_of(self._code, self._globals, self._f) if self._code else []
        if (named or self._old) and (names := written(self._f, but=self._code)):
            return [*self._objects, values_under(names, [*self._old, *named])]
        return self._objects

    def hidden(self) -> list[Any]:
        """Return the tensors that the rule keeps and that cannot be replaced: in attributes, or as another type.

        These are floats in attributes, in containers that are not Python's own, and in what f may have written to, and
        outputs that were NumPy arrays when f returned them.
        """
        objects = self.objects
        if not objects:
            return [*self._converted]
        inside = tensors_in(objects, self._is_tensor)
        return [*self._converted] + [tensor for tensor in inside if is_differentiable(tensor.dtype)]


@functools.lru_cache(maxsize=4096)
def _kept(held: Sequence[int], inputs: int, known: int, needs_inputs: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Return which inputs and which outputs a rule keeps that holds these of the known tensors, the inputs first."""
    of_inputs = range(inputs) if needs_inputs else tuple(at for at in held if at < inputs)
    return of_inputs, tuple(at - inputs for at in held if inputs <= at < known)


def has_a_derivative(others: Sequence[Tensor]) -> bool:
    """Return True if one of the other residuals is a float or complex tensor: others are constants."""
    return any(is_differentiable(tensor.dtype) for tensor in others)


def run_again(
    call: Call,
    inputs: Sequence[Tensor],
    first: Rule,
    is_tensor: Callable[[Any], bool],
    agree: Agree,
    *,
    f: Callable[..., Any] | None = None,
    generators: Sequence[Generator] = (),
) -> list[Tensor]:
    """Run f once more, on inputs, and return the other residuals: functions of the inputs, for their derivatives.

    Another run gives derivatives, never values. So it must keep what the first one did: ``first`` is the first run's
    rule, around what that kept. If it differs, or if f draws random numbers, this raises an error. generators are
    those of the framework; inputs should be copies, because f may write into them.
    """
    with _variables_put_back(call.f):
        rule, outputs = _run_without_drawing(call, inputs, f, generators)
        if not same(first.grad_fn, rule.grad_fn, lambda a, b: _tensors_agree(a, b, is_tensor, agree)):
            refuse_another_run(call, "others", "compute them from the arguments alone, or pass them as an argument")
        return Residuals(call, rule, is_tensor, inputs, outputs).others


def _run_without_drawing(
    call: Call, inputs: Sequence[Tensor], f: Callable[..., Any] | None, generators: Sequence[Generator]
) -> tuple[Rule, list[Tensor]]:
    drawing = Drawing([*generators_of(call.f), *generators])
    try:
        outputs, rule = call(inputs, f)
    except CustomGradientError:
        raise
    except Exception as error:  # the first run did not raise it: f cannot run on differentiated inputs
        raise TransformationError(
            sentence(call.name, must=_ANOTHER_RUN, got=f"a {type(error).__name__} in it",
                     do="compute in the framework what grad_fn keeps, or keep arguments and outputs alone")
        ) from error  # fmt: skip
    finally:
        drew = drawing.happened()
    if drew:
        refuse_another_run(call, "one that draws random numbers", "draw them outside, and pass them as an argument")
    return rule, outputs


@contextlib.contextmanager
def _variables_put_back(f: Callable[..., Any]) -> Iterator[None]:
    """Keep in the variables that f assigns to what its first run left there: no tensors or counts of another run."""
    before = [(cell, contents) for cell in assigned_cells_of(f) if (contents := contents_of(cell))]
    try:
        yield
    finally:
        for cell, contents in before:
            cell.cell_contents = contents[0]


def refuse_another_run(call: Call, got: str, do: str) -> NoReturn:
    """Raise the error for an f that cannot run again for the derivatives of what its rule keeps."""
    call.refuse(_ANOTHER_RUN, got, do)


_ANOTHER_RUN = "a second order runs f again, which must give grad_fn the same tensors"


def refuse_hidden(call: Call, hidden: Any) -> NoReturn:
    """Raise the error for what grad_fn keeps and cgshim cannot connect with the arguments."""
    call.refuse("a second order needs what grad_fn keeps as a tensor, in a variable of f",
                f"{describe(hidden)} in an object or in NumPy", "assign the tensor to a variable of f")  # fmt: skip


def _tensors_agree(a: Any, b: Any, is_tensor: Callable[[Any], bool], agree: Agree) -> bool | None:
    if not (is_tensor(a) or is_tensor(b)):
        return None
    return is_tensor(a) and is_tensor(b) and bool(a.shape == b.shape and a.dtype == b.dtype) and agree(a, b)


def _taken_apart(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a rule whose tensors were taken out is put around others before it is called")
