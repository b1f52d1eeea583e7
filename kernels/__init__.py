"""CUDA sources of the FFA kernel (`.cu`, `.cuh`), compiled at first use by `torchtitan_magi.cuda.jit`."""
