"""Where blocks are kept: host memory first, then stores behind it."""
