"""Context-parallel attention of a layer: its ops, the plan bound to a device, tokens to their ranks and back."""
