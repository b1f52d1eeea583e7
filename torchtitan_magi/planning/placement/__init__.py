"""Which tokens each context-parallel rank owns."""
