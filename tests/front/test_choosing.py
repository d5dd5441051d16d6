"""Choosing a backend: by name for a process or a context, and else by the types of the inputs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cgshim
from cgshim._dispatch import framework_of_type
from cgshim.testing.conformance import Framework


@pytest.fixture(autouse=True)
def _choice_handed_back() -> Iterator[None]:
    yield
    cgshim.set_backend(None)


@pytest.fixture
def in_the_environment(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr("cgshim._dispatch._of_environment", backend)


@cgshim.op_custom_gradient
def square(x):
    return x * x, lambda upstream: 7.0 * upstream * x


def test_nothing_is_chosen_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cgshim._dispatch._of_environment", None)
    assert cgshim.config_backend() is None


@pytest.mark.usefixtures("in_the_environment")
def test_environment_variable(backend: str) -> None:
    assert cgshim.config_backend() == backend


def test_set_backend(backend: str) -> None:
    cgshim.set_backend(backend)
    assert cgshim.config_backend() == backend
    cgshim.set_backend(None)
    assert cgshim.config_backend() is None


def _enter(name: str) -> None:
    with cgshim.use_backend(name):
        raise AssertionError("never entered")


@pytest.mark.parametrize("choose", [cgshim.set_backend, _enter], ids=["set_backend", "use_backend"])
def test_an_unknown_choice_is_refused_at_once(choose: Any) -> None:
    with pytest.raises(
        cgshim.BackendError,
        match=r"^cgshim: a backend is named by its framework's import root, got",
    ):
        choose("nonesuch")
    assert cgshim.config_backend() is None


def test_use_backend_ends_with_an_exception(backend: str) -> None:
    with pytest.raises(ZeroDivisionError), cgshim.use_backend(backend):
        raise ZeroDivisionError
    assert cgshim.config_backend() is None


def test_available_backends(backend: str) -> None:
    available = cgshim.available_backends()
    assert backend in available
    assert available == sorted(available)


def test_by_the_inputs(backend: str) -> None:
    framework = Framework(backend)
    found = square(framework.tensor([2.0, 3.0]))
    assert framework.backend.is_tensor(found)
    framework.check_equal(found, np.array([4.0, 9.0]))


@pytest.mark.parametrize("array_first", [True, False])
@pytest.mark.parametrize("place", [lambda x: x, lambda x: {"w": x}, lambda x: [{"w": (x,)}]])
def test_numpy_arrays_are_constants_beside_a_tree(
    backend: str, place: Any, array_first: bool
) -> None:
    framework = Framework(backend)
    tree, array = place(framework.tensor([2.0, 3.0])), np.array([5.0, 7.0], "float32")
    args = [array, tree] if array_first else [tree, array]

    @cgshim.op_custom_gradient
    def op(a, b):
        return (a, b), lambda upstream: (None, None)

    assert all(map(framework.backend.is_tensor, framework.backend.tree_flatten(op(*args))[0]))


def test_numpy_arrays_become_the_chosen_backends(backend: str) -> None:
    """A NumPy array is everybody's constant: whoever is chosen by name takes it."""
    framework = Framework(backend)
    with cgshim.use_backend(backend):
        found = square(np.array([2.0, 3.0], "float32"))
    assert framework.backend.is_tensor(found)
    framework.check_equal(found, np.array([4.0, 9.0]))


def test_python_numbers_stay_numbers(backend: str) -> None:
    with cgshim.use_backend(backend):
        assert type(square(3.0)) is float


def test_subclasses_are_their_frameworks(backend: str) -> None:
    """A class of the user's own is found by its bases, however far up: some tensors may not be
    derived from.
    """
    kind = type(Framework(backend).tensor([1.0]))
    base = type("Tensor", (), {"__module__": f"{kind.__module__}.inner"})
    derived = type("Derived", (base,), {})
    further = type("Further", (derived,), {})
    assert [framework_of_type(each) for each in (kind, base, derived, further)] == [backend] * 4
    assert framework_of_type(type("Other", (), {})) is None


class _Seen(threading.Thread):
    """A thread that chooses a backend for itself, and meets the others while it has."""

    def __init__(self, name: str | None, meeting: threading.Barrier) -> None:
        super().__init__()
        self.choice, self.meeting, self.found = name, meeting, "nothing"

    def run(self) -> None:
        if self.choice is None:
            self.meeting.wait()
            self.found = cgshim.config_backend()
            return
        with cgshim.use_backend(self.choice):
            self.meeting.wait()
            self.found = cgshim.config_backend()


def test_a_choice_belongs_to_its_thread(backend: str) -> None:
    meeting = threading.Barrier(3)
    threads = [_Seen(name, meeting) for name in (backend, "numpy", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [thread.found for thread in threads] == [backend, "numpy", None]


def test_a_choice_belongs_to_its_task(backend: str) -> None:
    async def choose(name: str, entered: asyncio.Event, other: asyncio.Event) -> str | None:
        with cgshim.use_backend(name):
            entered.set()
            await other.wait()
            return cgshim.config_backend()

    async def both() -> list[str | None]:
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(choose(backend, first, second), choose("numpy", second, first))

    assert asyncio.run(both()) == [backend, "numpy"]
    assert cgshim.config_backend() is None


def test_a_framework_that_is_not_imported_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are looked up among the frameworks that are in sys.modules."""
    stranger = type("Tensor", (), {"__module__": "jax.somewhere"})
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert framework_of_type(stranger) is None


@pytest.mark.parametrize("root", ["keras", "tf_keras", "tensorflow.python.keras"])
def test_a_symbolic_tensor_of_any_keras_is_refused(root: str) -> None:
    """Keras 2 would record what f does with it, and not its rule."""
    symbol = type("KerasTensor", (), {"__module__": f"{root}.engine.keras_tensor"})
    op = cgshim.op_custom_gradient(lambda x: (x, lambda upstream: upstream))
    for kind in (symbol, type("RaggedKerasTensor", (symbol,), {"__module__": root})):
        with pytest.raises(cgshim.CustomGradientError, match="got a symbolic KerasTensor; call"):
            op(kind())


def test_a_class_of_the_name_of_keras_s_is_none_of_keras() -> None:
    static = type("KerasTensor", (), {})()
    op = cgshim.op_custom_gradient(lambda x, _: (2 * x, lambda upstream: (3 * upstream, None)))
    assert op(np.array(5.0), static) == 10
