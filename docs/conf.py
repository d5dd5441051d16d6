"""The site: README.md is its front page, docs/ its pages, and the docstrings its reference (`nox -s
docs`).

The source folder is the checkout, so that every relative link means the same on GitHub and on the
site. A link to a file that is no page (an example, the licence) is a download. Comments, which
Markdown does not show, mark the parts for the site only (tabs, columns) and the parts that the site
leaves out.
"""

import re
import shutil
from pathlib import Path

import tomllib
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import cgshim.ops

URLS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["urls"]

project = "cgshim"
copyright = "the authors of cgshim, Apache License 2.0"
html_title = "cgshim"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/*/README.md"]
exclude_patterns = [".*", "site", "build", "dist", "benchmarks", "tests"]

default_role = "py:obj"
nitpicky = True  # a name in a docstring that does not exist is a warning, and warnings are errors
# Python's types and private ones in signatures
nitpick_ignore_regex = [("py:class", r"(?!cgshim\.).*|.*\._.*")]
myst_heading_anchors = 4
myst_enable_extensions = ["linkify", "colon_fence"]
myst_linkify_fuzzy_links = False  # README.md is no address in Moldova
python_maximum_signature_line_length = 1000  # the browser breaks the lines
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
napoleon_use_param = False
napoleon_use_rtype = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
if "Source" in URLS:
    html_theme_options = {
        "source_repository": URLS["Source"],
        "source_branch": "main",
        "source_directory": "",
    }

NAVIGATION = """
```{toctree}
:hidden:
:caption: Start

docs/install
docs/learn
docs/porting
examples/porting/README
docs/library-authors
```
```{toctree}
:hidden:
:caption: Guide

docs/cookbook
docs/published
docs/adopted
docs/rules
docs/transformations
docs/versions
docs/performance
docs/glossary
```
```{toctree}
:hidden:
:caption: Reference

docs/reference/cgshim
docs/reference/ops
docs/ops
docs/reference/testing
```
```{toctree}
:hidden:
:caption: Backends
:glob:

docs/writing-a-backend
docs/reference/backend
examples/cgshim-*/README
```
```{toctree}
:hidden:
:caption: Project

CHANGELOG
CONTRIBUTING
CODE_OF_CONDUCT
SECURITY
```
"""


TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->\n", re.MULTILINE | re.DOTALL)
TAB = re.compile(r"^(?:## |\*\*)(\w+)(?:\*\*)?\n", re.MULTILINE)
COLUMNS = re.compile(r"^```python\n(.*?)^```\n\n```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
NOT_ON_THE_SITE = re.compile(
    r"^<!-- not on the site -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL
)


def for_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Write the directives that GitHub would print as text: tabs, columns, and the navigation."""
    text = NOT_ON_THE_SITE.sub("", source[0])
    if docname in ("docs/porting", "examples/porting/README"):
        text = COLUMNS.sub(two_columns, text)
    source[0] = TABS.sub(tab_set, text) + (NAVIGATION if docname == root_doc else "")


def tab_set(marked: re.Match[str]) -> str:
    """Return the tabs of what is between the comments: a heading, or a line in bold type, begins
    each.
    """
    _, *parts = TAB.split(marked[1])
    tabs = [
        f":::::{{tab-item}} {label}\n:sync: {label}\n{text}:::::\n"
        for label, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return "\n".join(["::::::{tab-set}", ":sync-group: framework", "", *tabs, "::::::", ""])


def two_columns(pair: re.Match[str]) -> str:
    """Return two blocks of code side by side."""
    blocks = [
        f":::{{grid-item}}\n```{{code-block}} python\n:caption: {title}\n\n{code}```\n:::\n"
        for title, code in zip(("by hand", "cgshim"), pair.groups(), strict=True)
    ]
    return "\n".join(
        ["::::{grid} 1 1 2 2", ":class-container: columns", ":gutter: 1", "", *blocks, "::::", ""]
    )


def without_modules(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leave the names of modules out of the types in a signature."""
    return tuple(re.sub(r"~(\w+\.)*", "", text) if text else text for text in (signature, returned))


def types_of_backends(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show types where backends are written; elsewhere almost all of them are Any, and overloads
    hide the call.
    """
    app.config.autodoc_typehints = "signature" if docname == "docs/reference/backend" else "none"


class ListedFunctions(SphinxTransform):
    """Make each function listed in docs/ops.md a target: `cgshim.ops.sin` links to it."""

    default_priority = 500

    def apply(self) -> None:
        if self.env.docname != "docs/ops":
            return
        for paragraph in self.document.findall(nodes.paragraph):
            if not paragraph.astext().startswith("On numpy"):
                continue
            for literal in paragraph.findall(nodes.literal):
                name = literal.astext()
                if name not in vars(cgshim.ops):
                    place = f"cgshim.ops.{name}"
                    literal["ids"].append(place)
                    self.env.domains.python_domain.note_object(
                        place, "function", place, location=literal
                    )


def add_index(app: Sphinx, exception: Exception | None) -> None:
    """Serve the front page at the site's address."""
    if not exception and app.builder.format == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", for_the_site)
    app.connect("source-read", types_of_backends)
    app.connect("autodoc-process-signature", without_modules)
    app.connect("build-finished", add_index)
    app.add_transform(ListedFunctions)
