"""What is computed when: requests, the scheduler, and the orders of admission. Needs the core only."""
