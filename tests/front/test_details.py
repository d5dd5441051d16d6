"""Details of the front end that nothing else asks for, each of which a small mistake would change unseen."""

from importlib.metadata import PathDistribution

import numpy as np
import pytest

from cgshim import CustomGradientTypeError, op_custom_gradient, op_grad
from cgshim.__main__ import Row
from cgshim._errors import listing
from cgshim._held import tensors_held, tensors_inside
from cgshim._installed import Entry, requirement_of


def test_a_backend_works_where_it_says_nothing_else():
    assert Row("mine", "my_plug_in", "-", "-", "ok").works is True
    assert Row("mine", "my_plug_in", "-", "-", "cgshim: it does not").works is False


def test_a_rule_may_take_more_than_it_is_given():
    """`grad(upstream, *rest)` is given the upstream, structured as the output, and nothing else."""
    seen = []

    @op_custom_gradient
    def op(x):
        def grad(upstream, *rest):
            seen.append(rest)
            return upstream["y"] * 7 * x

        return {"y": x * x}, grad

    np.testing.assert_allclose(op_grad(lambda x: op(x)["y"])(np.array(3.0)), 21.0)
    assert seen == [()]


def test_an_option_that_is_missing():
    @op_custom_gradient(name="op")
    def op(x, *, scale):
        return scale * x, lambda u: u * scale

    with pytest.raises(CustomGradientTypeError, match=r"^op: missing a required .*'scale'$"):
        op(np.array(3.0))


def test_words_as_a_sentence_lists_them():
    assert [listing(list(words)) for words in ("", "x", "xy", "xyz")] == ["", "x", "x and y", "x, y and z"]


TABLE = np.arange(3.0)


def test_globals_that_a_function_names_are_held_by_it_but_not_inside_it():
    def function():
        return TABLE

    is_array = lambda x: isinstance(x, np.ndarray)
    assert tensors_held(function, is_array) == [TABLE]
    assert tensors_inside(function, is_array) == []


def test_a_requirement_with_spaces(tmp_path):
    (tmp_path / "METADATA").write_text(
        "Name: plug-in\nProvides-Extra: wonder\nRequires-Dist: wonder >=2 ; extra == 'wonder'\n"
    )
    entry = Entry("cgshim.backends", "wonder", "plug_in", "plug-in", PathDistribution(tmp_path))
    assert requirement_of(entry) == ("wonder >=2", True)
