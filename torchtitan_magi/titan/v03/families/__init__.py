"""Families of models whose layers need more than our attention in torchtitan's place."""
