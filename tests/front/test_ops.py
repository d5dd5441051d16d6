"""cgshim.ops: NumPy's functions by their NumPy names, and the few that every rule needs, on every
backend.
"""

import numpy as np
import pytest

import cgshim
from cgshim import BackendError, ops
from cgshim.ops import _numpy
from cgshim.testing.conformance import Framework

MATRIX = [[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]]


@pytest.fixture
def framework(backend):
    return Framework(backend)


# --- What every rule needs ------------------------------------------------------------------------


def test_arrays_are_converted(framework):
    tensor = framework.tensor([1.0, 2.0])
    found = ops.convert_to_numpy(tensor)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, [1.0, 2.0])
    for x in (2.5, [1, 2], np.array([3.0])):
        np.testing.assert_array_equal(ops.convert_to_numpy(x), np.asarray(x))


def test_tensors_are_told(framework):
    assert ops.is_tensor(framework.tensor(1.0))
    assert not any(map(ops.is_tensor, (1.0, [framework.tensor(1.0)], None, np.array(["a"]), "a")))


def test_tensors_are_made(framework):
    with cgshim.use_backend(framework.name):
        for made, dtype in (
            (ops.convert_to_tensor([1, 2], "float32"), "float32"),
            (ops.cast([1, 2], "int64"), "int64"),
        ):
            assert framework.backend.is_tensor(made)
            assert (ops.dtype(made), ops.shape(made)) == (dtype, (2,))
            framework.check_equal(made, np.array([1.0, 2.0]))
        assert framework.backend.is_tensor(ops.stop_gradient(2.0))
    tensor = framework.tensor([1.0, 2.0])
    assert ops.convert_to_tensor(tensor) is tensor
    assert ops.shape(framework.tensor(MATRIX)) == (2, 3)
    assert ops.dtype(ops.cast(tensor, "float64")) == "float64"


def test_a_tensor_of_another_framework_than_the_chosen_raises(framework):
    with cgshim.use_backend(framework.name):
        assert framework.backend.is_tensor(ops.convert_to_tensor(np.array([1.0])))


def test_constants_have_no_gradient(framework):
    x = framework.tensor([1.0, 2.0])
    framework.check(
        lambda x: ops.stop_gradient(x * x) * x, x, upstream=framework.tensor([2.0, -3.0]),
        output=np.array([1.0, 8.0]), gradients=(np.array([2.0, -12.0]),),
    )  # fmt: skip


# --- NumPy's names --------------------------------------------------------------------------------

