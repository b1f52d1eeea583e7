"""K/V rows between ranks, and their gradients back."""
