"""One command for a GPU that is lent for minutes: `python -m bench.gpu_session --out DIR --minutes 9.3`.

`session` runs items one after another, and `results` keeps what they found. `items` says which there are.
"""
