"""What the installed distributions register with cgshim: backends, and import roots that belong to
one.

importlib.metadata raises an error for all if one distribution has an entry point that it cannot
read. Here each is read for itself. What is wrong with it is kept as a refusal, sentence, for
whoever asks for that name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import operator
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from cgshim._errors import listing, refusal, sentence

if TYPE_CHECKING:
    from importlib.metadata import Distribution

BACKENDS, ALIASES = "cgshim.backends", "cgshim.aliases"
RESERVED = {*sys.stdlib_module_names, "__main__", "cgshim"}
"""import roots whose types no framework may claim: every call has some among its arguments"""


class Entry(NamedTuple):
    """A line `name = value` in the entry points of a distribution."""

    group: str
    name: str
    value: str
    owner: str
    dist: Distribution
    fault: str | None = None
    """a sentence; what has a fault is not used"""

    @property
    def is_own(self) -> bool:
        """True if it is cgshim's, which no other may replace."""
        return normalized(self.owner) == "cgshim"


class Registered(NamedTuple):
    """All that is registered."""

    backends: dict[str, Entry]
    """by the framework's import root, sorted; one with a fault cannot be loaded"""
    aliases: dict[str, str]
    """the backend's name for each import root whose types belong to another framework"""
    ignored: list[Entry]
    """those with a fault under whose name there is no backend, or cgshim's own"""


@functools.cache
def registered() -> Registered:
    """Return what is registered here, without importing any of it."""
    entries = [_named(entry) for entry in dict.fromkeys(_entries())]
    sound = [entry for entry in entries if entry.fault is None]
    claims = [entry for entry in sound if entry.group == BACKENDS]
    backends = {
        name: _settled([e for e in claims if e.name == name])
        for name in sorted({e.name for e in claims})
    }
    aliases = [_alias(entry, sound, backends) for entry in sound if entry.group == ALIASES]
    losers = [
        _with_fault(entry, f"the backend {entry.name!r} must be cgshim's own", entry.value)
        for entry in claims
        if backends[entry.name].is_own and not entry.is_own
    ]
    ignored = [entry for entry in [*entries, *aliases, *losers] if entry.fault is not None]
    return Registered(
        backends, {entry.name: entry.value for entry in aliases if entry.fault is None}, ignored
    )


def _entries() -> Iterator[Entry]:
    """Yield the lines of cgshim's groups; of two distributions of one name the first, whose modules
    Python finds.
    """
    from importlib.metadata import distributions  # 30 ms, often not needed: most name or import one

    seen = set()
    for dist in distributions():
        try:
            text = dist.read_text("entry_points.txt") or ""
        except Exception as error:  # noqa: BLE001  # it may be any file of any distribution
            unread = Entry("", "", "", name_of_distribution(dist), dist)
            yield _with_fault(unread, "entry points must be readable", said(error))
            continue
        if "cgshim." in text and normalized(owner := name_of_distribution(dist)) not in seen:
            seen.add(normalized(owner))
            yield from _lines(owner, dist, text)


def _lines(owner: str, dist: Distribution, text: str) -> Iterator[Entry]:
    group = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            group = line.strip("[] ")
        elif group in (BACKENDS, ALIASES) and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield Entry(group, name.strip(), value.strip(), owner, dist)


# --- What may be wrong with one -------------------------------------------------------------------


def _named(entry: Entry) -> Entry:
    """Return an entry, with its fault if its name can be no framework's."""
    if entry.fault is not None:
        return entry
    if not entry.name.isidentifier():
        return _misspelled(entry)
    if entry.name in RESERVED:
        return _with_fault(
            entry, "types of Python's own modules belong to no framework", repr(entry.name)
        )
    return entry


def _settled(claims: list[Entry]) -> Entry:
    """Return the entry that has a name: cgshim's own, or else the only one, with its fault if there
    is one.
    """
    entry = next((entry for entry in claims if entry.is_own), claims[0])
    if len(claims) > 1 and not entry.is_own:
        return _claimed_twice(f"the backend {entry.name!r}", claims)
    return (
        entry
        if re.fullmatch(r"\w+(\.\w+)*(\s*:\s*\w+(\.\w+)*)?", entry.value)
        else _misspelled(entry)
    )


