"""Layers that keep one state a sequence instead of K and V for each token, such as linear attention.

`kind` describes such layers. `checkpoint` is a copy of a state in blocks of the pool, and where it is found. `live` is
a sequence's own state, which its slot holds. `copies` says what the engine has to copy. The rules are in
`kvblocks.states`.
"""
