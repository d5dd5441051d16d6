"""The installed plug-ins: which frameworks have a backend, and its module.

A backend is a module that is registered, under its framework's import root, in the entry-point group
`cgshim.backends`; cgshim's own four have no privileges over others. Nothing here imports a framework before somebody
asks for it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from cgshim._errors import BackendError, sentence
from cgshim._foreign import constant_when_traced
from cgshim._protocol import Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@functools.cache
def entry_points() -> dict[str, EntryPoint]:
    """Return every registered backend by its name, without importing any."""
    from importlib.metadata import entry_points as installed  # 20 ms, often not needed: most name or import one

    return {point.name: point for point in sorted(installed(group="cgshim.backends"), key=lambda p: p.name)}


@functools.cache
def aliases() -> dict[str, str]:
    """Return the backend's name for each import root whose types belong to another framework."""
    from importlib.metadata import entry_points as installed

    return {point.name: point.value for point in installed(group="cgshim.aliases")}


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
    return [name for name in entry_points() if importlib.util.find_spec(name) is not None]


def load(name: str) -> Backend:
    """Import and return the backend called name; a BackendError says what is missing, and who provides it."""
    backend: Any = sys.modules[_import(name)]
    return backend  # type: ignore[no-any-return]


_modules: dict[str, str] = {}


@constant_when_traced
def _import(name: str) -> str:
    """Import the backend called name, once, and return the name of its module."""
    try:
        return _modules[name]
    except KeyError:
        pass
    point = entry_points().get(name)
    if point is None:
        raise BackendError(_unknown(name))
    try:
        return _modules.setdefault(name, point.load().__name__)
    except Exception as error:  # a plug-in is others' code: name its owner for anything that it raises
        raise BackendError(_broken(name, point, error)) from error


def _unknown(name: str) -> str:
    if not entry_points():
        return sentence(
            "cgshim", must="backends are found by the metadata of installed distributions", got="none at all",
            do="run pip install -e . (or pip install cgshim) in this environment",
        )  # fmt: skip
    here = available_backends()
    missing = [f"{n} (pip install {_distribution(n)})" for n in entry_points() if n not in here]
    could = f"; could be installed: {', '.join(missing)}" if missing else ""
    return sentence("cgshim", must="a backend is named by its framework's import root", got=repr(name),
                    do=f"installed: {', '.join(here)}{could}")  # fmt: skip


def _distribution(name: str) -> str:
    """Return what to install to get a backend's framework."""
    dist = entry_points()[name].dist
    return f"'cgshim[{name}]'" if dist is None or dist.name == "cgshim" else dist.name


def _broken(name: str, point: EntryPoint, error: Exception) -> str:
    owner = point.dist.name if point.dist else "an unknown distribution"
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name == name and owner == "cgshim":
        return sentence("cgshim", must=f"the backend {name!r} needs its framework", got=what,
                        do=f"run pip install 'cgshim[{name}]'")  # fmt: skip
    return sentence(
        "cgshim", must=f"the backend {name!r} of {owner} must import", got=what, do=f"mend or uninstall {owner}"
    )


@constant_when_traced
def name_of(backend: Backend) -> str:
    """Return the name under which a loaded backend is registered."""
    return next(name for name, module in _modules.items() if module == backend.__name__)
