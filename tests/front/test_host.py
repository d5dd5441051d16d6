"""Functions on the host: what op_host checks when it is called, batches, and the rules that the
host remembers.
"""

from __future__ import annotations

import contextvars
import gc
import inspect
import pickle
import re
import threading
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest

import cgshim
from cgshim import (
    CustomGradientTypeError,
    CustomGradientValueError,
    Spec,
    op_custom_gradient,
    op_grad,
    op_host,
    op_vjp,
    use_backend,
)
from cgshim._dtypes import dtype_name
from cgshim._pytree import ONE_TENSOR, partition
from cgshim._registry import load
from cgshim.host._call import HostCall, HostFunction
from cgshim.host._op import Run, Runs, made_here
from cgshim.testing.conformance import Framework


@pytest.fixture
def framework(backend: str) -> Framework:
    return Framework(backend)


# --- The op ---------------------------------------------------------------------------------------


def scaled(x: Any, *, factor: float = 2.0) -> Any:
    """x times a factor."""
    return factor * x


def _same(x: Any) -> Any:
    return x


scaled_on_host = op_host(scaled, outputs=_same)


def test_an_op_shows_the_function(framework: Framework) -> None:
    assert (scaled_on_host.name, scaled_on_host.__doc__) == ("scaled", "x times a factor.")
    assert inspect.signature(scaled_on_host) == inspect.signature(scaled)
    x = framework.tensor([1.0, 2.0])
    framework.check_equal(scaled_on_host(x=x), np.array([2.0, 4.0]))
    framework.check_equal(scaled_on_host(x, factor=-3.0), np.array([-3.0, -6.0]))
    again = pickle.loads(pickle.dumps(scaled_on_host))
    framework.check_equal(again(x), np.array([2.0, 4.0]))


def test_what_is_declared_is_missing() -> None:
    with pytest.raises(CustomGradientTypeError) as caught:
        op_host(scaled)
    assert str(caught.value) == (
        "scaled: a compiled program must know what f returns before it runs, got no outputs; "
        "write op_host(outputs=lambda *specs: ...), which returns the specs of the results"
    )
    with pytest.raises(
        CustomGradientTypeError,
        match=r"^op_host: f must be callable, got int; decorate a function$",
    ):
        op_host(3, outputs=lambda x: x)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "make",
    [
        lambda: op_host(scaled, outputs="unknown"),
        lambda: op_host(scaled, outputs="unknown", backend="numpy"),
        lambda: op_custom_gradient(scaled, host_outputs="unknown"),
    ],
    ids=["op_host", "of a framework", "host_outputs"],
)
def test_unknown_outputs_are_refused(framework: Framework, make: Any) -> None:
    with pytest.raises(CustomGradientTypeError) as caught:
        make()(framework.tensor([1.0, 2.0]))
    assert str(caught.value) == (
        "scaled: the declared outputs must be a tree of specs, got str in it; "
        "return cgshim.Spec(shape, dtype), or anything else with a shape and a dtype"
    )


class Model:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @op_host(outputs=lambda self, x: Spec((self.factor,), x.dtype))
    def repeated(self, x: Any) -> Any:
        return np.full(self.factor, x)


def test_a_method(framework: Framework) -> None:
    for factor in (2, 3):
        framework.check_equal(Model(factor).repeated(framework.tensor(5.0)), np.full(factor, 5.0))


class Method:
    """Methods of every kind, each 2 x with the rule 7 u."""

    factor = 2.0

    @op_custom_gradient(host_outputs=lambda self, x, *, times: x)
    def ruled(self, x: Any, *, times: float = 1.0) -> Any:
        return self.factor * times * x, lambda u: 7.0 * u

    @op_host(outputs=lambda self, x, *, times: x)
    def declared(self, x: Any, *, times: float = 1.0) -> Any:
        return self.factor * times * x

    @op_custom_gradient(vmap=lambda self, size, in_batched, x, times: self.mapped(x, times=times))
    def mapped(self, x: Any, *, times: float = 1.0) -> Any:
        return x * (self.factor * times), lambda u: 7.0 * u


@pytest.mark.parametrize("name", ["ruled", "declared", "mapped"])
def test_a_method_is_one_as_any_function_is(framework: Framework, name: str) -> None:
    """It has f's parameters, is equal to itself and pickled by name."""
    holder, x = Method(), framework.tensor([1.0, 2.0])
    holder.factor = 4.0
    method = getattr(holder, name)
    assert list(inspect.signature(method).parameters) == ["x", "times"]
    assert method == getattr(holder, name) != getattr(Method(), name)
    assert len({method, getattr(holder, name)}) == 1
    framework.check_equal(method(x=x, times=3.0), np.array([12.0, 24.0]))
    framework.check_equal(pickle.loads(pickle.dumps(method))(x), np.array([4.0, 8.0]))


