"""Gather and scatter of KV blocks, for moves between memory tiers."""

from jaxengine.pallas_kernels.block_copy.api import gather_blocks as gather_blocks
from jaxengine.pallas_kernels.block_copy.api import scatter_blocks as scatter_blocks
