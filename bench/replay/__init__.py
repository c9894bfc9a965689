"""The benefit of policies on workloads, as hit rates, not times."""