def test_the_gradient_of_a_method_that_is_called_by_keyword(framework: Framework) -> None:
    x = framework.tensor([1.0, 2.0])
    output, pullback = op_vjp(lambda x: Method().ruled(x=x), x)
    framework.check_equal(output, np.array([2.0, 4.0]))
    framework.check_equal(pullback(framework.tensor([1.0, -2.0])), (np.array([7.0, -14.0]),))


class Static:
    declared = op_host(staticmethod(scaled), outputs=_same)
    foreign = op_host(staticmethod(scaled), outputs=_same, backend="numpy")
    ruled = op_custom_gradient(
        staticmethod(lambda x: (2.0 * x, lambda u: 7.0 * u)), host_outputs=_same
    )


@pytest.mark.parametrize("name", ["declared", "foreign", "ruled"])
@pytest.mark.parametrize("owner", [Static, Static()], ids=["class", "instance"])
def test_a_static_method(framework: Framework, owner: Any, name: str) -> None:
    """Python calls one of an object as that of its class."""
    x = framework.tensor([1.0, 2.0])
    framework.check_equal(getattr(owner, name)(x), np.array([2.0, 4.0]))


def test_a_classmethod_is_made_outside() -> None:
    sentence = "^op_custom_gradient: f must be callable, got classmethod; decorate a function$"
    with pytest.raises(CustomGradientTypeError, match=sentence):
        op_custom_gradient(classmethod(scaled), host_outputs=_same)  # type: ignore[arg-type]


def test_specs_without_a_function(framework: Framework) -> None:
    pair = op_host(lambda x: (x.sum(), x), outputs=(Spec((), "float32"), Spec((2,), "float32")))
    framework.check_equal(pair(framework.tensor([1.0, 2.0])), (np.array(3.0), np.array([1.0, 2.0])))


def test_no_tensor_among_the_arguments() -> None:
    three = op_host(lambda x: np.full(3, x), outputs=lambda x: Spec((3,), "float64"))
    np.testing.assert_array_equal(three(2.5), [2.5, 2.5, 2.5])


def test_a_spec_is_shown_as_in_messages() -> None:
    assert [
        repr(Spec((2, None), dtype)) for dtype in (np.float32, np.dtype("float32"), "float32")
    ] == ["f32[2,?]"] * 3
    assert Spec((2,), "float32") == Spec((2,), "float32")
    # a key of a cache
    assert len({Spec((2,), "float32"), Spec((2,), "float32"), Spec((3,), "float32")}) == 2


def _wrapped(op: Any) -> None:
    """Call an op as a compiled program does, which wraps its error."""
    try:
        op(np.ones(2))
    except KeyError as error:
        raise RuntimeError(f"in a compiled program: {type(error).__name__}") from None


def _another_error() -> None:
    raise RuntimeError("another")


def test_an_error_that_a_framework_wraps() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("of the user's")

    op = op_host(broken, outputs=lambda x: x)
    with pytest.raises(KeyError, match="of the user's") as caught, cgshim.host_errors():
        _wrapped(op)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="another"), cgshim.host_errors():
        _another_error()


# --- Batches --------------------------------------------------------------------------------------


def call_of(f: Any, outputs: Any, *, arguments: int = 2, vectorized: bool = False) -> HostCall:
    return HostCall(
        HostFunction(f, outputs, vectorized=vectorized, name="op"), [ONE_TENSOR] * arguments, {}
    )


X, Y = np.arange(12.0).reshape(3, 2, 2), np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


@pytest.mark.parametrize("vectorized", [False, True])
def test_nested_batches(vectorized: bool) -> None:
    """x has both batches, y the outer one alone: f is called for each element, or once."""
    calls = []

    def outer_product(x: Any, y: Any) -> Any:
        calls.append(x.shape)
        return x[..., :, None] * y[..., None, :]

    call = call_of(
        outer_product, lambda x, y: Spec((*x.shape, *y.shape), x.dtype), vectorized=vectorized
    )
    batched = call.over([True, False]).over([True, True])
    (found,) = batched.run([X, Y])
    np.testing.assert_array_equal(found, X[:, :, :, None] * Y[:, None, None, :])
    assert len(calls) == (1 if vectorized else 6)