FUNCTIONS = {
    "sum": lambda x: ops.sum(x),
    "sum of an axis": lambda x: ops.sum(x, axis=0),
    "sum that keeps the axis": lambda x: ops.sum(x, axis=1, keepdims=True),
    "mean": lambda x: ops.mean(x, axis=1),
    "max": lambda x: ops.max(x, axis=1),
    "where": lambda x: ops.where(x > 2.5, x, 0.0 * x),
    "maximum": lambda x: ops.maximum(x, 2.5),
    "clip": lambda x: ops.clip(x, 1.5, 4.5),
    "reshape": lambda x: ops.reshape(x, (3, 2)),
    "transpose": lambda x: ops.transpose(x),
    "concatenate": lambda x: ops.concatenate([x, x], axis=1),
    "stack": lambda x: ops.stack([x, 2.0 * x]),
    "matmul": lambda x: ops.matmul(x, ops.transpose(x)),
    "zeros_like": lambda x: ops.zeros_like(x),
    "floor": lambda x: ops.floor(x / 2.0),
    "power": lambda x: ops.power(x, 2.0),
    "subtract": lambda x: ops.subtract(1.0, x),
    "linalg.norm": lambda x: ops.linalg.norm(x),
    "sqrt": lambda x: ops.sqrt(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_numpys(framework, name):
    function = FUNCTIONS[name]
    found = function(framework.tensor(MATRIX))
    assert framework.backend.is_tensor(found)
    framework.check_equal(found, function(np.array(MATRIX)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_backend_need_not_offer_quicker_functions(framework, monkeypatch, name):
    monkeypatch.delattr(framework.backend, "numpy_function_of")
    monkeypatch.setattr(_numpy, "_ways", {})
    found = FUNCTIONS[name](framework.tensor(MATRIX))
    framework.check_equal(found, FUNCTIONS[name](np.array(MATRIX)))


def test_a_quicker_function_is_asked_for_once_for_each_types(framework, monkeypatch):
    asked = []

    def numpy_function_of(name, types):
        asked.append((name, types))
        return lambda *args, **options: 7.0

    monkeypatch.setattr(framework.backend, "numpy_function_of", numpy_function_of)
    monkeypatch.setattr(_numpy, "_ways", {})
    x = framework.tensor(MATRIX)
    for _ in range(2):
        assert ops.exp(x) == ops.multiply(x, 2.0) == ops.stack([x, 3], axis=1) == 7.0
    kind = type(x)
    assert asked == [
        ("exp", (kind,)),
        ("multiply", (kind, float)),
        ("stack", (frozenset([kind, int]),)),
    ]


def test_they_are_the_same_by_both_names(framework):
    assert cgshim.op_sqrt is ops.sqrt
    assert (ops.sqrt.__name__, ops.linalg.norm.__name__) == ("sqrt", "norm")
    assert ops.sqrt.__doc__ == "numpy.sqrt on the tensors of any backend."


def test_numpy_arrays_beside_a_tensor_are_its_constants(framework):
    x = framework.tensor([1.0, 2.0])
    for found in (
        ops.multiply(np.array([3.0, 4.0], "float32"), x),
        ops.multiply(x, np.array([3.0, 4.0], "float32")),
    ):
        assert framework.backend.is_tensor(found)
        framework.check_equal(found, np.array([3.0, 8.0]))
    found = ops.stack([x, np.array([3.0, 4.0], "float32")])
    framework.check_equal(found, np.array([[1.0, 2.0], [3.0, 4.0]]))


BENT = {
    "a float to a float": (0.5, "float32", "float32"),
    "a float to half": (0.5, "float16", "float16"),
    "an int to a float": (2, "float32", "float32"),
    "an int to an integer": (2, "int32", "int32"),
    "a float to a complex": (0.5, "complex64", "complex64"),
    "a complex to a complex": (2j, "complex64", "complex64"),
}


@pytest.mark.parametrize(("number", "dtype", "expected"), BENT.values(), ids=BENT)
def test_numbers_bend_to_tensors(framework, number, dtype, expected):
    x = framework.tensor([1, 2], dtype)
    for found in (ops.multiply(x, number), ops.multiply(number, x)):
        assert ops.dtype(found) == expected
        framework.check_equal(found, number * np.array([1.0, 2.0]))


OF_TWO = [
    "add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "less", "less_equal", "greater",
    "greater_equal", "equal", "not_equal", "remainder", "floor_divide", "arctan2",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_TWO)
def test_a_number_stands_on_either_side(framework, name):
    """Its dtype is that of a tensor of no axes with this number, and the value is NumPy's."""
    values = [2.0, 3.0, 0.7]
    x, function = framework.tensor(values), getattr(ops, name)
    for number in (2.5, 3, True):
        beside = framework.tensor(float(number))
        array, scalar = np.array(values, "float32"), np.float32(number)
        for found, alike, expected in (
            (function(x, number), function(x, beside), getattr(np, name)(array, scalar)),
            (function(number, x), function(beside, x), getattr(np, name)(scalar, array)),
        ):
            assert ops.dtype(found) == ops.dtype(alike)
            np.testing.assert_allclose(ops.convert_to_numpy(found), expected, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "number", "expected"), [
    ("int32", 2, "int32"), ("int32", 2.5, "float"), ("bool", 2, "int"), ("bool", 2.5, "float"),
    ("float16", 2.5, "float16"), ("float64", 2, "float64"), ("int32", 2j, "complex"),
])  # fmt: skip
def test_a_number_beside_any_dtype(framework, dtype, number, expected):
    x = framework.tensor([True, False] if dtype == "bool" else [1, 0], dtype)
    for found in (ops.add(x, number), ops.add(number, x)):
        assert ops.dtype(found).startswith(expected)
        framework.check_equal(found, np.array([1, 0]) + number)


def test_clip_shares_derivatives_at_bounds_as_maximum_does(framework):
    x, weights = framework.tensor([1.0, 2.0, 3.0, 0.5]), framework.tensor([7.0, 11.0, 13.0, 17.0])
    clipped = lambda x: ops.sum(weights * ops.clip(x, 1.0, 2.0))
    by_two = lambda x: ops.sum(weights * ops.minimum(ops.maximum(x, 1.0), 2.0))
    found, expected = (ops.convert_to_numpy(cgshim.op_grad(f)(x)) for f in (clipped, by_two))
    np.testing.assert_array_equal(found, expected)
    assert found[2:].tolist() == [0.0, 0.0]


def test_axes_in_a_tuple_go_the_short_way(framework):
    x = framework.tensor(MATRIX)
    for _ in range(2):
        framework.check_equal(ops.sum(x, axis=(0, 1)), np.array(22.0))
        framework.check_equal(ops.max(x, axis=(1,), keepdims=True), np.array([[3.0], [7.0]]))


def test_numbers_alone_are_the_chosen_backends(framework):
    with cgshim.use_backend(framework.name):
        found = ops.add(1.0, 2.0)
    assert framework.backend.is_tensor(found)
    framework.check_equal(found, np.array(3.0))


def test_calls_of_other_types_find_their_own_way(framework):
    """A call is remembered by its arguments' types; one whose types are others is looked at."""
    x, array = framework.tensor([1.0, -2.0]), np.array([0.5, 3.0], "float32")
    calls = {
        "tensors": (lambda: ops.maximum(x, x), [1.0, -2.0]),
        "an array": (lambda: ops.maximum(x, array), [1.0, 3.0]),
        "a number": (lambda: ops.maximum(x, -0.5), [1.0, -0.5]),
        "a list of tensors": (lambda: ops.concatenate([x, x]), [1.0, -2.0, 1.0, -2.0]),
        "a list with an array": (lambda: ops.concatenate([x, array]), [1.0, -2.0, 0.5, 3.0]),
        "a tuple": (lambda: ops.concatenate((array, x)), [0.5, 3.0, 1.0, -2.0]),
        "an axis": (lambda: ops.sum(x, 0), -1.0),
        "axes by name": (lambda: ops.sum(x, axis=(0,)), -1.0),
    }
    for name, (call, expected) in [*calls.items()] * 3:
        found = call()
        assert framework.backend.is_tensor(found), name
        framework.check_equal(found, np.array(expected))
    found = [ops.multiply(array, array), ops.exp(0.0)]
    assert [type(y) for y in found] == [np.ndarray, np.float64]


def test_a_remembered_call_obeys_the_choice(framework):
    array = np.array([1.0, 4.0], "float32")
    for _ in range(2):
        assert type(ops.sqrt(array)) is np.ndarray
        with cgshim.use_backend(framework.name):
            assert framework.backend.is_tensor(ops.sqrt(array))
        framework.check_equal(ops.sqrt(framework.tensor([1.0, 4.0])), np.array([1.0, 2.0]))


def test_a_tensor_of_another_framework_raises_after_its_own(incomplete):
    x = Framework(incomplete).tensor(4.0)
    assert ops.convert_to_numpy(ops.sqrt(x)) == 2
    with (
        cgshim.use_backend("numpy"),
        pytest.raises(BackendError, match="tensors of one call belong to one framework"),
    ):
        ops.sqrt(x)


# --- What there is not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "no_such_function",
        "linalg.no_such_function",
        "pi",
        "errstate",
        "random",
        "float32",
        "ndarray",
    ],
)
def test_what_numpy_has_not_is_no_function(name):
    with pytest.raises(AttributeError) as error:
        getattr(ops.linalg, name.removeprefix("linalg.")) if name.startswith(
            "linalg."
        ) else getattr(ops, name)
    hint = f"; write numpy.{name}" if hasattr(np, name) else ""
    message = f"numpy has no function {name} of arrays, and so cgshim.ops has none{hint}"
    assert str(error.value) == message


def pytest_generate_tests(metafunc):
    """autograd has all that NumPy has."""
    if "incomplete" in metafunc.fixturenames:
        names = [name for name in metafunc.config.option.backends if name != "numpy"]
        none = pytest.param(
            "numpy", marks=pytest.mark.skip(reason="NumPy is the only framework in this run")
        )
        metafunc.parametrize("incomplete", names or [none])


def test_what_a_framework_has_not_is_refused_by_name(incomplete):
    with pytest.raises(BackendError) as error:
        ops.busday_count(Framework(incomplete).tensor(1.0))
    assert str(error.value) == (
        f"op_busday_count: NumPy's busday_count must exist in {incomplete}, got nothing that gives its numbers; "
        f"call {incomplete}'s own function"
    )
