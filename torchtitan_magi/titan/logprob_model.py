"""A torchtitan model that gives log-probabilities of targets in place of logits."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchtitan_magi.logprobs import token_logprobs


class LogprobModel:
    """Calls the model with its output layer replaced by ``token_logprobs``.

    Only the layer's ``forward`` is replaced, so that its parameter keeps its name, and the hooks of FSDP2 and of tensor
    parallelism stay: when it runs, the weight is gathered by FSDP2, and tensor parallelism has made hidden a replicated
    DTensor. What it returns is replicated as well, which is what its hooks pass on with
    ``parallelism.disable_loss_parallel``.

    Args:
        model: parallelized.

    Raises:
        ValueError: the output layer is not a plain linear one, or its vocabulary does not divide by the TP degree.
    """

    def __init__(self, model: Any) -> None:
        output = model.output
        if type(output).forward is not nn.Linear.forward or output.bias is not None:
            raise ValueError(
                f"the model's output layer is {type(output).__name__}, but log-probabilities need a plain nn.Linear; "
                'keep model.converters from it, for float8 by quantize.linear.float8.filter_fqns = ["output"]'
            )
        weight = output.weight
        if isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()):
            size = weight.device_mesh["tp"].size()
            if len(weight) % size:
                raise ValueError(
                    f"parallelism.tensor_parallel_degree is {size}, which does not divide the vocabulary of "
                    f"{len(weight)} tokens; use a degree that does"
                )
        self.model, self.output = model, output
        self.targets: Tensor | None = None
        self.labelled: Tensor | None = None
        output.forward = self._logprobs

    def __call__(self, targets: Tensor, tokens: Tensor, labelled: Tensor | None = None, **inputs: Any) -> Tensor:
        """Log-probabilities of the targets.

        Args:
            targets, tokens: int64 [b, s].
            labelled: int64 [n], numbers of the tokens that have a target, of b * s; None if nobody has counted them.
                The output layer runs for these only.

        Returns:
            float32 [b, s]: log p(target), 0 where there is none.
        """
        self.targets, self.labelled = targets, labelled
        logprobs = self.model(tokens, **inputs)
        self.targets = self.labelled = None
        return logprobs

    def _logprobs(self, hidden: Tensor) -> Tensor:
        """forward of the output layer: hidden [b, s, d] -> [b, s]."""
        assert self.targets is not None
        weight, mesh = self.output.weight, None
        if isinstance(hidden, DTensor):
            mesh = hidden.device_mesh
            # Each rank's share of the vocabulary adds to the gradient of hidden.
            hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()
        group = None if mesh is None else mesh.get_group()
        hidden, targets, labelled = hidden.flatten(0, 1), self.targets.flatten(), self.labelled
        if labelled is None:
            logprobs = token_logprobs(hidden, weight, targets, group)
        else:
            some = token_logprobs(hidden.index_select(0, labelled), weight, targets.index_select(0, labelled), group)
            logprobs = some.new_zeros(len(targets)).index_copy(0, labelled, some)
        logprobs = logprobs.view(self.targets.shape)
        return logprobs if mesh is None else DTensor.from_local(logprobs, mesh, [Replicate()], run_check=False)