def test_a_batch_that_no_argument_of_a_vectorized_function_uses() -> None:
    call = call_of(lambda x, y: x * 2, lambda x, y: x, vectorized=True).over([False, True])
    (found,) = call.run([np.array([1.0, 2.0]), Y])
    np.testing.assert_array_equal(found, np.tile([2.0, 4.0], (3, 1)))


def test_an_empty_batch() -> None:
    call = call_of(lambda x, y: x + y, lambda x, y: x).over([True, False])
    (found,) = call.run([np.zeros((0, 2), "float32"), np.ones(2, "float32")])
    assert (found.shape, found.dtype) == ((0, 2), np.float32)


def test_equal_calls_have_equal_keys() -> None:
    function = HostFunction(scaled, lambda x: x, vectorized=False, name="op")
    factors = [2.0, 2.0, 2, 3.0, 0.0, -0.0, (1, 2), (True, 2)]
    calls = [HostCall(function, [ONE_TENSOR], {"factor": factor}) for factor in factors]
    calls += [calls[0].over([True])]
    keys = [call.key for call in calls]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1


def test_keys_tell_trees_apart() -> None:
    function = HostFunction(scaled, lambda x: x, vectorized=False, name="op")
    x = np.ones(2)
    trees = [
        {"a": x, "b": 1},
        {"a": 2 * x, "b": 1},
        {"a": x, "c": 1},
        {"a": x, "b": 1.0},
        {"b": x, "a": 1},
        [x, 1],
        x,
        1,
    ]
    keys = [HostCall(function, [partition("op", load("numpy"), tree)[1]], {}).key for tree in trees]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1


def test_keys_tell_apart_what_f_may_write_to() -> None:
    function = HostFunction(scaled, lambda x: x, vectorized=False, name="op")
    log: list[str] = []
    trees = [log, log, [], {}, (1, 2.0), (1, 2.0), ([],), ([],)]
    keys = [HostCall(function, [partition("op", load("numpy"), tree)[1]], {}).key for tree in trees]
    assert keys[0] == keys[1]
    assert keys[4] == keys[5]
    assert len(set(keys)) == len(keys) - 2


def test_a_log_is_that_of_the_caller(framework: Framework) -> None:
    @op_host(outputs=lambda x, log: x)
    def doubled(x: Any, log: list[str]) -> Any:
        log.append("doubled")
        return 2 * x

    @op_custom_gradient(host_outputs=lambda x, log: x)
    def squared(x: Any, log: list[str]) -> Any:
        def grad(upstream: Any) -> Any:
            log.append("grad_fn")
            return 7 * upstream * x, None

        log.append("squared")
        return x * x, grad

    log: list[str] = []
    x = framework.tensor([1.0, 3.0])
    framework.check_equal(doubled(x, log), np.array([2.0, 6.0]))
    _, pullback = op_vjp(lambda x: squared(x, log), x)
    framework.check_equal(pullback(framework.tensor([1.0, 10.0])), (np.array([7.0, 210.0]),))
    assert log == ["doubled", "squared", "grad_fn"]


def test_only_the_axes_of_batches_are_broadcast() -> None:
    call = call_of(lambda x, y: x.sum(-1, keepdims=True), lambda x, y: x, vectorized=True).over(
        [True, True]
    )
    with pytest.raises(
        CustomGradientValueError, match=re.escape("the declared shape f64[3,2], got f64[3,1]")
    ):
        call.run([Y, Y])


def test_another_number_of_axes_is_not_broadcast() -> None:
    call = call_of(lambda x, y: x.sum(), lambda x, y: x, vectorized=True).over([True, True])
    with pytest.raises(
        CustomGradientValueError, match=re.escape("the declared shape f64[3,2], got f64[]")
    ):
        call.run([Y, Y])


def test_results_of_another_structure() -> None:
    """Told as Python writes trees, and not as optree does."""
    call = call_of(lambda x, y: (x, {"b": y}), lambda x, y: {"a": x, "b": [y]})
    with pytest.raises(CustomGradientTypeError) as error:
        call.run([Y, Y[:2]])
    assert str(error.value) == (
        "op: f must return the declared outputs ({'a': f64[3,2], 'b': [f64[2,2]]}), got (f64[3,2], {'b': f64[2,2]}); "
        "declare what it returns"
    )


def test_a_host_function_may_not_take_needs_input_grad() -> None:
    with pytest.raises(CustomGradientTypeError) as error:
        op_host(lambda x, *, needs_input_grad: x, outputs=lambda x: x, name="op")
    assert str(error.value) == (
        "op: a function on the host has no gradient of its own, got a parameter needs_input_grad; "
        "leave it out, or write op_custom_gradient(host_outputs=...)"
    )


