"""Mixture of experts: routing, permutation, grouped matrix products, combination."""

from jaxengine.pallas_kernels.moe.api import grouped_matmul as grouped_matmul
from jaxengine.pallas_kernels.moe.api import moe_mlp as moe_mlp
from jaxengine.pallas_kernels.moe.config import MoeConfig as MoeConfig
from jaxengine.pallas_kernels.moe.routing import Dispatch as Dispatch
from jaxengine.pallas_kernels.moe.routing import combine as combine
from jaxengine.pallas_kernels.moe.routing import dispatch as dispatch
from jaxengine.pallas_kernels.moe.routing import route as route
