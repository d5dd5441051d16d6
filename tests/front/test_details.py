"""Details of the front end that nothing else asks for, each of which a small mistake would change unseen."""

import numpy as np
import pytest

from cgshim import CustomGradientTypeError, op_custom_gradient, op_grad
from cgshim.__main__ import Row
from cgshim._errors import listing


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
