"""cuDNN's attention over the documents of a pack, by its graph API (package nvidia-cudnn-frontend)."""

import functools
from typing import Any

import cudnn
import torch
from rivals import Case
from torch import Tensor

BF16, FLOAT, INT32, INT64 = (getattr(cudnn.data_type, name) for name in ("BFLOAT16", "FLOAT", "INT32", "INT64"))


@functools.cache
def handle() -> Any:
    return cudnn.create_handle()


class Graph:
    """A graph whose tensors are rows of the pack [tokens, heads, dim], the documents one after the other.

    Args:
        where: handle or device_property, which says for which GPU.
    """

    def __init__(self, pack: Case, **where: Any) -> None:
        self.pack = pack
        types = {"io_data_type": BF16, "intermediate_data_type": FLOAT, "compute_data_type": FLOAT}
        self.graph = cudnn.pygraph(**types, **where)
        self.tensors: dict[str, Any] = {}
        self.bound: dict[Any, Tensor] = {}  # lengths and offsets
        self.cu_seqlens = torch.tensor(pack.cu_seqlens, dtype=torch.int64)
        self.lengths = self._column("lengths", INT32, self.cu_seqlens.diff().int())

    def _column(self, name: str, data_type: Any, values: Tensor) -> Any:
        """A number for each document."""
        column = self.graph.tensor(name=name, dim=[len(values), 1, 1, 1], stride=[1] * 4, data_type=data_type)
        self.bound[column] = values.view(-1, 1, 1, 1)
        return column

    def _layout(self, heads: int, dim: int) -> dict[str, list[int]]:
        """As if the documents had one length; the offsets tell where they begin."""
        pack = self.pack
        shape = [len(pack.cu_seqlens) - 1, heads, pack.longest, dim]
        return {"dim": shape, "stride": [pack.longest * heads * dim, dim, heads * dim, 1]}

    def _offsets(self, name: str, width: int) -> Any:
        return self._column(f"{name} offsets", INT64, self.cu_seqlens * width)

    def rows(self, name: str, heads: int, dim: int, data_type: Any = BF16) -> Any:
        """An input."""
        found = self.graph.tensor(name=name, data_type=data_type, **self._layout(heads, dim))
        self.tensors[name] = found.set_ragged_offset(self._offsets(name, heads * dim))
        return self.tensors[name]

    def result(self, name: str, found: Any, heads: int, dim: int, data_type: Any = BF16) -> None:
        """Names an output."""
        layout = self._layout(heads, dim)
        found.set_output(True).set_data_type(data_type).set_dim(layout["dim"]).set_stride(layout["stride"])
        self.tensors[name] = found.set_ragged_offset(self._offsets(name, heads * dim))

    def mask(self) -> dict[str, Any]:
        """Arguments of both directions."""
        left, right = self.pack.window()
        return {
            "attn_scale": self.pack.dims[0] ** -0.5, "use_padding_mask": True, "seq_len_q": self.lengths,
            "seq_len_kv": self.lengths, "diagonal_band_left_bound": left + 1 if left >= 0 else None,
            "diagonal_band_right_bound": right if right >= 0 else None,
        }  # fmt: skip

    def build(self) -> None:
        """Chooses and compiles cuDNN's kernel."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()

    def run(self, **tensors: Tensor) -> None:
        """Executes the graph on the current stream; results are written into their tensors."""
        if next(iter(self.bound.values())).device.type != "cuda":
            self.bound = {column: values.cuda() for column, values in self.bound.items()}
        workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
        cudnn.set_stream(handle=handle(), stream=torch.cuda.current_stream().cuda_stream)
        given = {self.tensors[name]: tensor for name, tensor in tensors.items()}
        self.graph.execute(given | self.bound, workspace, handle=handle())


def forward_graph(pack: Case, **where: Any) -> Graph:
    """q, k, v to out and lse."""
    graph, (heads_q, heads_kv), (dim, value_dim) = Graph(pack, **where), pack.heads, pack.dims
    q, k, v = graph.rows("q", heads_q, dim), graph.rows("k", heads_kv, dim), graph.rows("v", heads_kv, value_dim)
    out, lse = graph.graph.sdpa(name="forward", q=q, k=k, v=v, generate_stats=True, **graph.mask())
    graph.result("out", out, heads_q, value_dim)
    graph.result("lse", lse, heads_q, 1, FLOAT)
    graph.build()
    return graph


def backward_graph(pack: Case, **where: Any) -> Graph:
    """These and dout to dq, dk, dv."""
    graph, (heads_q, heads_kv), (dim, value_dim) = Graph(pack, **where), pack.heads, pack.dims
    inputs = {
        "q": graph.rows("q", heads_q, dim), "k": graph.rows("k", heads_kv, dim),
        "v": graph.rows("v", heads_kv, value_dim), "o": graph.rows("out", heads_q, value_dim),
        "dO": graph.rows("dout", heads_q, value_dim), "stats": graph.rows("lse", heads_q, 1, FLOAT),
    }  # fmt: skip
    total = -(-pack.tokens // 64) * 64
    totals = {"max_total_seq_len_q": total, "max_total_seq_len_kv": total}
    dq, dk, dv = graph.graph.sdpa_backward(name="backward", **inputs, **totals, **graph.mask())
    graph.result("dq", dq, heads_q, dim)
    graph.result("dk", dk, heads_kv, dim)
    graph.result("dv", dv, heads_kv, value_dim)
    graph.build()
    return graph


class PackedAttention(torch.autograd.Function):
    """Attention of q [T, Hq, D], k [T, H, D], v [T, H, Dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Graph, backward: Graph) -> Tensor:
        """out [T, Hq, Dv]."""
        out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(*q.shape[:2], dtype=torch.float32)
        forward.run(q=q, k=k, v=v, out=out, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.graph = backward
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """dq, dk, dv."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        ctx.graph.run(q=q, k=k, v=v, out=out, lse=lse, dout=dout.contiguous(), dq=dq, dk=dk, dv=dv)
        return dq, dk, dv, None, None
