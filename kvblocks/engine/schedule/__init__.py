"""Scheduling: requests, the scheduler, and the orders of admission. Needs no torch, only the block manager."""
