"""One call of an op, as a backend gets it: flat tensors in, flat tensors and a rule out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from cgshim._closure import SIMPLE, paths_to, tensors_inside
from cgshim._dispatch import backend_for, chosen_backend, framework_of, is_numpy_array, run_on
from cgshim._dtypes import is_differentiable
from cgshim._errors import (
    BackendError,
    CustomGradientTypeError,
    TransformationError,
    add_origin,
    describe,
    function_name,
    listing,
    refusal,
)
from cgshim._foreign import is_traced, not_converted
from cgshim._gradients import Arguments
from cgshim._protocol import Backend, Tensor
from cgshim._pytree import ONE_TENSOR, TreeSpec, combine_each, partition
from cgshim._registry import name_of
from cgshim._rule import Rule, RuleSignature, required_convention, spelled, with_jvp_fn


def refuse_without_tensor(op: str, backend: Backend, output: Any) -> NoReturn:
    """Raise the error for an f that gets tensors and returns none."""
    raise refusal(CustomGradientTypeError, op,
                  must="the output of f must hold a tensor when an argument does", got=describe(output),
                  do=f"return a tensor of {name_of(backend)}")  # fmt: skip


def checked_pair(
    op: str,
    f: Callable[..., Any],
    result: Any,
    lengths: Sequence[int] = (2, 3),
    rule: str = "grad_fn",
    turns: str = "upstream gradients into gradients of the arguments",
) -> tuple[Any, Callable[..., Any]]:
    """Return f's result if it is a pair (output, grad_fn); attach a third item to grad_fn."""
    if isinstance(result, tuple) and len(result) in lengths and all(map(callable, result[1:])):
        output, grad_fn, *jvp_fns = result
        return output, (with_jvp_fn(grad_fn, *jvp_fns) if jvp_fns else grad_fn)
    got = describe(result)
    if isinstance(result, tuple) and len(result) == 2:
        got = f"({describe(result[0])}, {describe(result[1])})"
    raise refusal(CustomGradientTypeError, op,
                  must=f"{function_name(f)} must return a pair (output, {rule})", got=got,
                  do=f"return the output and a function that turns {turns}")  # fmt: skip


