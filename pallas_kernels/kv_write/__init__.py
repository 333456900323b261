"""Writing new keys and values into the paged pool."""

from jaxengine.pallas_kernels.kv_write.reference import kv_write as kv_write
