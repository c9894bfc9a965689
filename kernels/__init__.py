"""Operations on paged K and V caches.

They take tensors and nothing else, so that any engine can call them. `reference` holds them in plain torch. The Triton
kernels are `store`, `decode`, `extend`, `prefix_decode` with `cascade` (requests that share blocks), `rows`
(the operations between matrix products and attention), and `copy` (blocks within the cache, and to and from one staging
buffer). `oracle` says what they must compute. `device` holds what `decode`, `extend` and `prefix_decode` launch.
Importing this package needs no triton. Importing one of the modules with Triton kernels does.

A cache of K or of V has the shape [num_blocks, block_size, num_kv_heads, head_dim]. The slot of a token is
`block_id * block_size + offset`: its row when the first two dimensions are read as one.
"""