class Call:
    """One call of an op: calling it runs f, and returns the output's tensors and the rule.

    A backend may call it as often as its framework needs (a retrace, a second order), with other
    tensors of the same shapes and dtypes: tracers, boxes, copies. It must not write to a Call,
    because the calls of a plan share one.
    """

    __slots__ = (
        "_constants", "arguments", "backend", "f", "forward_mode", "name", "needed", "once_differentiable",
        "options", "takes_needs_input_grad", "variables",
    )  # fmt: skip
    # how to check f's result, how to call grad_fn, and which class wraps it
    pair: ClassVar[Any] = staticmethod(checked_pair)
    convention: ClassVar[Any] = staticmethod(required_convention)
    kind_of_rule: ClassVar[type[Rule]] = Rule

    def __init__(
        self,
        arguments: Arguments,
        f: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        forward_mode: bool = False,
        once_differentiable: bool = False,
        takes_needs_input_grad: bool = False,
        needed: Sequence[bool] | None = None,
        variables: Sequence[Tensor] = (),
    ) -> None:
        self.arguments = arguments
        self.variables = variables
        """the tensors of the declared variables"""
        self.name = arguments.op
        self.backend: Backend = arguments.backend
        self.f = f
        self.options = options
        self.forward_mode = forward_mode
        self.once_differentiable = once_differentiable
        self.takes_needs_input_grad = takes_needs_input_grad
        """True if f takes needs_input_grad"""
        self.needed = needed
        """which inputs may need a gradient; None for every differentiable input"""
        self._constants: set[int] | None = None

    def with_f(self, f: Callable[..., Any], options: Mapping[str, Any] | None = None) -> Call:
        """Return the same call with another f (a bound method, a converted f) and other options."""
        if f is self.f and (options is None or not (options or self.options)):
            return self
        return self._with(f, self.options if options is None else options, self.needed)

    def with_needs_input_grad(self, needed: Sequence[bool] | None) -> Call:
        """Return the same call, which passes needs_input_grad to f and grad_fn if they accept it.

        The backend promises not to use other gradients, so f may skip computing and keeping them.
        """
        return self._with(self.f, self.options, needed)

    def _with(
        self, f: Callable[..., Any], options: Mapping[str, Any], needed: Sequence[bool] | None
    ) -> Call:
        return type(self)(
            self.arguments, f, options, forward_mode=self.forward_mode, once_differentiable=self.once_differentiable,
            takes_needs_input_grad=self.takes_needs_input_grad, needed=needed, variables=self.variables,
        )  # fmt: skip

    @property
    def constants(self) -> set[int]:
        """The ids of f's cells, instance and static values, which grad_fn shares with f.

        They are no residuals. A cell may hold a variable: grad_fn then reads the variable itself.
        """
        if self._constants is not None:
            return self._constants
        known = {id(getattr(self.f, "__self__", None))}
        if cells := getattr(getattr(self.f, "__func__", self.f), "__closure__", None):
            known.update(map(id, cells))
        if self.options or not self.arguments.are_tensors:
            known.update(map(id, self.static))
        self._constants = known  # last: threads share a call
        return known

    @property
    def static(self) -> list[Any]:
        """The options and the static leaves of the arguments."""
        leaves = [*self.options.values()]
        if not self.arguments.are_tensors:
            for spec in self.arguments.specs:
                leaves += spec.static_leaves()
        return leaves

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule]:
        """Run f once on inputs; return the output's tensors and the rule of this run."""
        return self.read(self.run(inputs), inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Run f once on inputs and return its result unchecked."""
        if is_traced():
            args, options = self._given(inputs)
            return self.f(*args, **options)
        return self.run_eagerly(inputs)

    def run_eagerly(self, inputs: Sequence[Tensor]) -> Any:
        """Run f as `run` does, where torch.compile does not trace."""
        args, options = inputs, self.options
        if self.takes_needs_input_grad or not self.arguments.are_tensors:
            args, options = self._given(inputs)
        try:
            return run_on(self.backend, inputs, False, self.f, *args, **options)
        except Exception as error:
            add_origin(error, self.name, "f")
            raise

    def _given(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments and the options of f."""
        arguments, options = self.arguments, self.options
        if self.takes_needs_input_grad:
            needed = self.needed or [is_differentiable(x.dtype) for x in inputs]
            options = {**options, "needs_input_grad": arguments.structured(needed)}
        return inputs if arguments.are_tensors else combine_each(arguments.specs, inputs), options

    def read(self, result: Any, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule]:
        """Return the output's tensors and the rule from the result of a run of f on inputs."""
        outputs, spec, grad_fn = self._partitioned(result, inputs)
        return outputs, self.rule_of(grad_fn, spec, inputs)

    def rule_of(
        self, grad_fn: Callable[..., Any], output: TreeSpec, inputs: Sequence[Tensor]
    ) -> Rule:
        """Return the rule of a run in which f returned grad_fn and an output of this spec.

        Of inputs only the shapes and dtypes count.
        """
        signature = self.signature_of(grad_fn, output)
        shapes, dtypes, needed = [x.shape for x in inputs], [x.dtype for x in inputs], None
        if signature.takes_needs_input_grad:
            needed = self.needed or [*map(is_differentiable, dtypes)]
        return self.kind_of_rule(signature, needed, shapes, dtypes, grad_fn)

    def signature_of(self, grad_fn: Callable[..., Any], output: TreeSpec) -> RuleSignature:
        """Return how to call every grad_fn with this code; raise if it has no known form."""
        return RuleSignature(
            self.arguments, output, *self.convention(self.arguments, grad_fn, output)
        )

    def output_of(self, inputs: Sequence[Tensor]) -> Any:
        """Run f once on constant inputs and return its output; only check its rule."""
        call = (
            self.with_needs_input_grad([False] * len(inputs))
            if self.takes_needs_input_grad
            else self
        )
        return call.read_output(call.run(inputs), inputs)

    def read_output(self, result: Any, inputs: Sequence[Tensor]) -> Any:
        """Return the output from the result of a run of f on inputs. The rule is only checked."""
        outputs, spec, grad_fn = self._partitioned(result, inputs)
        self.convention(self.arguments, grad_fn, spec)
        return spec.combine(outputs)

    def _partitioned(
        self, result: Any, inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], TreeSpec, Callable[..., Any]]:
        """Return the output's tensors, its spec and grad_fn; raise if the output has no tensors."""
        output, grad_fn = self.pair(self.name, self.f, result)
        if len(result) == 3 and not self.forward_mode:
            raise refusal(CustomGradientTypeError, self.name,
                          must="an f that returns a jvp_fn needs forward_mode=True",
                          got="(output, grad_fn, jvp_fn)",
                          do="write op_custom_gradient(forward_mode=True)")  # fmt: skip
        if self.backend.is_tensor(output):
            return [output], ONE_TENSOR, grad_fn
        try:
            outputs, spec = partition(self.name, self.backend, output)
        except BackendError as error:
            raise ForeignOutputError(output, error) from None
        if inputs and not outputs:
            refuse_without_tensor(self.name, self.backend, output)
        for leaf in spec.static_leaves():
            if type(leaf) in SIMPLE or any(
                leaf is static for spec in self.arguments.specs for static in spec.static_leaves()
            ):
                continue
            for tensor in tensors_inside(leaf, self.backend.is_tensor):
                raise refusal(CustomGradientTypeError, self.name,
                              must="the output of f must hold its tensors in containers that the backend knows",
                              got=f"{describe(tensor)} in {describe(leaf)}",
                              do="return the tensor itself")  # fmt: skip
        return outputs, spec, grad_fn

    def require_variables(self, rule: Rule, variables: Sequence[Tensor]) -> None:
        """Raise an error if f reads variables and the rule does not accept any."""
        if not variables or rule.takes_variables:
            return
        for variable in variables:
            if rule.is_transpose or self.option_of(variable) is not None:
                self.refuse_captured(variable)
        raise refusal(CustomGradientTypeError, self.name,
                      must="grad_fn must take variables when f reads trainable state",
                      got=f"{spelled(rule.grad_fn)} and {listing([*map(self._shown, variables)])}",
                      do="write grad_fn(..., variables=None) and return (gradients, [one per variable]), "
                      "or pass the state as an argument")  # fmt: skip

    def captured_variables(
        self, captured: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the variables of a call: the declared ones, or the only tensor that f captured.

        Raises an error if f captured an argument, or other tensors besides the declared ones.
        """
        variables = self.variables
        undeclared = [t for t in captured if not any(t is v for v in variables)]
        if undeclared and (
            variables or len(undeclared) > 1 or self.arguments.variables is not None
        ):
            self.refuse_undeclared(undeclared)
        variables = variables or undeclared
        for v in variables:
            if any(v is x for x in inputs):
                raise refusal(CustomGradientTypeError, self.name,
                              must="a tensor must be either an argument or a variable",
                              got=f"{self._shown(v)} that is both",
                              do="pass it as an argument only, and read that in f")  # fmt: skip
        return variables

    def refuse_undeclared(self, tensors: Sequence[object]) -> NoReturn:
        """Raise the error for captured tensors that the op does not declare."""
        raise refusal(CustomGradientTypeError, self.name,
                      must="an op must declare the differentiated tensors that f captures",
                      got=f"undeclared {listing([*map(self._shown, tensors)])}",
                      do="write op_custom_gradient(variables=[...]), or pass them as arguments")  # fmt: skip

    def refuse(self, rule: str, transformation: str, instead: str) -> NoReturn:
        """Raise the error for a transformation that cannot use the rule."""
        raise refusal(TransformationError, self.name, must=rule, got=transformation, do=instead)

    def refuse_forward_mode(self, transformation: str) -> NoReturn:
        """Raise the error for forward mode without ``forward_mode=True``.

        Forward mode computes J v as the transpose of a linear rule, so the author must promise
        linearity.
        """
        self.refuse("forward mode needs a rule that is linear in upstream", transformation,
                    "if it is, say so with op_custom_gradient(forward_mode=True)")  # fmt: skip

    def refuse_nonlinear(self, what: str) -> NoReturn:
        """Raise the error for forward mode if the rule turns out not to be linear."""
        self.refuse("forward mode needs a rule that is linear in upstream", what,
                    "write it in linear operations, or use reverse mode")  # fmt: skip

    def refuse_second_order(self, transformation: str) -> NoReturn:
        """Raise the error for the derivative of a gradient that is once_differentiable."""
        self.refuse("a rule that is once_differentiable gives a gradient without derivatives", transformation,
                    "leave out once_differentiable=True if the rule can be differentiated")  # fmt: skip

    def refuse_unconnected(self, tensor: object, why: str) -> NoReturn:
        """Raise the error for the derivative of a residual whose computation is not recorded."""
        self.refuse("a second order needs every tensor that grad_fn reads as a function of the arguments",
                    f"{describe(tensor)} that {why}",
                    "let grad_fn compute it, or let f return it as an output")  # fmt: skip

    def refuse_writing(self) -> NoReturn:
        """Raise the error for an f that changes a differentiated argument in place."""
        raise refusal(CustomGradientTypeError, self.name,
                      must="f must not write into arguments that are differentiated",
                      got="a change in place", do="let it change a copy")  # fmt: skip

    def refuse_captured(self, tensor: object) -> NoReturn:
        """Raise the error for a differentiated tensor that f captures."""
        option = self.option_of(tensor)
        got = (
            f"a captured {self._shown(tensor)}"
            if option is None
            else f"{describe(tensor)} in the option {option}"
        )
        raise refusal(CustomGradientTypeError, self.name,
                      must="f must be given every tensor that is differentiated", got=got,
                      do="pass it as an argument")  # fmt: skip

    def _shown(self, tensor: object) -> str:
        """Describe a tensor, with the path where f holds it if the path is long."""
        [path] = paths_to([tensor], self.f, depth=5)
        return f"{describe(tensor)} ({path})" if set(".[") & set(path or "") else describe(tensor)

    def option_of(self, tensor: object) -> str | None:
        """Return the name of the option that holds a tensor, or None."""
        for name, option in self.options.items():
            if any(held is tensor for held in (option, *self.backend.tree_flatten(option)[0])):
                return name
        return None


class ForeignOutputError(BackendError):
    """The output of f belongs to another framework than its arguments."""

    def __init__(self, output: Any, error: BackendError) -> None:
        super().__init__(*error.args)
        self._output = output

    def constant_of(self, inputs: Sequence[Tensor]) -> Any:
        """Return the output if all inputs are NumPy arrays and no backend is chosen.

        NumPy arrays are constants for every framework.
        """
        if chosen_backend() or not all(map(is_numpy_array, inputs)):
            raise BackendError(*self.args) from None
        return self._output


class WithoutDerivative:
    """f of an op without a derivative: it returns its output, and a rule that raises an error.

    So a backend may raise its own error for the derivative, and compute only the output.
    """

    output: Callable[..., Any]
    """``output(backend, tensors, specs, options)``: the output without the rule, for arguments with
    these specs and tensors
    """


def has_no_derivative(f: Any) -> bool:
    """Return True if f is of an op without a derivative."""
    return isinstance(getattr(f, "func", f), WithoutDerivative)


def output_without_rule(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Return the output of an op without a derivative, for a backend that raises its own error."""
    if isinstance(call.f, WithoutDerivative):
        return call.f.output(call.backend, inputs, call.arguments.specs, call.options)
    output, _ = call.f(*combine_each(call.arguments.specs, inputs), **call.options)
    return output


def output_of_constants(op: str, output: Any) -> Any:
    """Return the output of an f without tensors; raise if it depends on a differentiated tensor."""
    hidden = tensors_inside(output, lambda x: framework_of(x) is not None and not is_numpy_array(x))
    backend = backend_for([output, *hidden])
    if backend is None:
        return output
    tensors, spec = partition(op, backend, output)
    if not (tensors or hidden):
        return output
    without_gradients = not_converted(lambda *upstreams: None)
    f = not_converted(lambda: ([*tensors, *hidden], without_gradients))
    call = Call(Arguments(op, backend, [], [], True), f, {})
    try:
        return spec.combine(backend.custom_gradient(call, [])[: len(tensors)])
    except CustomGradientTypeError:
        raise refusal(CustomGradientTypeError, op,
                      must="f must be given every tensor that is differentiated",
                      got="none among its arguments",
                      do="pass it as an argument, in a container that the backend knows, "
                      "declare it with variables=, or choose the backend by name") from None  # fmt: skip
