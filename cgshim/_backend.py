"""Finding the backend of a call: by name, or else by the types of its inputs.

Nothing here imports a framework that the user has not imported or named. A backend is a module that fits the
`Backend` protocol and is registered, under its framework's import root, in the entry-point group `cgshim.backends`;
cgshim's own four have no privileges over a stranger's.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cgshim._errors import BackendError, describe, sentence

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from cgshim._call import Call

F = TypeVar("F", bound=Callable[..., Any])

Tensor = Any
"""A tensor of whichever framework: an array, a tracer, a Variable, a Parameter, a box."""

ENVIRONMENT_VARIABLE = "CGSHIM_BACKEND"
# os.environ encodes the name anew whenever it is asked, which would be a tenth of a call without gradients
_environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_KEY = os.environ.encodekey(ENVIRONMENT_VARIABLE)


class Backend(Protocol):
    """What a plug-in module offers: eight functions, and no knowledge of how a rule is written."""

    __name__: str

    def is_tensor(self, x: object, /) -> bool:
        """Whether x is a tensor of the framework, and so takes part in differentiation."""
        ...

    def tree_flatten(self, tree: Any, /) -> tuple[list[Any], Any]:
        """The leaves of tree and its structure; None is a leaf, and dicts go by sorted key."""
        ...

    def tree_unflatten(self, structure: Any, leaves: Sequence[Any], /) -> Any:
        """The inverse of tree_flatten."""

    def convert_to_tensor(self, x: Any, /, dtype: Any = None) -> Tensor:
        """x (tensor, NumPy array, number, nested list) as a tensor, cast to dtype (the framework's, or its name)."""

    def convert_to_numpy(self, x: Tensor, /) -> Any:
        """x as a NumPy array, detached from whatever is being differentiated."""

    def stop_gradient(self, x: Tensor, /) -> Tensor:
        """x as a constant."""

    def custom_gradient(self, call: Call, inputs: Sequence[Tensor], /) -> Sequence[Tensor]:
        """`call(inputs)`'s outputs, made so that their gradients come from the rule that `call` returns with them.

        `call(inputs) -> (outputs, rule)` runs the author's f; `rule(inputs, upstreams, variables)` gives
        `(gradients, variable_gradients)`, both already checked, None where there is no gradient.
        """
        ...

    def vjp(
        self, fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /
    ) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor | None]]]:
        """fn's outputs at inputs, and the function from upstream gradients to gradients of inputs."""
        ...


# --- Which backends there are -----------------------------------------------------------------------------------


@functools.cache
def entry_points() -> dict[str, EntryPoint]:
    """Every registered backend by its name; none of them is imported."""
    from importlib.metadata import entry_points as installed  # 20 ms, and most programs name or import one framework

    return {point.name: point for point in sorted(installed(group="cgshim.backends"), key=lambda p: p.name)}


@functools.cache
def _aliases() -> dict[str, str]:
    from importlib.metadata import entry_points as installed

    return {point.name: point.value for point in installed(group="cgshim.aliases")}


def available_backends() -> list[str]:
    """The names of the registered backends whose framework can be imported here.

    Returns
    -------
    list of str
        Sorted; nothing is imported to find them.

    Examples
    --------
    >>> "numpy" in available_backends()
    True
    """
    return [name for name in entry_points() if importlib.util.find_spec(name) is not None]


