"""Matrix products with quantised weights."""

from jaxengine.pallas_kernels.quant_matmul.api import quant_matmul as quant_matmul
from jaxengine.pallas_kernels.quant_matmul.reference import QuantWeight as QuantWeight
from jaxengine.pallas_kernels.quant_matmul.reference import quantise as quantise
