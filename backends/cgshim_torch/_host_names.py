"""PyTorch: the names of calls on the host, for graphs, which hold strings and no functions.

If importing a module leads to the op, the name says so and is known in every process: `package.module:op?{"n": 2}`.
Any other call has a number in this process, and is kept as long as it is among those that were used last.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import itertools
import json
import operator
import os
import re
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NoReturn

from cgshim.backend import ONE_TENSOR, SIMPLE, BackendError, CustomGradient, HostCall, OnHost, Spec, sentence

MOST = 4096
"""how many calls that only this process knows are kept"""

_PROCESS = secrets.token_hex(4)  # a name from another process must not lead to a call of this one
_numbers = itertools.count()
_lock = threading.Lock()
_kept: OrderedDict[str, tuple[Hashable, HostCall]] = OrderedDict()
_names: dict[Hashable, str] = {}
_lent: dict[str, HostCall] = {}


def name_of(call: HostCall, results: str = "") -> str:
    """Return the name of a call, for a graph; equal calls share it if the graph declares the same for their results."""
    if all(spec is ONE_TENSOR for spec in call.specs) and _is_importable(call) and _is_json(call.options):
        options = f"?{json.dumps(call.options, sort_keys=True)}" if call.options else ""
        return ":".join(map(str, _place_of(call))) + (results and f">{results}") + options
    key = _key_of(call), results
    with _lock:
        name = _names.setdefault(key, _new_name(call))
        _kept.setdefault(name, (key, call))
        _kept.move_to_end(name)
        while len(_kept) > MOST:
            _, (oldest, _) = _kept.popitem(last=False)
            del _names[oldest]
    return name


def fingerprint(outputs: Any) -> str:
    """Return what tells outputs from others: its code, and the plain values that it reads.

    Compiled code that is kept, by torch or on disk, is for shapes and dtypes, but torch finds it by names alone.
    """
    function = inspect.unwrap(outputs) if callable(outputs) else None
    read: Any = outputs
    if isinstance(function, FunctionType):
        read = _parts_of(function.__code__), function.__defaults__, _values_of(function)
    return hashlib.sha256(repr(read).encode()).hexdigest()[:8]


def _values_of(function: FunctionType) -> list[tuple[str, Any]]:
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a variable that has no value yet
        return []
    values = ((name, x) for name, x in {**found.globals, **found.nonlocals}.items() if type(x) in _TOLD_BY_REPR)
    return sorted(values, key=operator.itemgetter(0))


_TOLD_BY_REPR = SIMPLE | {tuple, list, dict, Spec}


def _parts_of(code: CodeType) -> Any:
    """Return what a function's code does, without the lines that it stands in."""
    constants = [_parts_of(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    return code.co_code, code.co_names, constants, code.co_freevars


def _key_of(call: HostCall) -> Hashable:
    """Return what equal calls share; one with an argument or an option that has no hash shares nothing."""
    try:
        hash(call.key)
    except TypeError:
        return object()
    return call.key


def _new_name(call: HostCall) -> str:
    return f"{call.name}#{_PROCESS}.{os.getpid()}.{next(_numbers)}"


@contextlib.contextmanager
def lent(call: HostCall) -> Iterator[str]:
    """Give a call a name for a block in which no graph is made."""
    name = _new_name(call)
    _lent[name] = call
    try:
        yield name
    finally:
        del _lent[name]


def over(name: str, batched: Sequence[bool]) -> str:
    """Return the name of a call over one more batch, of these inputs."""
    return f"{name}|{''.join('01'[has] for has in batched)}"


def call_of(name: str, inputs: int) -> HostCall:
    """Return the call that has a name, for so many tensors."""
    found = _WITH_BATCHES.fullmatch(name) if "|" in name else None
    first, batches = found.groups() if found else (name, "")
    call = _lent.get(first) or _among_kept(first) or _imported(first, inputs)
    for batched in batches.split("|")[1:]:
        call = call.over([bit == "1" for bit in batched])
    return call


_WITH_BATCHES = re.compile(r"(.*?)((?:\|[01]+)*)", re.DOTALL)


def _among_kept(name: str) -> HostCall | None:
    with _lock:
        if name not in _kept:
            return None
        _kept.move_to_end(name)
        return _kept[name][1]


# --- Names that other processes know ----------------------------------------------------------------------------


def _is_importable(call: HostCall) -> bool:
    """Return True if module and name lead to the op of a call, also in another process."""
    module, name = _place_of(call)
    return module not in (None, "__main__", "__mp_main__") and _function_at(module, name) is call.function


def _place_of(call: HostCall) -> tuple[str | None, str | None]:
    f = call.function.function
    return getattr(f, "__module__", None), getattr(f, "__qualname__", None)


def _function_at(module: str | None, name: str | None) -> Any:
    """Return the function on the host whose op has this name in a module; None if there is none."""
    try:
        op = operator.attrgetter(name or "")(sys.modules.get(module or ""))
    except AttributeError:
        return None
    held: Any = op.held_function if isinstance(op, CustomGradient) else None
    return held.function if isinstance(held, OnHost) else None


def _is_json(x: Any) -> bool:
    """Return True if JSON gives x back as it is, with its types."""
    if isinstance(x, Mapping):
        return all(type(key) is str for key in x) and all(map(_is_json, x.values()))
    return all(map(_is_json, x)) if type(x) is list else type(x) in (str, int, float, bool, type(None))


def _imported(name: str, inputs: int) -> HostCall:
    """Return the call of the op that a module has under this name now: it may have been reloaded."""
    known = _found.get((name, inputs))
    if known is not None and _function_at(*_place_of(known)) is known.function:
        return known
    if len(_found) == MOST:
        _found.clear()
    _found[name, inputs] = call = _newly_imported(name, inputs)
    return call


_found: dict[tuple[str, int], HostCall] = {}


def _newly_imported(name: str, inputs: int) -> HostCall:
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
    raise BackendError(
        sentence(op, must="a graph knows a function on the host by its name", got=got,
                 do="define the op in a module, and call it with tensors and with options that JSON can hold")
    ) from error  # fmt: skip
