"""Load the installed plug-ins: the module of each framework's backend.

A backend is a module that is registered, under its framework's import root, in the entry-point
group `cgshim.backends`; cgshim's own four have no privileges over others. Nothing here imports a
framework before somebody asks for it. A plug-in that fails is not imported again in this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from cgshim._dtype_names import let_name_dtypes
from cgshim._errors import BackendError, listing, refusal, sentence
from cgshim._foreign import constant_when_traced
from cgshim._installed import Entry, command_to_install, is_importable, registered, said
from cgshim._protocol import REQUIRED, Backend


def entry_points() -> dict[str, Entry]:
    """Return every registered backend by its name, without importing any; one with a fault cannot
    be loaded.
    """
    return registered().backends


def available_backends() -> list[str]:
    """Return the names of the registered backends whose framework can be imported here.

    Returns
    -------
    list of str
        Sorted. This imports nothing.

    Examples
    --------
    >>> "numpy" in available_backends()
    True
    """
    return [
        name
        for name, entry in entry_points().items()
        if entry.fault is None and is_importable(name)
    ]


def load(name: str) -> Backend:
    """Import and return the backend called name; a BackendError says what is missing, and who
    provides it.
    """
    if not isinstance(name, str):
        raise BackendError(_unknown(name))
    _import(name)
    return _backends[name]


_backends: dict[str, Backend] = {}
_failures: dict[str, str] = {}


@constant_when_traced
def _import(name: str) -> bool:
    """Import the backend called name, once; torch.compile takes no module as the constant that this
    returns.
    """
    if name in _backends:
        return True
    if name in _failures:
        raise BackendError(_failures[name])
    entry = _entry(name)
    try:
        module: Any = _module(entry)
        missing = [member for member in REQUIRED if not callable(getattr(module, member, None))]
        if not missing:
            # which calls of others need, where they hold an object that may be a tree
            module.tree_flatten([])
    except (Exception, SystemExit) as error:
        # a plug-in is others' code: name its owner for anything that it raises
        is_no_module = isinstance(error, ModuleNotFoundError) and error.name == name
        if is_no_module and not is_importable(name):  # it may be installed before the next call
            raise BackendError(_without_framework(entry, error)) from error
        _failures[name] = _broken(entry, "must import", said(error))
        raise BackendError(_failures[name]) from error
    if missing:
        _failures[name] = _broken(
            entry, "must have the functions of a backend", f"no {listing(missing)}"
        )
        raise BackendError(_failures[name])
    if hasattr(module, "dtype_name"):
        for root in [name, *(root for root, of in registered().aliases.items() if of == name)]:
            let_name_dtypes(root, module.dtype_name)
    _backends[name] = module
    return True


def _module(entry: Entry) -> ModuleType:
    from importlib.metadata import EntryPoint

    module = EntryPoint(entry.name, entry.value, entry.group).load()
    if not isinstance(module, ModuleType):
        raise TypeError(f"{entry.value} is no module")
    return module


def _entry(name: str) -> Entry:
    """Return what is registered under a name, if it has no fault."""
    entry = entry_points().get(name) or next(
        (e for e in registered().ignored if e.name == name), None
    )
    if entry is None or entry.fault is not None:
        raise BackendError(_unknown(name) if entry is None else entry.fault)
    return entry


# --- Why a backend cannot be had ------------------------------------------------------------------


def require_metadata() -> None:
    """Raise an error if nothing is registered: no tensor would be known, and an op would be a plain
    function.
    """
    if not entry_points():
        raise refusal(BackendError, "cgshim",
                      must="backends are found by the metadata of installed distributions",
                      got="none at all",
                      do="run pip install -e . (or pip install cgshim) in this environment")  # fmt: skip


def _unknown(unknown: str) -> str:
    require_metadata()
    here = available_backends()
    missing = [
        f"{name} ({command_to_install(entry) or f'by {entry.owner}'})"
        for name, entry in entry_points().items()
        if not (name in here or entry.fault)
    ]
    could = f"; could be installed: {', '.join(missing)}" if missing else ""
    unreadable = [entry.owner for entry in registered().ignored if not entry.name]
    ignored = f"; ignored, as python -m cgshim says: {listing(unreadable)}" if unreadable else ""
    return sentence("cgshim", must="a backend is named by its framework's import root", got=repr(unknown),
                    do=f"installed: {', '.join(here)}{could}{ignored}")  # fmt: skip


def _without_framework(entry: Entry, error: BaseException) -> str:
    command = command_to_install(entry)
    return sentence("cgshim", must=f"the backend {entry.name!r} needs its framework", got=said(error),
                    do=f"run {command}" if command else f"install what is imported as {entry.name}")  # fmt: skip


def _broken(entry: Entry, must: str, got: str) -> str:
    return sentence("cgshim", must=f"the backend {entry.name!r} of {entry.owner} {must}", got=got,
                    do=f"mend or uninstall {entry.owner}, and start Python anew")  # fmt: skip


@constant_when_traced
def name_of(backend: Backend) -> str:
    """Return the name under which a loaded backend is registered."""
    return next(name for name, loaded in _backends.items() if loaded is backend)


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module that is imported when it is first called, as a backend's part
    of another room is.
    """
    imported = functools.cache(lambda: getattr(import_module(module), name))
    return lambda *args: imported()(*args)
