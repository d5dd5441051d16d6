"""The tensors that a function holds, and those inside an object."""

import numpy as np

from cgshim._held import tensors_held, tensors_inside

TABLE = np.arange(3.0)


def test_globals_that_a_function_names_are_held_by_it_but_not_inside_it():
    def function():
        return TABLE

    is_array = lambda x: isinstance(x, np.ndarray)
    assert tensors_held(function, is_array) == [TABLE]
    assert tensors_inside(function, is_array) == []
