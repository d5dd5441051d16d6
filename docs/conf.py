"""The site: README.md is its front page, docs/ its pages, and the docstrings its reference (`nox -s docs`).

The source folder is the checkout, so that every relative link means the same on GitHub and on the site. A link to a
file that is no page (an example, the licence) is a download.
"""

import shutil
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import cgshim.ops

project = "cgshim"
copyright = "the authors of cgshim, Apache License 2.0"
html_title = "cgshim"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/*/README.md"]
exclude_patterns = [".*", "site", "build", "dist", "benchmarks", "mutants", "tests"]

default_role = "py:obj"
nitpicky = True  # a name in a docstring that does not exist is a warning, and warnings are errors
# Python's types and private ones in signatures
nitpick_ignore_regex = [("py:class", r"(?!cgshim\.).*|.*\._.*")]
myst_heading_anchors = 4
myst_enable_extensions = ["linkify"]
myst_linkify_fuzzy_links = False  # README.md is no address in Moldova
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
napoleon_use_param = False
napoleon_use_rtype = False

html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

NAVIGATION = """
```{toctree}
:hidden:
:caption: Guide

docs/cookbook
docs/porting
docs/transformations
docs/versions
docs/performance
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
examples/*/README
```
```{toctree}
:hidden:
:caption: Project

CHANGELOG
CONTRIBUTING
```
"""


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """End the front page with the site's navigation, which GitHub would print as code."""
    if docname == root_doc:
        source[0] += NAVIGATION


class FunctionsOfTheTable(SphinxTransform):
    """Make each row of the table in docs/ops.md the place of its function: `cgshim.ops.sin` links to it."""

    default_priority = 500

    def apply(self) -> None:
        if self.env.docname != "docs/ops":
            return
        for row in self.document.findall(nodes.row):
            name = next(row.findall(nodes.literal), nodes.literal()).astext()
            if name and name not in vars(cgshim.ops):
                place = f"cgshim.ops.{name}"
                row["ids"].append(place)
                self.env.domains.python_domain.note_object(place, "function", place, location=row)


def add_index(app: Sphinx, exception: Exception | None) -> None:
    """Serve the front page at the site's address."""
    if not exception and app.builder.format == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", add_index)
    app.add_transform(FunctionsOfTheTable)
