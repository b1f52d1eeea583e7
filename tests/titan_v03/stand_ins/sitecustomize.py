"""Names that torchtitan 0.3 imports and torch 2.11 lacks: with this folder first in PYTHONPATH, 0.3 runs with it.

For tests on machines that have no newer torch; the package knows nothing of it. Python imports this file when it
starts. What the names stand for is not made up for: spmd_backend = "partial_dtensor" asks for none of it, and expert
parallelism, which does, fails.
"""

try:
    import torch.distributed.fsdp
    from torch.distributed.fsdp._fully_shard import _fsdp_common
except ImportError:  # an interpreter without torch
    pass
else:
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        _fsdp_common.ShardPlacementResult = type("ShardPlacementResult", (), {})
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        torch.compiler._is_non_strict_tracing = lambda: False
