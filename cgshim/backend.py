"""What a backend is written with: see docs/writing-a-backend.md."""

from cgshim._backend import Backend as Backend
from cgshim._call import Call as Call
from cgshim._closure import lift as lift
from cgshim._convention import Rule as Rule
from cgshim._generators import Generator as Generator
from cgshim._residuals import Residuals as Residuals
from cgshim._residuals import has_a_derivative as has_a_derivative
from cgshim._residuals import refuse_another_run as refuse_another_run
from cgshim._residuals import refuse_hidden as refuse_hidden
from cgshim._residuals import run_again as run_again
from cgshim._scope import RuleScope as RuleScope
