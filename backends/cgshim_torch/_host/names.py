"""PyTorch: the names of calls on the host, for graphs, which hold strings and no functions.

If importing a module leads to the op, the name says so and is known in every process:
`package.module:op?{"n": 2}`. Any other call has a number in this process, and is kept as long as it
is among those that were used last.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import operator
import os
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from cgshim.backend import ONE_TENSOR, BackendError, CustomGradient, refusal
from cgshim.host.backend import HostCall, OnHost

MOST = 4096
"""how many calls are kept that only this process knows, and how many that were found by their names"""

PROCESS = secrets.token_hex(4)
"""is in what must not be known in another process, where it would lead to something else"""
_numbers = itertools.count()
_lock = threading.Lock()
_calls: OrderedDict[str, tuple[HostCall, str]] = OrderedDict()
_names: dict[tuple[HostCall, str], str] = {}


def name_of(call: HostCall, results: str = "") -> str:
    """Return the name of a call, for a graph; equal calls share it if the graph declares the same
    for their results.
    """
    place = _place_of(call)
    if place is not None and call.are_tensors and _is_json(call.options):
        options = f"?{json.dumps(call.options, sort_keys=True)}" if call.options else ""
        return f"{place}>{results}{options}" if results else f"{place}{options}"
    key = call, results
    with _lock:
        name = _names.setdefault(key, f"{call.name}#{PROCESS}.{os.getpid()}.{next(_numbers)}")
        _calls.setdefault(name, key)
        _calls.move_to_end(name)
        while len(_calls) > MOST:
            _, oldest = _calls.popitem(last=False)
            del _names[oldest]
    return name


def over(name: str, batched: Sequence[bool]) -> str:
    """Return the name of a call over one more batch, of these inputs."""
    return f"{''.join('01'[has] for has in batched)}|{name}"


def call_of(name: str, inputs: int) -> HostCall:
    """Return the call that has a name, for so many tensors."""
    bits, is_batch, rest = name.partition("|")
    if is_batch and not bits.strip("01"):
        return call_of(rest, inputs).over([bit == "1" for bit in bits])
    with _lock:
        if name in _calls:
            _calls.move_to_end(name)
            return _calls[name][0]
    call = _imported(name, inputs)
    if _place_of(call) is None:  # its module was reloaded
        _imported.cache_clear()
        call = _imported(name, inputs)
    return call


# --- Names that other processes know --------------------------------------------------------------


def _place_of(call: HostCall) -> str | None:
    """Return `module:name` if that leads to the op of a call, also in another process."""
    f = call.function.function
    module, name = getattr(f, "__module__", None), getattr(f, "__qualname__", "")
    if (
        module in (None, "__main__", "__mp_main__")
        or _function_at(module, name) is not call.function
    ):
        return None
    return f"{module}:{name}"


def _function_at(module: str, name: str) -> Any:
    """Return the function on the host whose op has this name in a module; None if there is none."""
    try:
        op = operator.attrgetter(name)(sys.modules.get(module))
    except AttributeError:
        return None
    held: Any = op.held_function if isinstance(op, CustomGradient) else None
    return held.function if isinstance(held, OnHost) else None


def _is_json(x: Any) -> bool:
    """Return True if JSON gives x back as it is, with its types."""
    if isinstance(x, Mapping):
        return all(type(key) is str for key in x) and all(map(_is_json, x.values()))
    return (
        all(map(_is_json, x)) if type(x) is list else type(x) in (str, int, float, bool, type(None))
    )


@functools.lru_cache(maxsize=MOST)
def _imported(name: str, inputs: int) -> HostCall:
    """Return the call of the op that a module has under this name."""
    path, _, options = name.partition("?")
    path = path.partition(">")[0]
    module, is_place, attribute = path.partition(":")
    if not is_place:
        _refuse(name.partition("#")[0], "its number in another process")
    try:
        importlib.import_module(module)
    except ImportError as error:
        _refuse(attribute, f"{type(error).__name__}: {error}", error)
    function = _function_at(module, attribute)
    if function is None:
        _refuse(attribute, f"no op_host at {path}")
    return HostCall(function, [ONE_TENSOR] * inputs, json.loads(options or "{}"))


def _refuse(op: str, got: str, error: Exception | None = None) -> NoReturn:
    raise refusal(BackendError, op, must="a graph knows a function on the host by its name",
                  got=got,
                  do="define the op in a module, and call it with tensors and with options that JSON can hold"
                  ) from error  # fmt: skip
