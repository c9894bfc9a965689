"""The device side of `decode`, `extend` and `prefix_decode`: Triton functions and kernels that those modules launch."""