def constant_when_traced(function: F) -> F:
    """Mark a function that torch.compile shall call as it traces, and whose result it shall take for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler reads
    function.autograph_info__ = {}  # type: ignore[attr-defined]  # and AutoGraph, which then does not convert it
    return function


def load(name: str) -> Backend:
    """The backend called name, imported; a BackendError says what is missing, and whose it is."""
    backend: Any = sys.modules[_import(name)]
    return backend  # type: ignore[no-any-return]


_modules: dict[str, str] = {}


@constant_when_traced
def _import(name: str) -> str:
    """Import the backend called name, once; the name of its module."""
    try:
        return _modules[name]
    except KeyError:
        pass
    point = entry_points().get(name)
    if point is None:
        raise BackendError(_unknown(name))
    try:
        return _modules.setdefault(name, point.load().__name__)
    except Exception as error:  # a plug-in is a stranger's code: whatever it raises is its own fault, by name
        raise BackendError(_broken(name, point, error)) from error


def _unknown(name: str) -> str:
    if not entry_points():
        return sentence(
            "cgshim", "backends are found by the metadata of installed distributions", "none at all",
            "run pip install -e . (or pip install cgshim) in this environment",
        )  # fmt: skip
    here = available_backends()
    missing = [f"{n} (pip install {_distribution(n)})" for n in entry_points() if n not in here]
    could = f"; could be installed: {', '.join(missing)}" if missing else ""
    return sentence("cgshim", "a backend is named by its framework's import root", repr(name),
                    f"installed: {', '.join(here)}{could}")  # fmt: skip


def _distribution(name: str) -> str:
    """What to install for a backend's framework to come along."""
    dist = entry_points()[name].dist
    return f"'cgshim[{name}]'" if dist is None or dist.name == "cgshim" else dist.name


def _broken(name: str, point: EntryPoint, error: Exception) -> str:
    owner = point.dist.name if point.dist else "an unknown distribution"
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name == name and owner == "cgshim":
        return sentence("cgshim", f"the backend {name!r} needs its framework", what,
                        f"run pip install 'cgshim[{name}]'")  # fmt: skip
    return sentence("cgshim", f"the backend {name!r} of {owner} must import", what, f"mend or uninstall {owner}")


# --- Choosing one by name ---------------------------------------------------------------------------------------

_of_process: str | None = None
_of_context: contextvars.ContextVar[str | None] = contextvars.ContextVar("cgshim_backend", default=None)


@constant_when_traced
def config_backend() -> str | None:
    """The name of the chosen backend, or None where the inputs' types decide.

    Returns
    -------
    str or None
        What `use_backend` names in this context, else `set_backend`, else the environment variable CGSHIM_BACKEND.

    Examples
    --------
    >>> with use_backend("numpy"):
    ...     config_backend()
    'numpy'
    """
    return _of_context.get() or _of_process or (_KEY in _environment and os.environ[ENVIRONMENT_VARIABLE]) or None


def chosen_by() -> str:
    """What made the choice that config_backend returns, for people to read."""
    if _of_context.get():
        return "use_backend"
    if _of_process:
        return "set_backend"
    return ENVIRONMENT_VARIABLE if os.environ.get(ENVIRONMENT_VARIABLE) else "the inputs' types"


def set_backend(name: str | None, /) -> None:
    """Choose the backend of every call in this process; None hands the choice back.

    Parameters
    ----------
    name : str or None
        A framework's import root, such as "jax".

    Raises
    ------
    BackendError
        Where there is no such backend, or its framework cannot be imported.

    Examples
    --------
    >>> set_backend("numpy")
    >>> config_backend()
    'numpy'
    >>> set_backend(None)
    """
    global _of_process
    if name is not None:
        load(name)
    _of_process = name


@contextlib.contextmanager
def use_backend(name: str, /) -> Iterator[None]:
    """Choose the backend of the calls within a `with` block, in this thread or task alone.

    Parameters
    ----------
    name : str
        A framework's import root, such as "jax".

    Raises
    ------
    BackendError
        Where there is no such backend, or its framework cannot be imported.

    Examples
    --------
    >>> with use_backend("numpy"):
    ...     config_backend()
    'numpy'
    """
    load(name)
    token = _of_context.set(name)
    try:
        yield
    finally:
        _of_context.reset(token)


# --- Finding one by the types of the inputs ---------------------------------------------------------------------

_KERAS = "keras"  # not a framework: its Variables stand for the tensors that they hold

_owners: dict[type, str | None] = {}
_owners_of_dynamic: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


@constant_when_traced
def owner(kind: type) -> str | None:
    """The name of the backend whose framework kind belongs to, subclasses and tracers included."""
    try:
        return _owners[kind]
    except KeyError:
        return _remembered_owner(kind)


def _remembered_owner(kind: type) -> str | None:
    if kind not in _owners_of_dynamic:
        remembered = _owners if _is_of_module(kind) else _owners_of_dynamic
        remembered[kind] = _find_owner(kind)
        return remembered[kind]
    return _owners_of_dynamic[kind]


