"""Multi-head latent attention (DeepSeek-V2/V3) over a paged cache of latents."""

from jaxengine.pallas_kernels.mla_attention.api import mla_attention as mla_attention
