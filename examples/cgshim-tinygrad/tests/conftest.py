"""tinygrad's CPU device compiles each kernel with clang; its emulator in Python needs nothing, and
small tensors.
"""

import os

os.environ.setdefault("DEV", "PYTHON")  # before tinygrad is imported