def _alias(entry: Entry, sound: list[Entry], backends: dict[str, Entry]) -> Entry:
    """Return an alias, with its fault if it leads to no backend, or if others claim its root."""
    claims = [e for e in sound if (e.group, e.name) == (ALIASES, entry.name)]
    if entry.value not in backends:
        return _with_fault(
            entry, f"an alias ({entry.name}) must be that of a backend", repr(entry.value)
        )
    if entry.is_own or ({e.value for e in claims} == {entry.value} and entry.name not in backends):
        return entry
    if entry.name in backends or any(e.is_own for e in claims):
        return _with_fault(
            entry, f"types of {entry.name} have a backend already", f"an alias for {entry.value!r}"
        )
    return _claimed_twice(f"the alias {entry.name!r}", claims)


def _misspelled(entry: Entry) -> Entry:
    line = f"{entry.name} = {entry.value}".strip()
    return _with_fault(entry, f"{entry.group} must read import_root = module", repr(line))


def _claimed_twice(what: str, claims: list[Entry]) -> Entry:
    owners = listing(sorted(f"{entry.value} of {entry.owner}" for entry in claims))
    fault = sentence(
        "cgshim", must=f"{what} must be registered once", got=owners, do="uninstall all but one"
    )
    return claims[0]._replace(fault=fault)


def _with_fault(entry: Entry, must: str, got: str) -> Entry:
    do = f"mend or uninstall {entry.owner}"
    return entry._replace(fault=sentence("cgshim", must=must, got=f"{got} of {entry.owner}", do=do))


def said(error: BaseException) -> str:
    """Return an error's class and message, in one line."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # noqa: BLE001  # the message is others' code, too
        return type(error).__name__


# --- Distributions --------------------------------------------------------------------------------


def name_of_distribution(dist: Distribution) -> str:
    """Return the name of a distribution, from the name of its folder if its metadata tell none."""
    with contextlib.suppress(Exception):
        if name := dist.metadata["Name"]:
            return name
    folder = getattr(dist, "_path", None)  # nothing public tells it
    return (
        "an unknown distribution"
        if folder is None
        else folder.name.partition("-")[0].partition(".")[0]
    )


def normalized(name: str) -> str:
    """Return a distribution's name in the spelling that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_of(entry: Entry) -> tuple[str, bool]:
    """Return what its distribution requires of a framework, such as "torch>=2.6", and True if this
    is an extra.

    It is an extra that is named as the backend, or else a requirement that is named as the
    framework's import root; "" if the metadata have neither.
    """
    found: list[tuple[str, bool]] = []
    with contextlib.suppress(Exception):
        for requirement, _, marker in [line.partition(";") for line in entry.dist.requires or ()]:
            extra = re.search(r"""\bextra\s*==\s*["']([\w.-]+)["']""", marker)
            named = extra[1] if extra else project_of(requirement)
            is_extra = "extra" in marker
            if normalized(named) == normalized(entry.name) and is_extra == (extra is not None):
                found.append((requirement.strip(), is_extra))
    return max(found, key=operator.itemgetter(1), default=("", False))


def project_of(requirement: str) -> str:
    """Return the name of the distribution that a requirement such as "torch>=2.6" asks for."""
    return re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]


def command_to_install(entry: Entry) -> str:
    """Return the command that installs the framework of a backend; "" if the metadata of its owner
    do not tell.
    """
    requirement, is_extra = requirement_of(entry)
    if is_extra:
        return f"pip install '{entry.owner}[{entry.name}]'"
    return f"pip install '{requirement}'" if requirement else ""


def is_importable(root: str) -> bool:
    """Return True if an import root is imported, or can be found; nothing is imported for this."""
    try:
        return sys.modules.get(root) is not None or importlib.util.find_spec(root) is not None
    except Exception:  # noqa: BLE001  # others' finders
        return False


def own_version() -> str:
    """Return cgshim's version: pyproject.toml has it, and installing copies it into the metadata.

    Raises
    ------
    AttributeError
        If cgshim is not installed, or its metadata do not tell.
    """
    from importlib.metadata import version

    with contextlib.suppress(Exception):
        if installed := version("cgshim"):
            return installed
    raise refusal(AttributeError, "cgshim.__version__",
                  must="the version is read from the metadata of the installed distribution",
                  got="none", do="run pip install -e . (or pip install cgshim) in this environment")  # fmt: skip
