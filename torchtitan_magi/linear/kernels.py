"""The gated delta rule by the kernels of FlashQLA (github.com/QwenLM/FlashQLA, MIT): 16 bits, heads of 128.

A long sequence is cut into fragments, as many as keep a GPU busy, which run at the same time. Each one's map of the
state is made first; folded along the sequence they are the states from which fragments run, in both directions. Where
gates forget what is far away (e^-10, below what 16 bits tell) a fragment's map is made of the tokens behind that only.

Shapes: T tokens, HK heads of q and k, H value heads, K and V elements of a head, D sequences, F fragments.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.linear.backend import Tokens, own_dtypes
from torchtitan_magi.linear.once import once

HEAD_DIM = 128
LONG = 4096  # tokens: a longer sequence is cut if it is mapped
INSTALL = "pip install torchtitan_magi[linear]"


def check_kernels(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Whether the kernels take q, k, v of such heads, and are installed.

    Args:
        dims: elements of a head, of q and k, and of v.

    Raises:
        ValueError: they do not, or are not; one line.
    """
    capability = torch.cuda.get_device_capability(device)
    if dims != (HEAD_DIM, HEAD_DIM):
        raise ValueError(
            f"q, k, v are {dtype} on a GPU, with heads of {dims[0]} and {dims[1]}; the kernels take heads of "
            f"{HEAD_DIM}, give others in float32"
        )
    if capability < (9, 0):
        raise ValueError(
            f"q, k, v are {dtype} on a GPU of compute capability {capability[0]}.{capability[1]}; the kernels need 9.0 "
            "(Hopper) or later, give float32"
        )
    try:
        _library()
    except ImportError as error:
        raise ValueError(
            f"q, k, v are {dtype} on a GPU, which needs the package {error.name}; {INSTALL}, or give float32"
        ) from None
    if not _finds_compiler():
        raise ValueError(f"q, k, v are {dtype} on a GPU, whose kernels nvcc compiles, which is not there; {INSTALL}")


@functools.cache
def _library() -> ModuleType:
    """FlashQLA's stages: each is a kernel or two."""
    from flash_qla.ops.gated_delta_rule import chunk

    return chunk


@functools.cache
def _finds_compiler() -> bool:
    """Whether nvcc is where TileLang, in which FlashQLA is written, looks for it."""
    import tilelang

    home = tilelang.env.CUDA_HOME
    return bool(home) and Path(home, "bin", "nvcc").exists()


