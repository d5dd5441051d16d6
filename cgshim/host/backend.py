"""What a backend's part for functions on the host may import, besides cgshim.backend."""

from cgshim.host._call import HostCall as HostCall, refuse_host_derivative as refuse_host_derivative
from cgshim.host._gradient import HostPair as HostPair
from cgshim.host._op import OnHost as OnHost
from cgshim.host._specs import Spec as Spec
