"""A model that gives log-probabilities of targets in place of logits."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchtitan_magi.losses.logprobs import LogitCap, summed_logprobs, token_logprobs
from torchtitan_magi.training.batches.microbatch import LocalBatch
from torchtitan_magi.training.process.groups import Group

# hidden [b * s, d], weight, the group that shares the vocabulary -> what the output layer returns
OfOutput = Callable[[Tensor, Tensor, Group], Tensor]


class LogprobModel:
    """Calls the model with its output layer replaced by ``token_logprobs``.

    Only the layer's ``forward`` is replaced, so that its parameter keeps its name, and the hooks of FSDP2 and of tensor
    parallelism stay: when it runs, the weight is gathered by FSDP2, and tensor parallelism has made hidden a replicated
    DTensor. What it returns is replicated as well, which is what its hooks pass on with
    ``parallelism.disable_loss_parallel``.

    Args:
        model: parallelized.
        compiled: as for ``token_logprobs``.

    Raises:
        ValueError: the output layer is neither a plain linear one nor has a ``logit_cap``, or its vocabulary does not
            divide by the TP degree.
    """

    def __init__(self, model: Any, compiled: bool = False) -> None:
        name, how = "output", "quantize.linear.float8.filter_fqns"  # torchtitan 0.2
        if not hasattr(model, name):
            name, how = "lm_head", "its converter's filter_fqns"
        output = getattr(model, name)
        cap: LogitCap | None = getattr(output, "logit_cap", None)
        if (cap is None and type(output).forward is not nn.Linear.forward) or output.bias is not None:
            raise ValueError(
                f"the model's output layer is {type(output).__name__}, but log-probabilities need a plain nn.Linear; "
                f'keep model converters from it, for float8 by {how} = ["{name}"]'
            )
        weight = output.weight
        if isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()):
            size = weight.device_mesh["tp"].size()
            if len(weight) % size:
                raise ValueError(
                    f"parallelism.tensor_parallel_degree is {size}, which does not divide the vocabulary of "
                    f"{len(weight)} tokens; use a degree that does"
                )
        self.model, self.output, self.compiled, self.cap = model, output, compiled, cap
        self.parts = [model]
        self.of_output: OfOutput | None = None
        output.forward = self._output

    def __call__(self, batch: LocalBatch) -> Tensor:
        """float32 [b, s]: log p(label) of each token, 0 where there is none. The output layer runs for the labelled."""
        targets, labelled = batch.labels, batch.labelled

        def logprobs(hidden: Tensor, weight: Tensor, group: Group) -> Tensor:
            hidden, some = hidden.index_select(0, labelled), targets.flatten().index_select(0, labelled)
            values = token_logprobs(hidden, weight, some, group, compiled=self.compiled, cap=self.cap)
            return values.new_zeros(targets.numel()).index_copy(0, labelled, values)

        return self._run(logprobs, batch).view(targets.shape)  # here: FSDP2 warns of views among a module's outputs

    def summed(self, batch: LocalBatch, scale: Tensor | None, kept: Tensor | None = None) -> Tensor:
        """The sum of log-probabilities, each times its ``scale`` (float [b, s], no gradient) if given; float32, 0-d.

        kept: float32 [n], gets the log-probabilities of the labelled tokens.
        """
        labelled = batch.labelled

        def total(hidden: Tensor, weight: Tensor, group: Group) -> Tensor:
            hidden, targets = hidden.index_select(0, labelled), batch.labels.flatten().index_select(0, labelled)
            scales = None if scale is None else scale.flatten().index_select(0, labelled)
            return summed_logprobs(hidden, weight, targets, scales, group, None, self.compiled, kept, self.cap)

        return self._run(total, batch)

    def _run(self, of_output: OfOutput, batch: LocalBatch) -> Tensor:
        self.of_output = of_output
        try:
            result = self.model(batch.tokens, **batch.model_inputs)
            return result.to_local() if isinstance(result, DTensor) else result  # by torchtitan 0.2 it is local already
        finally:
            self.of_output = None

    def _output(self, hidden: Tensor) -> Tensor:
        """forward of the output layer: of hidden [b, s, d], what was asked for."""
        assert self.of_output is not None
        weight, mesh = self.output.weight, None
        if isinstance(hidden, DTensor):
            mesh = hidden.device_mesh
            # Each rank's share of the vocabulary adds to the gradient of hidden.
            hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()
        result = self.of_output(hidden.flatten(0, 1), weight, None if mesh is None else mesh.get_group())
        return result if mesh is None else DTensor.from_local(result, mesh, [Replicate()], run_check=False)
