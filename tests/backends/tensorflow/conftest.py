"""What the tests of the TensorFlow backend share."""

import pytest
from tensorflow.python.ops import variable_scope


@pytest.fixture(autouse=True)
def _variable_scope_as_it_was():
    """tf.map_fn leaves a caching device behind in the variable scope if what it maps raises
    (TensorFlow 2.21).
    """
    scope = variable_scope.get_variable_scope()
    before = scope.caching_device
    yield
    scope._caching_device = before
