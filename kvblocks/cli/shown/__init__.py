"""What commands show of the cache: lines and tables."""
