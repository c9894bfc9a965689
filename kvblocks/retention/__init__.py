"""What stays cached, beyond the order of last use: pins, quotas of tenants, holds, eviction policies, sessions."""