@dataclass(frozen=True, eq=False)
class Fragments:
    """Sequences, the fragments that they are cut into, and what of them is scanned for maps; int32 on the GPU.

    Attributes:
        is_cut: whether any sequence has several fragments.
        sequences: cumulative tokens of sequences, [D + 1].
        fragments: cumulative tokens of fragments, [F + 1].
        first: number of each sequence's first fragment, and F, [D + 1].
        sequence: number of each fragment's sequence, [F].
        begins: whether a sequence begins with the fragment that is not mapped, bool [F].
        ends: whether a sequence ends with the fragment, bool [F].
        scanned: cumulative tokens of what is scanned, [E + 1]: fragments if sequences are cut, else mapped sequences
            and what lies between them.
        num_chunks: chunks of each in each head, [E, H]; 0 for what lies between mapped sequences.
        ends_mapped: whether a mapped sequence ends with the fragment, bool [F, H]; used if sequences are cut.
        mapped: mapped sequences, int64 [n]: their numbers if sequences are cut, else where they are in `scanned`.
    """

    is_cut: bool
    sequences: Tensor
    fragments: Tensor
    first: Tensor
    sequence: Tensor
    begins: Tensor
    ends: Tensor
    scanned: Tensor
    num_chunks: Tensor
    ends_mapped: Tensor
    mapped: Tensor

    @classmethod
    @torch.inference_mode(False)  # layers in training may share it
    def of(cls, lengths: Sequence[int], mapped: Sequence[int], num_heads: int, device: torch.device) -> "Fragments":
        """Those of sequences of these lengths, of which some are mapped."""
        from flash_qla.utils.index import prepare_varlen_metadata

        library = _library()
        sequences = torch.tensor([0, *lengths]).cumsum(0).int()
        chosen = library.build_cp_context(  # of tensors on the host: no wait for the GPU
            sequences, enable_intra=True, num_v_heads=num_heads, chunk_size=library.CHUNK_SIZE, is_train=True,
            force_intra_cp=max((lengths[i] for i in mapped), default=0) > LONG,
        )  # fmt: skip
        is_mapped = torch.isin(torch.arange(len(lengths)), torch.tensor(mapped, dtype=torch.int64))
        fragments, first = sequences, torch.arange(len(sequences)).int()
        if chosen.is_intra:
            fragments, first = _with_short_ends(
                chosen.intra_cp_cu_seqlens, chosen.seq_map_r2c, is_mapped, library.CHUNK_SIZE
            )
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), first.diff())
        number = torch.arange(len(sequence))
        scanned, places = fragments, torch.tensor(mapped, dtype=torch.int64)
        chunks = -(-fragments.diff() // library.CHUNK_SIZE)
        if not chosen.is_intra:  # neighbours that are not mapped are one
            begins = is_mapped | torch.cat([torch.ones(1, dtype=torch.bool), is_mapped[:-1]])
            scanned = torch.cat([sequences[:-1][begins], sequences[-1:]])
            chunks = torch.where(is_mapped, chunks, 0)[begins]
            places = is_mapped[begins].nonzero().flatten()
        begins, ends = number == first[sequence], number + 1 == first[sequence + 1]

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        def in_heads(x: Tensor) -> Tensor:
            return moved(x[:, None].expand(-1, num_heads).contiguous())

        def cumulative(x: Tensor) -> Tensor:
            prepared: Tensor = prepare_varlen_metadata(moved(x), x)
            return prepared

        return cls(
            chosen.is_intra, cumulative(sequences), cumulative(fragments), moved(first), moved(sequence.int()),
            moved(begins & ~is_mapped[sequence]), moved(ends), cumulative(scanned), in_heads(chunks.int()),
            in_heads(is_mapped[sequence] & ends), moved(places),
        )  # fmt: skip


def _with_short_ends(fragments: Tensor, first: Tensor, is_mapped: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`Fragments.fragments` and `first` where the last chunk of mapped sequences is a fragment of its own. The map of a
    sequence's last fragment takes all its chunks: parts of it would not begin where chunks do."""
    start, end = fragments[first[1:] - 1], fragments[first[1:]]
    cut = start + (end - start - 1) // size * size
    chosen = is_mapped & (cut > start)
    more = torch.cat([chosen.new_zeros(1, dtype=torch.int32), chosen.cumsum(0, dtype=torch.int32)])
    return torch.cat([fragments, cut[chosen]]).sort().values, first + more


@functools.lru_cache(maxsize=64)
def _fragments(lengths: tuple[int, ...], mapped: tuple[int, ...], num_heads: int, device: torch.device) -> Fragments:
    return Fragments.of(lengths, mapped, num_heads, device)


class _Inputs(NamedTuple):
    """A layer's inputs as the kernels take them."""

    q: Tensor  # [1, T, HK, K]
    k: Tensor
    v: Tensor  # [1, T, H, V]
    gates: Tensor  # float32 [1, T, H]: sums of g inside chunks
    beta: Tensor  # float32 [1, T, H]
    inverse: Tensor  # [1, T, H, C]: of each chunk's I + L, see ``chunked``, without gates
    fragments: Fragments
    scale: float

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """What the backward would compute again, a row for each token."""
        return self.gates[0], self.inverse[0]

    @classmethod
    def of(
        cls, tokens: Tokens, lengths: Sequence[int], scale: float, mapped: Sequence[int], kept: tuple[Tensor, ...] = ()
    ) -> "_Inputs":
        """Those of sequences that lie one after another.

        Args:
            kept: by ``kept``; empty: not computed yet.
        """
        library = _library()
        fragments = _fragments(tuple(lengths), tuple(mapped), tokens.v.shape[1], tokens.v.device)
        q, k, v = (x.contiguous()[None] for x in (tokens.q, tokens.k, tokens.v))
        g, beta = (x.float().contiguous()[None] for x in (tokens.g, tokens.beta))
        if kept:
            gates, inverse = (x[None] for x in kept)
        else:
            sequences, size = fragments.sequences, library.CHUNK_SIZE
            gates = library.chunk_local_cumsum(g=g, cu_seqlens=sequences, chunk_size=size)
            inverse = library.kkt_solve(k=k, b=beta, cu_seqlens=sequences, chunk_size=size)
        return cls(q, k, v, gates, beta, inverse, fragments, scale)

    def scan(self, num_chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Maps of `Fragments.scanned`, in 16 bits: states [E, H, K, V] and, of those all of whose chunks are asked for,
        matrices [E, H, K, K].

        Args:
            num_chunks: [E, H], the last chunks of each that its map is made of.
        """
        _, states, matrices = _library().fused_gdr_h(
            self.k, self.v, self.inverse, self.gates, self.beta, output_final_state=True, output_h=False,
            cu_seqlens=self.fragments.scanned, num_warmup_chunks=num_chunks,
        )  # fmt: skip
        return states, matrices


class KernelsForward:
    """A ``Forward``."""

    def __init__(self, inputs: _Inputs) -> None:
        self.inputs, f = inputs, inputs.fragments
        num_chunks = f.num_chunks
        if f.is_cut:
            num_chunks, self.is_whole = _library().get_warmup_chunks(
                g=inputs.gates, cu_seqlens=f.fragments, ht_mask=f.ends, chunk_size=_library().CHUNK_SIZE
            )
            if len(f.mapped):
                num_chunks = torch.where(f.ends_mapped, f.num_chunks, num_chunks)
                self.is_whole = self.is_whole | f.ends_mapped
        if f.is_cut or len(f.mapped):
            self.states, self.matrices = inputs.scan(num_chunks)

    def maps(self) -> tuple[Tensor, Tensor]:
        """As ``Forward.maps``."""
        f, maps = self.inputs.fragments, (self.states, self.matrices)
        if f.is_cut:
            maps = _library().aggregate_card_state(*maps, self.is_whole, f.first)
        states, matrices = (x.index_select(0, f.mapped).float() for x in maps)
        return states, matrices

    def finish(self, states: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As ``Forward.finish``."""
        x, f = self.inputs, self.inputs.fragments
        if f.is_cut:
            states = _library().correct_initial_states(states, self.states, self.matrices, self.is_whole, f.first)
        out, _, _ = _library().fused_gdr_fwd(
            x.q, x.k, x.v, x.inverse, x.gates, x.beta, x.scale, states, output_final_state=False,
            cu_seqlens=f.fragments, cp_seq_map=f.sequence if f.is_cut else None, raw_cu_seqlens=f.sequences,
        )  # fmt: skip
        return out[0], x.kept


class KernelsBackward:
    """A ``Backward``."""

    def __init__(self, inputs: _Inputs, states: Tensor | None, dout: Tensor, dtypes: Sequence[torch.dtype]) -> None:
        """dtypes: of the tokens."""
        self.inputs, self.states, self.dout, self.dtypes = inputs, states, dout.contiguous()[None], dtypes
        f = inputs.fragments
        back = f.num_chunks
        if f.is_cut:
            forth, back, self.is_whole, self.is_whole_back = _library().get_warmup_chunks_bidi(
                inputs.gates, f.fragments, f.ends, f.begins, _library().CHUNK_SIZE
            )
            self.fragment_states, self.matrices = inputs.scan(forth)
        if f.is_cut or len(f.mapped):
            _, self.dstates = _library().fused_gdr_dh(
                inputs.q, inputs.k, inputs.inverse, inputs.gates, inputs.beta, self.dout, None, output_dh0=True,
                output_dh=False, scale=inputs.scale, cu_seqlens=f.scanned, num_warmup_chunks=back,
            )  # fmt: skip

    def state_grads(self) -> Tensor:
        """As ``Backward.state_grads``."""
        f, dstates = self.inputs.fragments, self.dstates
        if f.is_cut:
            dstates, _ = _library().aggregate_card_state(
                dstates, self.matrices, self.is_whole_back, f.first, reverse=True, transpose_m=True, compute_m=False
            )
        return dstates.index_select(0, f.mapped)

    def prepare(self) -> None:
        """As ``Backward.prepare``: the states before all chunks, [1, chunks, H, K, V] in 16 bits."""
        x, f, states = self.inputs, self.inputs.fragments, self.states
        if f.is_cut:
            states = _library().correct_initial_states(
                states, self.fragment_states, self.matrices, self.is_whole, f.first
            )
        self.before, _, _ = _library().fused_gdr_h(
            x.k, x.v, x.inverse, x.gates, x.beta, states, output_final_state=False, cu_seqlens=f.fragments
        )

    def finish(self, dends: Tensor | None) -> Tokens:
        """As ``Backward.finish``."""
        library, x, f = _library(), self.inputs, self.inputs.fragments
        if f.is_cut:
            dends = library.correct_terminal_states(dends, self.dstates, self.matrices, self.is_whole_back, f.first)
        dq, dk, dv, dg, dbeta, _ = library.fused_gdr_bwd(
            x.q, x.k, x.v, x.inverse, x.gates, x.beta, self.dout, dends, self.before, x.scale, f.fragments
        )
        if x.k.shape[2] < x.v.shape[2]:
            dq, dk = (library.group_reduce_vector(grad, x.k.shape[2]) for grad in (dq, dk))
        dg = library.chunk_local_cumsum(
            dg, library.CHUNK_SIZE, cu_seqlens=f.sequences, reverse=True, zero_last_chunk=True
        )
        return Tokens(*(grad[0].to(dtype) for grad, dtype in zip((dq, dk, dv, dg, dbeta), self.dtypes, strict=True)))


class Kernels:
    """A ``Backend`` of FlashQLA's kernels. It keeps the sums of gates and each chunk's inverse."""

    def start(self, tokens: Tokens, lengths: Sequence[int], scale: float, mapped: Sequence[int] = ()) -> KernelsForward:
        """As ``Backend.start``."""
        return KernelsForward(_Inputs.of(tokens, lengths, scale, mapped))

    def start_backward(
        self, tokens: Tokens, lengths: Sequence[int], scale: float, states: Tensor | None, kept: tuple[Tensor, ...],
        dout: Tensor, mapped: Sequence[int] = (),
    ) -> KernelsBackward:  # fmt: skip
        """As ``Backend.start_backward``."""
        inputs = _Inputs.of(tokens, lengths, scale, mapped, kept)
        return KernelsBackward(inputs, states, dout, [x.dtype for x in tokens])

    def room(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """As ``Backend.room``."""
        gates = tokens.g.new_zeros(tokens.g.shape, dtype=torch.float32)
        return gates, tokens.v.new_zeros(*tokens.g.shape, _library().CHUNK_SIZE)


class _Documents(torch.autograd.Function):
    """Whole documents, one after another."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], scale: float
    ) -> Tensor:
        tokens, ctx.rest = Tokens(q, k, v, g, beta), (lengths, scale)
        with own_dtypes(v.device):
            out, kept = Kernels().start(tokens, lengths, scale).finish(None)
        ctx.save_for_backward(*tokens, *kept)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *kept = ctx.saved_tensors
        lengths, scale = ctx.rest
        with own_dtypes(dout.device):
            started = Kernels().start_backward(Tokens(q, k, v, g, beta), lengths, scale, None, tuple(kept), dout)
            started.prepare()
            grads = started.finish(None)
        return *grads, None, None


documents = _Documents.apply
"""out [T, H, V] of q, k, v, g, beta, the lengths of documents, at least one, and the scale. Differentiable once."""
