"""What policies are worth on workloads: hit rates, not times."""
