"""Scheduling: requests, the scheduler, and the orders of admission. Needs the core only."""
