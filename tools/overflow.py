"""python overflow.py site: fail if a page is wider than the screen of a phone or of a computer.

Chromium opens a page which holds each page of the site in a frame of each width, and measures it.
Where there is no Chromium, the script prints that it has not run.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

WIDTHS = (390, 1280)
MEASURE = """
<pre id="wide">unfinished</pre>
<script>
const measured = PAGES.flatMap(page => WIDTHS.map(width => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px";
  frame.onload = () => done([page, width, frame.contentDocument.documentElement.scrollWidth]);
  frame.src = page;
  document.body.append(frame);
})));
Promise.all(measured).then(found => {
  wide.textContent = "found " + JSON.stringify(found.filter(([page, width, needed]) => needed > width));
});
</script>
"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site, and at /measure the page that measures it."""

    def do_GET(self) -> None:
        if self.path != "/measure":
            return super().do_GET()
        pages = [
            str(path.relative_to(self.directory)) for path in Path(self.directory).rglob("*.html")
        ]
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(
            MEASURE.replace("PAGES", json.dumps(pages))
            .replace("WIDTHS", str(list(WIDTHS)))
            .encode()
        )
        return None

    def log_message(self, *args: object) -> None:
        pass


def wide_pages(browser: str, site: str) -> list[tuple[str, int, int]]:
    """The pages that need more than the width that they have: page, width, needed width."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=60000",
        "--dump-dom",
    ]
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=site)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/measure"
        dom = subprocess.run(
            [browser, *options, address], capture_output=True, text=True, timeout=120
        ).stdout
        server.shutdown()
    found = re.search(r"found (\[.*\])", dom)
    if not found:
        sys.exit("Chromium did not finish to measure the pages")
    return json.loads(found[1])


def chromium() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


def main(site: str) -> int:
    """Print the pages that are too wide, and return the exit status."""
    browser = chromium()
    if browser is None:
        print("not run: the widths of the pages, because there is no Chromium here")
        return 0
    wide = wide_pages(browser, site)
    for page, width, needed in wide:
        print(f"{page} needs {needed} pixels, and has {width}")
    if not wide:
        print("every page fits at {} and {} pixels".format(*WIDTHS))
    return bool(wide)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
