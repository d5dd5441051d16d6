"""The repository's address, which pyproject.toml alone has, in the links of README.md on a package
index.
"""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SOURCE = "https://example.org/cgshim"
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^()\s]+)\)")


@pytest.fixture
def hook(monkeypatch):
    """hatch_build.py, in an environment that builds nothing."""
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


def test_links_lead_to_the_repository(hook):
    text = hook["for_an_index"](README, SOURCE)
    before, after = LINK.findall(README), LINK.findall(text)
    assert len(before) == len(after) > 10
    for (picture, link), (_, absolute) in zip(before, after, strict=True):
        kind = "raw" if picture else "blob"
        assert absolute == (link if re.match(r"\w+:|#", link) else f"{SOURCE}/{kind}/main/{link}")
    assert any(picture for picture, _ in before)


def test_nothing_but_links_is_changed(hook):
    text = hook["for_an_index"](README, SOURCE)
    assert re.sub(rf"{SOURCE}/(raw|blob)/main/", "", text) == README


def test_without_an_address_the_readme_is_as_it_is(hook):
    assert hook["for_an_index"](README, None) == README


@pytest.mark.parametrize("urls", [{}, {"Source": SOURCE}])
def test_the_metadata(hook, urls):
    metadata = {"urls": urls}
    hook["CustomMetadataHook"].update(SimpleNamespace(root=str(ROOT)), metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert metadata["readme"]["text"].count(SOURCE) == len(LINK.findall(README)) * len(urls)
