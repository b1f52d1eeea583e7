"""Attention of one stage: our kernel (`ffa`), or torch's flex_attention (`flex`)."""
