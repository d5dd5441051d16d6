"""Find and load backends: the modules in the entry-point group `cgshim.backends`.

A backend is registered under the import root of its framework. No framework is imported before it
is used. A backend that fails to load is not imported again in this process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cgshim._dtype_names import let_name_dtypes
from cgshim._errors import BackendError, listing, refusal, sentence
from cgshim._foreign import constant_when_traced
from cgshim._protocol import REQUIRED, Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@functools.cache
def entry_points() -> dict[str, EntryPoint]:
    """Return the entry point of each registered backend by name, without importing any."""
    return dict(sorted(_registered("cgshim.backends").items()))


@functools.cache
def aliases() -> dict[str, str]:
    """Return the backend's name for each import root whose types belong to another framework."""
    return {root: entry.value for root, entry in _registered("cgshim.aliases").items()}


def _registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    from importlib import metadata  # takes 30 ms, and many programs do not need it

    return {entry.name: entry for entry in metadata.entry_points(group=group)}


def owner_of(entry: EntryPoint) -> str:
    """Return the name of the distribution that registers an entry point."""
    return "an unknown distribution" if entry.dist is None else entry.dist.name


def available_backends() -> list[str]:
    """Return the names of the registered backends whose framework can be imported here.

    Returns
    -------
    list of str
        Sorted. It imports no framework.

    Examples
    --------
    >>> "numpy" in available_backends()
    True
    """
    return [name for name in entry_points() if is_importable(name)]


def is_importable(root: str) -> bool:
    """Return True if an import root is imported or can be found; import nothing."""
    try:
        return sys.modules.get(root) is not None or find_spec(root) is not None
    except Exception:  # noqa: BLE001  # finders are other libraries' code
        return False


def load(name: str) -> Backend:
    """Import and return the backend called name; raise a BackendError if it fails."""
    if not isinstance(name, str):
        raise _unknown(name)
    _import(name)
    return _backends[name]


_backends: dict[str, Backend] = {}
_failures: dict[str, str] = {}


@constant_when_traced
def _import(name: str) -> bool:
    """Import a backend once; torch.compile takes no module as the constant that this returns."""
    if name in _backends:
        return True
    if (entry := entry_points().get(name)) is None:
        raise _unknown(name)
    if name in _failures:  # calls look for a backend again and again
        raise BackendError(_failures[name])
    backend = f"the backend {name!r} of {owner_of(entry)}"
    do = f"fix or uninstall {owner_of(entry)}, and restart Python"
    try:
        module: Any = entry.load()
    except (Exception, SystemExit) as error:  # a backend may be another library's code
        must, got = f"{backend} must import", said(error)
        if not is_importable(name):  # it may be installed before the next call
            raise refusal(BackendError, "cgshim", must=must, got=got,
                          do=command_to_install(entry)) from error  # fmt: skip
        _failures[name] = sentence("cgshim", must=must, got=got, do=do)
        raise BackendError(_failures[name]) from error
    if missing := [member for member in REQUIRED if not callable(getattr(module, member, None))]:
        must, got = f"{backend} must have the functions of a backend", f"no {listing(missing)}"
        _failures[name] = sentence("cgshim", must=must, got=got, do=do)
        raise BackendError(_failures[name])
    if hasattr(module, "dtype_name"):
        for root in [name, *(root for root, of in aliases().items() if of == name)]:
            let_name_dtypes(root, module.dtype_name)
    _backends[name] = module
    return True


def said(error: BaseException) -> str:
    """Return an error's class and message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def command_to_install(entry: EntryPoint) -> str:
    """Return the command that installs the framework of a backend."""
    if owner_of(entry) == "cgshim":
        return f"pip install 'cgshim[{entry.name}]'"
    return f"install what is imported as {entry.name}"


def require_metadata() -> None:
    """Raise an error if no backend is registered.

    Without one, no tensor is recognized, and an op would be a plain function.
    """
    if not entry_points():
        raise refusal(BackendError, "cgshim",
                      must="backends are found by the metadata of installed distributions",
                      got="none at all",
                      do="run pip install -e . (or pip install cgshim) in this environment")  # fmt: skip


def _unknown(name: object) -> BackendError:
    require_metadata()
    here = available_backends()
    missing = [f"{n} ({command_to_install(e)})" for n, e in entry_points().items() if n not in here]
    could = f"; could be installed: {', '.join(missing)}" if missing else ""
    return refusal(BackendError, "cgshim", must="a backend is named by its framework's import root",
                   got=repr(name), do=f"installed: {', '.join(here)}{could}")  # fmt: skip


@constant_when_traced
def name_of(backend: Backend) -> str:
    """Return the name under which a backend is registered."""
    return next(name for name, loaded in _backends.items() if loaded is backend)


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports its module at the first call."""
    imported = functools.cache(lambda: getattr(import_module(module), name))
    return lambda *args: imported()(*args)


def own_version() -> str:
    """Return cgshim's version from the metadata of its distribution."""
    from importlib import metadata

    try:
        return metadata.version("cgshim")
    except metadata.PackageNotFoundError:
        raise refusal(AttributeError, "cgshim.__version__",
                      must="the version is read from the metadata of the installed distribution",
                      got="none",
                      do="run pip install -e . (or pip install cgshim) in this environment") from None  # fmt: skip
