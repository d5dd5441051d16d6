"""The site's sources: every public name has its place in the reference, every link leads
somewhere.
"""

import ast
import importlib
import re
import types
from pathlib import Path

import numpy as np
import pytest

from cgshim.ops import _algebra, _elementwise, _numpy

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
MODULES = [
    "cgshim", "cgshim.ops", "cgshim.testing", "cgshim.testing.conformance", "cgshim.backend",
    "cgshim.host.backend",
]  # fmt: skip
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")]
)


def public_names(module):
    """What it imports `as` the same name, which is how a package says that a name is public, and
    what it declares.
    """
    for node in ast.walk(ast.parse(Path(importlib.import_module(module).__file__).read_text())):
        if isinstance(node, (ast.ImportFrom, ast.Import)):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
    defined = vars(importlib.import_module(module)).items()
    yield from (name for name, value in defined if isinstance(value, _numpy.Namespace))


def places():
    """The names that stand in docs/reference, each with its module."""
    for page in sorted(REFERENCE.glob("*.rst")):
        module = ""
        for directive, name in re.findall(
            r"^\.\. (?:py:|auto)(\w+):: (\w[\w.]*)", page.read_text(), re.MULTILINE
        ):
            if directive == "module":
                module = name
            yield module if directive == "module" else f"{module}.{name}"


def listed():
    """Return the functions that docs/ops.md lists."""
    page = (ROOT / "docs" / "ops.md").read_text()
    lists = re.findall(r"^On [\w, ]+: (.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([\w.]+)`", " ".join(lists)))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_its_place_in_the_reference(module):
    elsewhere = set(public_names("cgshim")) if module != "cgshim" else set()
    names = {f"{module}.{name}" for name in set(public_names(module)) - elsewhere}
    assert names
    assert names <= set(places())


def test_every_place_in_the_reference_has_its_name():
    for place in places():
        module = max((name for name in MODULES if f"{place}.".startswith(f"{name}.")), key=len)
        assert place == module or hasattr(
            importlib.import_module(module), place.removeprefix(f"{module}.")
        ), place


def test_no_name_has_two_places():
    assert len(list(places())) == len(set(places()))


def defined(module):
    """The functions that a module defines for others."""
    for name, value in vars(module).items():
        if (
            isinstance(value, types.FunctionType)
            and value.__module__ == module.__name__
            and not name.startswith("_")
        ):
            yield name


def test_every_function_of_ops_is_listed():
    own = [name for module in (_algebra, _elementwise) for name in defined(module)]
    aliases = [name for name in _numpy._ALIASES if hasattr(np, name)]
    assert len(own) + len(aliases) > 50
    for name in [*own, *aliases]:
        assert name in listed() or name.replace("_", ".", 1) in listed(), name


def broken_links(document):
    """The relative links of a document whose file, or heading, does not exist."""
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    for link in re.findall(r"\]\(([^()\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if "://" not in link and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            yield link


def anchors(document):
    """The anchors of its headings, as GitHub and the site make them."""
    for heading in re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    assert list(broken_links(document)) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A *good* heading\n[a](#a-good-heading) [b](#none) [c](page.md) [d](gone.md) `[e](code)`\n"
    )
    assert list(broken_links(page)) == ["#none", "gone.md"]
