"""Distributions of third parties, half installed or broken: an error names the distribution, and the
others work.
"""

import sys
import types

import numpy as np
import pytest

import cgshim
from cgshim import BackendError, op_custom_gradient, op_grad, ops
from cgshim._dispatch import chosen_by

square = op_custom_gradient(lambda x, option=None: (x * x, lambda u: (7.0 * u * x, None)))


@pytest.fixture
def alien(install, monkeypatch):
    """Install a plug-in for a framework called alien, which is imported; the type of its tensors."""

    def install_it(entry_point, module):
        install("alien", entry_point, module)
        monkeypatch.setitem(sys.modules, "alien", types.ModuleType("alien"))
        return type("Tensor", (), {"__module__": "alien"})

    return install_it


WHO = (
    "cgshim: the backend 'alien' of alien-plugin must import, got {}; "
    "fix or uninstall alien-plugin, and restart Python"
)
BROKEN = {
    "its module raises": (
        "alien_plugin", "raise RuntimeError('too old')", WHO.format("RuntimeError: too old"),
    ),
    "its module is not there": (
        "alien_plugin_gone", "", WHO.format("ModuleNotFoundError: No module named 'alien_plugin_gone'"),
    ),
    "its dependency is not there": (
        "alien_plugin", "import alien_kernels", WHO.format("ModuleNotFoundError: No module named 'alien_kernels'"),
    ),
    "it has no such attribute": (
        "alien_plugin:backend", "", WHO.format("AttributeError: module 'alien_plugin' has no attribute 'backend'"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_the_error_says_whose_it_is(alien, case):
    entry_point, module, message = BROKEN[case]
    tensor = alien(entry_point, module)()
    for fails in (lambda: cgshim.set_backend("alien"), lambda: square(tensor)):
        with pytest.raises(BackendError) as error:
            fails()
        assert str(error.value) == message


@pytest.mark.parametrize(
    "entry_point", [entry_point for entry_point, *_ in BROKEN.values()] + ["no module!"]
)
def test_other_distributions_work(alien, entry_point):
    """Not by a plug-in whose framework is imported, nor in a call with objects that might be trees
    of any library.
    """
    alien(entry_point, "raise RuntimeError('too old')")
    x = np.array([2.0, 3.0])
    np.testing.assert_array_equal(op_grad(lambda x: ops.sum(square(x, object())))(x), 7.0 * x)
    assert square(3.0, object()) == 9.0
    with cgshim.use_backend("numpy"):
        np.testing.assert_array_equal(square(x), x * x)


def test_a_framework_that_is_not_installed_is_named(install):
    install("alien", "alien_plugin", "import alien")
    with pytest.raises(
        BackendError, match=r"could be installed: .*\balien \(install what is imported as alien\)"
    ):
        cgshim.set_backend("unknown")


@pytest.fixture
def two_choices(install, backend):
    """The backend that is tested, and a third party's."""
    install("alien", "alien_plugin", "from cgshim_numpy import *")
    yield backend, "alien"
    cgshim.set_backend(None)


def test_the_nearer_choice_wins(monkeypatch, two_choices):
    for near, far in (two_choices, two_choices[::-1]):
        monkeypatch.setattr("cgshim._dispatch._of_environment", "no_such_backend")
        cgshim.set_backend(far)
        assert cgshim.config_backend() == far
        with cgshim.use_backend(near):
            assert cgshim.config_backend() == near
            with cgshim.use_backend(far):
                assert cgshim.config_backend() == far
            assert cgshim.config_backend() == near
        assert cgshim.config_backend() == far
        cgshim.set_backend(None)
        assert cgshim.config_backend() == "no_such_backend"
        monkeypatch.setattr("cgshim._dispatch._of_environment", near)
        assert cgshim.config_backend() == near


def test_what_the_choice_was_made_by(monkeypatch, two_choices):
    backend, other = two_choices
    monkeypatch.setattr("cgshim._dispatch._of_environment", None)
    assert chosen_by() == "the inputs' types"
    monkeypatch.setattr("cgshim._dispatch._of_environment", backend)
    assert chosen_by() == "CGSHIM_BACKEND"
    cgshim.set_backend(other)
    assert chosen_by() == "set_backend"
    with cgshim.use_backend(backend):
        assert chosen_by() == "use_backend"
