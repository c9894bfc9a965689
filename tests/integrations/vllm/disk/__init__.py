"""Tests of the disk tier under vLLM's offloading."""
