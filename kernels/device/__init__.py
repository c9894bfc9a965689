"""What runs on the GPU of `decode`, `extend` and `prefix_decode`: Triton functions and kernels, launched from above."""
