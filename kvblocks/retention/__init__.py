"""What stays cached, beyond the order of use: pins, and quotas of tenants."""
