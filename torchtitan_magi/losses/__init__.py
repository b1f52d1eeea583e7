"""Log-probabilities, preference losses, weights of tokens."""
