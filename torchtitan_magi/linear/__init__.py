"""Layers whose tokens pass on a state, on the placement of attention: gated delta rule and short convolution."""