def _is_of_module(kind: type) -> bool:
    """Whether a class is found in a module under its name; any other may be made in a loop, and is not kept alive."""
    if kind.__module__ == "builtins":  # where not all can be found, functions for one
        return True
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # and no __getattr__ of a module, which may warn
    return found is kind


def _find_owner(kind: type) -> str | None:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root == _KERAS and base.__name__ in ("Variable", "KerasVariable"):
            return _KERAS
        name = _aliases().get(root, root)
        if name in entry_points() and root in sys.modules:
            return name
    return None


def unwrap(leaf: Any) -> Any:
    """A Keras Variable is its value; everything else is itself."""
    return leaf.value if owner(type(leaf)) == _KERAS else leaf


def is_numpy_array(leaf: object) -> bool:
    """Whether leaf is a plain NumPy array or scalar of numbers (an autograd box is not)."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, (numpy.ndarray, numpy.generic)) and load("numpy").is_tensor(leaf)


def framework_of(leaf: Any) -> str | None:
    """The name of the backend whose tensor leaf is, or a Keras Variable holds; None where it is no tensor."""
    name = owner(type(leaf))
    if name is None:
        return None
    if name == _KERAS:
        return framework_of(leaf.value)
    return name if load(name).is_tensor(leaf) else None


def select(arguments: Sequence[Any]) -> Backend | None:
    """The backend of a call: the chosen one, or the one whose tensors the arguments hold; None where they hold none."""
    name = config_backend() or _first(arguments) or _first_within(arguments) or _first_registered(arguments)
    return None if name is None else load(name)


def backend_of(values: Sequence[Any]) -> Backend:
    """The backend of a call, and NumPy's where neither a choice nor a tensor tells."""
    return select(values) or load("numpy")


def _first(leaves: Iterable[Any]) -> str | None:
    """The first framework among the leaves; NumPy's arrays are everybody's constants, so NumPy comes last."""
    found = None
    for leaf in leaves:
        name = framework_of(leaf)
        if name == "numpy":
            found = name
        elif name is not None:
            return name
    return found


def _first_within(tree: Any) -> str | None:
    """The first framework among the leaves of a tree: what follows it in a list or tuple need not be looked at."""
    if type(tree) not in (list, tuple):
        return _first(_leaves(tree))
    found = None
    for branch in tree:
        name = _first_within(branch)
        if name not in (None, "numpy"):
            return name
        found = name or found
    return found


def _leaves(tree: Any) -> list[Any]:
    """The leaves of a tree; torch.compile cannot trace optree, so that lists, tuples and dicts do without it."""
    if type(tree) in (list, tuple):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    if type(tree) is dict:
        return [leaf for key in tree for leaf in _leaves(tree[key])]
    if type(tree) in NO_CONTAINERS or framework_of(tree) is not None:
        return [tree]
    import optree

    return optree.tree_leaves(tree, none_is_leaf=True)


NO_CONTAINERS = {type(None), bool, int, float, complex, str, bytes}


def _first_registered(arguments: Sequence[Any]) -> str | None:
    """The framework that finds a tensor in a container which only its own tree registry knows."""
    if all(type(leaf) in NO_CONTAINERS for leaf in _leaves(arguments)):
        return None
    imported = [name for name in entry_points() if name in sys.modules and _loads(name)]
    return next((name for name in imported if _first(load(name).tree_flatten(arguments)[0]) == name), None)


def _loads(name: str) -> bool:
    try:
        load(name)
    except BackendError:  # its author's matter, until somebody asks for it
        return False
    return True


def mixed(op: str, backend: Backend, leaf: object) -> BackendError:
    """The error for a tensor of one framework in a call of another."""
    name = name_of(backend)
    named = f"{chosen_by()} chooses {name}" if config_backend() else f"other tensors of this call are {name}'s"
    return BackendError(
        sentence(op, f"tensors of one call belong to one framework ({named})",
                 f"{describe(leaf)} of {framework_of(leaf)}", f"convert it to {name} or choose another backend")
    )  # fmt: skip


@constant_when_traced
def name_of(backend: Backend) -> str:
    """The name under which a loaded backend is registered."""
    return next(name for name, module in _modules.items() if module == backend.__name__)
