"""Our Hopper kernel, seen from the host."""
