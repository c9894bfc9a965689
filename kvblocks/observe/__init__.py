"""Reports for people and engines: metrics, events, why a prefix missed, what is cached, who shares blocks."""