def test_results_without_an_array() -> None:
    op = op_host(lambda x: [], outputs=lambda x: [], name="op")
    with pytest.raises(
        CustomGradientTypeError,
        match=r"^op: the output of f must hold a tensor when an argument does, ",
    ):
        op(X)


def test_f_gets_arrays_in_each_batch() -> None:
    kinds = []
    call = call_of(lambda x, y: (kinds.append(type(x)), 2 * x)[1], lambda x, y: x).over(
        [True, False]
    )
    (found,) = call.run([np.array([1.0, 2.0]), Y])
    np.testing.assert_array_equal(found, [2.0, 4.0])
    assert set(kinds) == {np.ndarray}


@pytest.mark.parametrize("size", [(), (2,)], ids=["a scalar", "a vector"])
def test_f_may_use_its_result_again_in_the_next_row(size: tuple[int, ...]) -> None:
    """A simulator writes each result into the same memory: all rows were the last one."""
    memory = np.zeros(size)

    def simulated(x: Any, y: Any) -> Any:
        memory[...] = x * y
        return {"memory": memory, "a view of it": memory[..., None]}

    outputs = lambda x, y: {"memory": x, "a view of it": Spec((*x.shape, 1), x.dtype)}
    call = call_of(simulated, outputs).over([True, False]).over([True, True])
    x, y = (
        np.arange(1.0, 13.0).reshape(3, 2, 2)[(..., *[0] * (1 - len(size)))],
        np.array([10.0, 20.0, 30.0]),
    )
    of_view, found = call.run([x, y])
    np.testing.assert_array_equal(found, x * y.reshape(3, *[1] * (x.ndim - 1)))
    np.testing.assert_array_equal(of_view[..., 0], found)


def test_fresh_results_are_not_copied() -> None:
    made = []

    def doubled(x: Any, y: Any) -> Any:
        result = 2 * x
        made.append(result.ctypes.data)
        return result

    (found,) = call_of(doubled, lambda x, y: x).run([X, Y])
    assert found.ctypes.data == made[0]


# --- The rules that the host remembers ------------------------------------------------------------


class _Rule:
    """Stands for a rule, of which Runs asks the shapes of the inputs."""

    shapes: ClassVar[list[tuple[int, ...]]] = [(2,)]


INPUTS = [np.zeros(2)]


def rule_of(runs: Runs, numbers: Any) -> Any:
    found = runs.find(numbers, INPUTS)
    return found if found is None else found[1]


def test_the_last_runs_are_remembered() -> None:
    runs, rules = Runs(keep=2), [_Rule() for _ in range(3)]
    numbers = [runs.add([], rule, ()) for rule in rules]  # type: ignore[arg-type]
    assert [rule_of(runs, number) for number in numbers] == [None, *rules[1:]]
    runs.add([], _Rule(), ())  # type: ignore[arg-type]
    assert [rule_of(runs, number) for number in numbers[1:]] == [None, rules[2]]
    assert runs.find(np.max(numbers) + 10, INPUTS) is None


def test_a_run_for_a_batch_has_a_number_for_each_element() -> None:
    runs, rule = Runs(keep=2), _Rule()
    numbers = runs.add([], rule, (2, 3))  # type: ignore[arg-type]
    assert numbers.shape == (2, 3)
    assert len(np.unique(numbers)) == 6
    assert rule_of(runs, numbers) is rule
    assert rule_of(runs, numbers[::-1]) is None  # as if the batch had been sorted
    assert rule_of(runs, numbers[:1]) is rule  # whose shapes tell
    assert runs.find(numbers, [np.zeros((1, 2))]) is None
    assert runs.find(numbers[:0], INPUTS) is None
    assert runs.add([], _Rule(), ()) not in numbers  # type: ignore[arg-type]


def test_runs_that_are_held_are_remembered_as_long() -> None:
    runs = Runs(keep=0)
    held: list[Run] = []
    elsewhere: list[Any] = []

    def add_here_and_elsewhere() -> Any:
        thread = threading.Thread(target=lambda: elsewhere.append(runs.add([], _Rule(), ())))  # type: ignore[arg-type]
        thread.start()
        thread.join()
        return runs.add([], _Rule(), ())  # type: ignore[arg-type]

    context = contextvars.copy_context()
    context.run(made_here.set, held)
    number = context.run(add_here_and_elsewhere)
    assert runs.find(number, INPUTS) is not None
    assert runs.find(elsewhere[0], INPUTS) is None
    held.clear()
    assert runs.find(number, INPUTS) is None


