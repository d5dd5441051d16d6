"""Print, as JSON, what is installed for a backend and what its version cannot do. Run within a
cell's environment.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib import import_module
from importlib.metadata import version

from table import PACKAGES

backend = import_module(f"cgshim_{sys.argv[2]}")
told = {
    "framework": version(PACKAGES[sys.argv[1]]),
    "numpy": version("numpy"),
    "python": platform.python_version(),
    "limits": list(getattr(backend, "version_limits", list)()),
}
print(json.dumps(told))
