"""Benches of the integration into mlx-lm. They run in its environment: .venv-mlx/bin/python -m bench.mlx"""
