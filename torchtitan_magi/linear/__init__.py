"""Linear attention on the placement of attention: gated delta rule and short convolution."""
