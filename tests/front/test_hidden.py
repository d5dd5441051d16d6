"""What a function may have written to, as its code tells."""

import types

import numpy as np
import pytest

from cgshim._hidden import tensors_in, values_under, written
from cgshim._writing import ANYTHING

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


def to_what_a_global_holds(x):
    here = holder.y["y"]
    here["z"] = x * x


def to_each_of_several(x):
    for each in held:
        each["y"] = x * x


def to_what_was_unpacked(x):
    _one, two = held
    two["y"] = x * x


def to_the_second_of_two(x):
    new, here = {}, cache
    new["y"] = here["y"] = x * x


def to_the_first_of_two(x):
    here, new = cache, {}
    new["y"] = here["y"] = x * x


def to_this_or_that(x):
    here = cache or {}
    here["y"] = x * x


def to_an_item_that_it_also_reads(x, key):
    cache[key] += x * x


def to_a_slice_that_it_also_reads(x, start):
    held[start:] += [x * x]


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
    to_the_second_of_two, to_the_first_of_two, to_what_a_global_holds, to_each_of_several, to_what_was_unpacked,
    to_this_or_that, to_an_item_that_it_also_reads, to_a_slice_that_it_also_reads, to_a_slice, to_a_global, by_setattr,
    by_a_helper, by_a_helper_that_is_given_it, in_a_comprehension,
    in_an_inner_function, Layer().directly, Layer().by_a_helper, Layer(), to_an_outer_dict(),
]  # fmt: skip


@pytest.mark.parametrize("f", WRITING, ids=lambda f: getattr(f, "__name__", "object"))
def test_what_writes(f):
    assert written(f, but=None)


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


def to_a_list_that_its_rule_keeps(x):
    kept = []
    for each in x:
        kept.append(each * 2)
    return kept, lambda upstream: [upstream * each for each in kept]


def to_items_that_it_also_reads(x):
    out = np.zeros(2)
    counts = {}
    for at, each in enumerate(x):
        out[at] += each
        out[at : at + 1] *= 2.0
        counts[at] = counts.get(at, 0) + 1
    return out


def to_an_object_of_its_own(x):
    own = types.SimpleNamespace()
    own.y = x
    own.y += 1.0
    return own


def to_its_argument(x):
    x[0] = 3.0
    x *= 2
    return x


def reading_others(x):
    return x * cache["y"] + holder.y


NOT_WRITING = [
    nothing, to_an_array_of_its_own, to_a_list_of_its_own, to_a_list_that_its_rule_keeps, to_items_that_it_also_reads,
    to_an_object_of_its_own, to_its_argument, reading_others,
    Layer().without,
]  # fmt: skip


@pytest.mark.parametrize("f", NOT_WRITING, ids=lambda f: f.__name__)
def test_what_does_not_write(f):
    assert not written(f, but=None)


def test_the_rule_may_write_what_it_wants():
    def f(x):
        def grad(upstream):
            cache["upstream"] = upstream
            return upstream

        return x * x, grad

    _, rule = f(2.0)
    assert written(f, but=None)
    assert not written(f, but=rule.__code__)


def test_objects_that_hold_each_other():
    a, b = types.SimpleNamespace(), types.SimpleNamespace()
    a.other, b.other, b.number = b, a, 2.5
    assert set(tensors_in([a], lambda x: isinstance(x, float))) == {2.5}


class Counting:
    __slots__ = ("__dict__", "slot")

    def __init__(self):
        self.slot = None
        self.calls, self.log, self.weight, self.last = 0, [], 2.5, None

    @property
    def seen(self):
        return self.log

    @seen.setter
    def seen(self, value):
        self.log = value

    def counted(self, x):
        self.calls += 1
        return x

    def logged(self, x):
        self.log.append(str(x))
        return x

    def str(self):  # not what `logged` calls
        self.__dict__.clear()

    def remembered_in_a_slot(self, x):
        self.slot = x
        return x

    def remembered(self, x):
        self.last = x
        return x

    def by_a_property(self, x):
        self.seen = [x]
        return x

    def by_its_dict(self, x):
        self.__dict__["last"] = x
        return x


@pytest.mark.parametrize(("method", "names"), [
    ("counted", {"calls"}), ("logged", {"log"}), ("remembered", {"last"}), ("by_a_property", {"seen"}),
    ("remembered_in_a_slot", {"slot"}),
    ("by_its_dict", {ANYTHING, "__dict__"}),
])  # fmt: skip
def test_the_attributes_that_are_written(method, names):
    assert written(getattr(Counting(), method), but=None) == names


@pytest.mark.parametrize(("method", "found"), [
    ("counted", set()), ("logged", set()), ("remembered", {1.5}), ("by_a_property", {1.5, 2.5}),
    ("remembered_in_a_slot", {1.5}),
    ("by_its_dict", {1.5, 2.5}),
])  # fmt: skip
def test_what_was_there_before_is_looked_for_where_it_was_written(method, found):
    counting = Counting()
    getattr(counting, method)(1.5)
    objects = values_under(written(getattr(counting, method), but=None), [types.SimpleNamespace(inner=counting)])
    assert set(tensors_in([objects], _is_float)) == found


def _is_float(x):
    return isinstance(x, float)


class Items(dict):
    __getattr__ = dict.__getitem__


def test_a_configuration_that_raises_what_it_likes_for_a_name():
    assert set(tensors_in([types.SimpleNamespace(config=Items(scale=2.5))], _is_float)) == {2.5}
