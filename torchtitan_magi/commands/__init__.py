"""What commands have in common, and those that are of no other wing."""
