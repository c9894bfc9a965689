"""Layers, such as linear attention, that keep one state per sequence instead of K and V for each token.

`kind` describes such layers. `checkpoint` is a copy of a state in blocks of the pool, and where it is found, while
`live` is a sequence's own state, which its slot holds. `copies` says what the engine has to copy. The rules are in
`kvblocks.states`.
"""
