"""Attention kernels and decode steps on a GPU."""
