"""What a backend is written with: see docs/writing-a-backend.md."""

from cgshim._backend import Backend as Backend
from cgshim._call import Call as Call
from cgshim._closure import lift as lift
from cgshim._convention import Rule as Rule
