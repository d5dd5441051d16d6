"""How a rule is called: as the signature of grad_fn says."""

import numpy as np
import pytest

from cgshim import CustomGradientTypeError, op_custom_gradient, op_grad


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


@pytest.mark.parametrize("name", ["variables", "needs_input_grad"])
def test_a_positional_only_parameter_given_by_name_raises(name):
    """It would be lost among ``**rest``."""
    scope = {}
    exec(f"def grad(upstream, {name}=None, /, **rest): return upstream", scope)
    op = op_custom_gradient(lambda x: (x * x, scope["grad"]), name="square")
    with pytest.raises(CustomGradientTypeError, match="square: grad_fn must take its upstream"):
        op(np.array(3.0))
