"""Operations on paged K and V caches.

They take only tensors, so any engine can call them. `reference` has them in plain torch. The Triton kernels are
`store`, `decode`, `extend`, `prefix_decode` with `cascade` (requests that share blocks), `rows` (the operations between
matrix products and attention), and `copy` (blocks within the cache, and to and from one staging buffer). `oracle`
defines what they must compute. `device` has the kernels that `decode`, `extend` and `prefix_decode` launch. Importing
this package needs no triton, but importing a module with Triton kernels does.

A cache of K or of V has the shape [num_blocks, block_size, num_kv_heads, head_dim]. The slot of a token is `block_id *
block_size + offset`, which is its row if the first two dimensions are merged.
"""
