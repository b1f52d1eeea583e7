"""Who owns which tokens, which rows travel, and in which stages."""
