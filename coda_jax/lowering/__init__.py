"""How a product runs: the kernel or its XLA form, on one device or on the shards of several."""
