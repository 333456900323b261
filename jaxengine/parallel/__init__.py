"""Expert parallelism, and the two microbatches of dual-batch overlap."""
