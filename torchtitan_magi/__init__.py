"""Varlen context parallelism for torchtitan: packed documents over the ranks of a context-parallel mesh."""
