"""What comes next: packed batches, planned ahead of their steps."""
