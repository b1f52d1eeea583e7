"""What attends to what: lists of slices, and the arithmetic of ranges."""