def test_a_call_without_a_tensor_returns_what_is_chosen(framework: Framework) -> None:
    ones = lambda n: Spec((n,), "float32")
    for op in (
        op_host(lambda n: np.ones(n, "float32"), outputs=ones),
        op_custom_gradient(lambda n: (np.ones(n, "float32"), lambda u: None), host_outputs=ones),
    ):
        with use_backend(framework.name):
            found = op(3)
        assert framework.backend.is_tensor(found)
        framework.check_equal(found, np.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectorized": True},
         "op: vectorized says that NumPy code takes a batch, got no host_outputs; write vmap=, a rule for batches"),
        ({"vmap": len, "host_outputs": lambda x: x},
         "op: vmap must be a rule for batches of tensors, got host_outputs besides; write a function, or host_outputs "
         "with vectorized=True"),
        ({"vmap": True},
         "op: vmap must be a rule for batches of tensors, got bool; write a function, or host_outputs with "
         "vectorized=True"),
    ],
)  # fmt: skip
def test_options_of_batches(options: Any, message: str) -> None:
    with pytest.raises(CustomGradientTypeError) as error:
        op_custom_gradient(lambda x: (x, lambda u: u), name="op", **options)
    assert str(error.value) == message


def test_what_a_rule_keeps_is_freed_with_its_graph(framework: Framework) -> None:
    class Kept:
        """What a user's solver keeps."""

    alive = []

    @op_custom_gradient(host_outputs=lambda x: x)
    def op(x: Any) -> Any:
        kept = Kept()
        alive.append(weakref.ref(kept))
        return 2 * x, lambda upstream: (kept, 7 * upstream)[1]

    x = framework.tensor([1.0, 2.0])
    y, pullback = op_vjp(op, x)
    framework.check_equal(pullback(framework.tensor([1.0, 3.0])), (np.array([7.0, 21.0]),))
    assert [ref() is not None for ref in alive] == [True]
    del y, pullback
    gc.collect()
    assert [ref() is not None for ref in alive] == [False]
    for _ in range(20):
        op(x)
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 8


def test_f_runs_again_for_a_rule_that_is_gone(framework: Framework) -> None:
    """As in a compiled program that took more runs than the host keeps."""
    runs = []

    @op_custom_gradient(host_outputs=lambda x: x, keep=0)
    def op(x: Any) -> Any:
        runs.append(x.copy())
        return 2 * x, lambda upstream: 7 * upstream * x

    pair = op.held_function
    _, number = pair._run_f((), np.array([1.0, 2.0]))  # type: ignore[attr-defined]
    (gradient,) = pair._run_rule(  # type: ignore[attr-defined]
        number, (np.array([3.0, 5.0]),), (np.array([1.0, 10.0]),), (True,)
    )
    np.testing.assert_array_equal(gradient, [21.0, 350.0])
    assert len(runs) == 2
    assert dtype_name(number.dtype) == "int32"
    assert framework.name


def test_an_op_on_the_host_is_pickled_by_what_makes_it() -> None:
    op = op_custom_gradient(scaled_pair, host_outputs=_same, keep=3, name="other")
    again = pickle.loads(pickle.dumps(op))
    _, pullback = op_vjp(again, np.array([1.0, 2.0]))
    np.testing.assert_array_equal(pullback(np.array([1.0, 5.0]))[0], [7.0, 35.0])
    assert again.name == "other"


def test_a_pickled_foreign_op_keeps_its_derivatives() -> None:
    op = op_host(cubed, outputs=_same, backend="numpy", name="other")
    again = pickle.loads(pickle.dumps(op))
    slope = op_grad(op_grad(again))
    assert float(slope(np.float64(2.0))) == 12.0


def cubed(x: Any) -> Any:
    return x * x * x


def scaled_pair(x: Any) -> Any:
    return 2 * x, lambda upstream: 7 * upstream


def test_a_backend_without_a_way_to_the_host_needs_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_value(x: Any) -> Any:
        raise TypeError("a tracer has no value")

    monkeypatch.delattr(load("numpy"), "host_function")
    monkeypatch.setattr(load("numpy"), "convert_to_numpy", without_value)
    with pytest.raises(cgshim.BackendError) as error:
        op_host(lambda x: 2 * x, outputs=lambda x: x, name="double")(np.ones(2))
    assert str(error.value) == (
        "double: a function on the host needs the values of its arguments, got TypeError from cgshim_numpy; call it "
        "eagerly"
    )
