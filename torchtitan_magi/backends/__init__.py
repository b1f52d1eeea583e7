"""Attention of one stage: our kernel, or torch's flex_attention."""
