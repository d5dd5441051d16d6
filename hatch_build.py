"""README.md for a package index, where relative links lead nowhere: they get the address of the
repository.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def for_an_index(text: str, source: str | None) -> str:
    """Return the text with absolute links to files and pictures of the repository; unchanged if it
    has no address.
    """
    if source is None:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?![\w+.-]+:|#)", rf"\1{source}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?![\w+.-]+:|#)", rf"\1{source}/blob/main/", text)


class CustomMetadataHook(MetadataHookInterface):
    """The readme among the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata.get("urls", {}).get("Source")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text, source)}
