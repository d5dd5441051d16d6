"""What a function may have written to, as its code tells."""

import types

import numpy as np
import pytest

from cgshim._hidden import tensors_in, writes

cache, held = {}, []
holder = types.SimpleNamespace(y=None)
remembered = None


def to_a_global_dict(x):
    cache["y"] = x * x


def to_a_global_dict_by_a_name(x):
    here = cache
    here["y"] = x * x


def to_a_global_list(x):
    held.append(x * x)


def to_a_global_object(x):
    holder.y = x * x


def to_an_item_of_an_attribute(x):
    holder.y["y"] = x * x


def to_a_slice(x):
    held[:1] = [x * x]


def to_a_global(x):
    global remembered
    remembered = x * x


def by_setattr(x):
    setattr(holder, "y" * 1, x * x)


def by_a_helper(x):
    to_a_global_dict(x)


def remember(where, y):
    where["y"] = y


def by_a_helper_that_is_given_it(x):
    remember(cache, x * x)


def in_a_comprehension(x):
    return [held.append(each) for each in x]


def in_an_inner_function(x):
    def inner():
        cache["y"] = x

    inner()


class Layer:
    def remember(self, y):
        self.y = y

    def directly(self, x):
        self.y = x * x

    def by_a_helper(self, x):
        self.remember(x * x)

    def without(self, x):
        return x * self.scale

    def __call__(self, x):
        self.y = x


def to_an_outer_dict():
    outer = {}

    def f(x):
        outer[str(x)] = x * x

    return f


WRITING = [
    to_a_global_dict, to_a_global_dict_by_a_name, to_a_global_list, to_a_global_object, to_an_item_of_an_attribute,
    to_a_slice, to_a_global, by_setattr, by_a_helper, by_a_helper_that_is_given_it, in_a_comprehension,
    in_an_inner_function, Layer().directly, Layer().by_a_helper, Layer(), to_an_outer_dict(),
]  # fmt: skip


@pytest.mark.parametrize("f", WRITING, ids=lambda f: getattr(f, "__name__", "object"))
def test_what_writes(f):
    assert writes(f, but=None)


def nothing(x):
    return x * x


def to_an_array_of_its_own(x):
    out = np.zeros(2)
    out[0] = x[1]
    out[x.size - 1 :] = 2.0 * x[0]
    return out


def to_a_list_of_its_own(x):
    kept = []
    for each in x:
        kept.append(each * 2)
    return kept


def to_an_object_of_its_own(x):
    own = types.SimpleNamespace()
    own.y = x
    return own


def to_its_argument(x):
    x[0] = 3.0
    x *= 2
    return x


def reading_others(x):
    return x * cache["y"] + holder.y


NOT_WRITING = [
    nothing, to_an_array_of_its_own, to_a_list_of_its_own, to_an_object_of_its_own, to_its_argument, reading_others,
    Layer().without,
]  # fmt: skip


@pytest.mark.parametrize("f", NOT_WRITING, ids=lambda f: f.__name__)
def test_what_does_not_write(f):
    assert not writes(f, but=None)


def test_the_rule_may_write_what_it_wants():
    def f(x):
        def grad(upstream):
            cache["upstream"] = upstream
            return upstream

        return x * x, grad

    _, rule = f(2.0)
    assert writes(f, but=None)
    assert not writes(f, but=rule.__code__)


def test_objects_that_hold_each_other():
    a, b = types.SimpleNamespace(), types.SimpleNamespace()
    a.other, b.other, b.number = b, a, 2.5
    assert set(tensors_in([a], lambda x: isinstance(x, float))) == {2.5}
