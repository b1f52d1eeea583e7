"""The gated delta rule by the kernels of FlashQLA (github.com/QwenLM/FlashQLA, MIT): 16 bits, heads of 128.

A long sequence is cut into fragments, as many as keep a GPU busy, which run at the same time. Each one's map of the
state is made first; folded along the sequence they are the states from which fragments run, in both directions, and the
sequence's own map. Where gates forget what is far away (e^-10, below what 16 bits tell) a fragment's map is made of the
tokens behind that only.

Shapes: T tokens, HK heads of q and k, H value heads, K and V elements of a head, D sequences, F fragments; what is
scanned for maps are S sequences of E rows.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.cuda.tables import stream_of, uploaded
from torchtitan_magi.linear.backend import Tokens, spread
from torchtitan_magi.linear.once import once
from torchtitan_magi.products import own_dtypes

HEAD_DIM = 128
LONG = 4096  # tokens: a longer sequence runs in fragments if it is mapped
SHORTEST = 4  # chunks that a row has at least, if it is cut for the scan alone
BLOCKS = 132  # such rows, in all heads: about as many as a GPU scans at once
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
    """Sequences, the fragments in which they run, and the rows that are scanned for maps; tensors are int32 on the GPU.

    Scanned are the sequences that are mapped or run in several fragments. Their fragments are the rows; where sequences
    run whole, those that are mapped are cut for the scan alone. Groups of neighbours lie from the last to the first:
    between two of them is a row of negative length, which no kernel enters.

    Attributes:
        is_cut: whether any sequence runs in several fragments.
        sequences: cumulative tokens of sequences, [D + 1].
        fragments: cumulative tokens of fragments, [F + 1].
        first: number of each sequence's first fragment, and F, D + 1 numbers.
        rows: first token of each row, and the end of the last, [E + 1].
        first_row: number of the first row of each scanned sequence, and E, [S + 1].
        scanned: number of each scanned sequence, S numbers; -1: what is between groups.
        mapped: where mapped sequences are among the scanned ones, n numbers.
        groups: of each group, its first row, first fragment, and number of rows; used if sequences are cut.
        skipped: rows whose maps nobody needs in the forward, bool [E].
        skipped_back: the same in the backward.
        short: 1 for rows of less than a chunk that are mapped, else 0, [E, H]; None if there are none.
    """

    is_cut: bool
    sequences: Tensor
    fragments: Tensor
    first: list[int]
    rows: Tensor
    first_row: Tensor
    scanned: list[int]
    mapped: list[int]
    groups: list[tuple[int, int, int]]
    skipped: Tensor
    skipped_back: Tensor
    short: Tensor | None

    @property
    def is_folded(self) -> bool:
        """Whether any scanned sequence has several rows."""
        return len(self.skipped) > len(self.scanned)

    @classmethod
    @torch.inference_mode(False)  # layers in training may share it
    def of(
        cls, lengths: Sequence[int], mapped: Sequence[int], num_heads: int, device: torch.device, back: bool
    ) -> "Fragments":
        """Those of sequences of these lengths, of which some are mapped in one direction."""
        from flash_qla.utils.index import prepare_varlen_metadata

        is_cut, fragments, rows_of = _cut(lengths, mapped, num_heads, back)
        first, end = [0, *accumulate(map(len, fragments))], [*accumulate(lengths)]
        scanned: list[tuple[int, list[int]]] = []  # sequences, with the first tokens of their rows
        groups, last = [], 0
        for group in reversed(_neighbours(i for i, starts in enumerate(rows_of) if i in mapped or len(starts) > 1)):
            if scanned:
                scanned.append((-1, [last]))
            of_group = [(i, rows_of[i]) for i in group]
            groups.append((_num_rows(scanned), first[group[0]], _num_rows(of_group)))
            scanned, last = scanned + of_group, end[group[-1]]
        rows, numbers = [*chain(*(starts for _, starts in scanned)), last], [i for i, _ in scanned]
        edges = [(i in mapped, start == starts[0], start == starts[-1]) for i, starts in scanned for start in starts]
        short = [
            is_mapped and not back and stop - start < _library().CHUNK_SIZE
            for (is_mapped, *_), (start, stop) in zip(edges, pairwise(rows), strict=True)
        ]

        def flags(of_rows: Iterable[bool]) -> Tensor:
            return torch.tensor([*of_rows], dtype=torch.bool, device="cpu")

        def moved(x: Tensor) -> Tensor:
            return uploaded(x, device)

        def integers(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device="cpu")

        def cumulative(numbers: Sequence[int]) -> Tensor:
            x = integers(numbers)
            entered = torch.cat([x[:1], x.diff().clamp(min=0)]).cumsum(0).int()
            prepared: Tensor = prepare_varlen_metadata(moved(x), entered)
            return prepared

        return cls(
            is_cut=is_cut,
            sequences=cumulative([0, *end]),
            fragments=cumulative([*chain(*fragments), end[-1]]),
            first=first,
            rows=cumulative(rows),
            first_row=moved(integers([0, *accumulate(len(starts) for _, starts in scanned)])),
            scanned=numbers,
            mapped=[numbers.index(i) for i in mapped],
            groups=groups,
            skipped=moved(flags(is_last and (back or not is_mapped) for is_mapped, _, is_last in edges)),
            skipped_back=moved(flags(is_first and not is_mapped for is_mapped, is_first, _ in edges)),
            short=moved(flags(short).int()[:, None].expand(-1, num_heads).contiguous()) if any(short) else None,
        )


def _cut(
    lengths: Sequence[int], mapped: Sequence[int], num_heads: int, back: bool
) -> tuple[bool, list[list[int]], list[list[int]]]:
    """Whether any sequence runs in several fragments, and of each sequence the first tokens of its fragments, and of
    the rows that are scanned for its map."""
    library = _library()
    size, bounds = library.CHUNK_SIZE, [*pairwise([0, *accumulate(lengths)])]
    chosen = library.build_cp_context(  # of tensors on the host: no wait for the GPU
        torch.tensor([0, *lengths], device="cpu").cumsum(0).int(), enable_intra=True, num_v_heads=num_heads,
        chunk_size=size, is_train=True, force_intra_cp=max((lengths[i] for i in mapped), default=0) > LONG,
    )  # fmt: skip
    if chosen.is_intra:
        starts = chosen.intra_cp_cu_seqlens.tolist()
        rows = [starts[first:end] for first, end in pairwise(chosen.seq_map_r2c.tolist())]
    else:
        chunks = sum(-(-lengths[i] // size) for i in mapped)
        step = size * max(SHORTEST, -(-chunks * num_heads // BLOCKS))
        rows = [[*range(*bound, step)] if i in mapped else [bound[0]] for i, bound in enumerate(bounds)]
    if not back:  # a map of less than a fragment is made of its last chunks, so these have to end where it ends
        for i in mapped:
            length = bounds[i][1] - rows[i][-1]
            if 0 < length % size < length:
                rows[i].append(bounds[i][1] - length % size)
    return chosen.is_intra, rows if chosen.is_intra else [[start] for start, _ in bounds], rows


def _neighbours(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers, those that follow each other together."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in group] for _, group in groups]


def _num_rows(scanned: Iterable[tuple[int, list[int]]]) -> int:
    return sum(len(starts) for _, starts in scanned)


@functools.lru_cache(maxsize=64)
def _fragments(
    lengths: tuple[int, ...], mapped: tuple[int, ...], num_heads: int, device: torch.device, stream: int, back: bool
) -> Fragments:
    return Fragments.of(lengths, mapped, num_heads, device, back)


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
        cls, tokens: Tokens, lengths: Sequence[int], scale: float, mapped: Sequence[int],
        kept: tuple[Tensor, ...] | None = None,
    ) -> "_Inputs":  # fmt: skip
        """Those of sequences that lie one after another.

        Args:
            kept: in the backward, by ``kept``; None in the forward.
        """
        library = _library()
        back = kept is not None and len(mapped) > 0  # one table for both directions where nothing is mapped
        num_heads, device = tokens.v.shape[1], tokens.v.device
        fragments = _fragments(tuple(lengths), tuple(mapped), num_heads, device, stream_of(device), back)
        q, k, v = (x.contiguous()[None] for x in (tokens.q, tokens.k, tokens.v))
        g, beta = (x.float().contiguous()[None] for x in (tokens.g, tokens.beta))
        if kept is not None:
            gates, inverse = (x[None] for x in kept)
        else:
            sequences, size = fragments.sequences, library.CHUNK_SIZE
            gates = library.chunk_local_cumsum(g=g, cu_seqlens=sequences, chunk_size=size)
            inverse = library.kkt_solve(k=k, b=beta, cu_seqlens=sequences, chunk_size=size)
        return cls(q, k, v, gates, beta, inverse, fragments, scale)

    def scan(self, num_chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Maps of `Fragments.rows`, in 16 bits: states [E, H, K, V] and, of those all of whose chunks are asked for,
        matrices [E, H, K, K].

        Args:
            num_chunks: [E, H], the last chunks of each that its map is made of.
        """
        _, states, matrices = _library().fused_gdr_h(
            self.k, self.v, self.inverse, self.gates, self.beta, output_final_state=True, output_h=False,
            cu_seqlens=self.fragments.rows, num_warmup_chunks=num_chunks,
        )  # fmt: skip
        return states, matrices

    def zeros(self, waiting: Collection[int]) -> Tensor | None:
        """Where `placed` puts the states of these sequences, and zeros for others; None: nowhere."""
        f = self.fragments
        if f.is_cut:
            waiting = [place for place, i in enumerate(f.scanned) if i in waiting]
        return self._zeros(len(f.scanned) if f.is_cut else f.first[-1]) if waiting else None

    def placed(
        self, states: dict[int, Tensor], fold: Callable[[Tensor | None], Tensor], zeros: Tensor | None = None
    ) -> Tensor | None:
        """The states that fragments begin with, in the backward their gradients where fragments end, [F, H, K, V];
        None: zeros.

        Args:
            states: of sequences.
            fold: makes those of rows, [E, H, K, V], of those of scanned sequences, [S, H, K, V] or None for zeros.
            zeros: by `zeros`, of these sequences or more; is changed. None: made now.
        """
        f = self.fragments
        if zeros is None:
            zeros = self.zeros(states)
        if not f.is_cut:
            return zeros if zeros is None else spread(states, zeros)
        of_scanned = {place: states[i] for place, i in enumerate(f.scanned) if i in states}
        rows = fold(zeros if zeros is None else spread(of_scanned, zeros))
        if f.groups == [(0, 0, f.first[-1])]:
            return rows
        others = {f.first[i]: x for i, x in states.items() if i not in f.scanned}
        placed = spread(others, self._zeros(f.first[-1]))
        for row, fragment, count in f.groups:
            placed[fragment : fragment + count] = rows[row : row + count]
        return placed

    def _zeros(self, count: int) -> Tensor:
        return self.gates.new_zeros(count, self.v.shape[2], self.k.shape[3], self.v.shape[3])


class KernelsForward:
    """A ``Forward``."""

    zeros: Tensor | None = None  # for the states that come

    def __init__(self, inputs: _Inputs) -> None:
        self.inputs, f = inputs, inputs.fragments
        if f.scanned:
            num_chunks, self.is_whole = _library().get_warmup_chunks(
                g=inputs.gates, cu_seqlens=f.rows, ht_mask=f.skipped, chunk_size=_library().CHUNK_SIZE
            )
            if f.short is not None:  # counted are whole chunks
                num_chunks = torch.maximum(num_chunks, f.short)
            self.states, self.matrices = inputs.scan(num_chunks)

    def maps(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """As ``Forward.maps``, in 16 bits."""
        f, maps = self.inputs.fragments, (self.states, self.matrices)
        if f.is_folded:
            maps = _library().aggregate_card_state(*maps, self.is_whole, f.first_row)
        states, matrices = ([x[place] for place in f.mapped] for x in maps)
        return states, matrices

    def prepare(self, waiting: Collection[int]) -> None:
        """As ``Forward.prepare``: zeros for all sequences, many of which may wait for nobody."""
        self.zeros = self.inputs.zeros(waiting)

    def finish(self, states: dict[int, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As ``Forward.finish``."""
        library, x, f = _library(), self.inputs, self.inputs.fragments
        first = x.placed(
            states,
            lambda raw: library.correct_initial_states(raw, self.states, self.matrices, self.is_whole, f.first_row),
            self.zeros,
        )
        out, _, _ = library.fused_gdr_fwd(
            x.q, x.k, x.v, x.inverse, x.gates, x.beta, x.scale, first, output_final_state=False,
            cu_seqlens=f.fragments, raw_cu_seqlens=f.sequences,
        )  # fmt: skip
        return out[0], x.kept


class KernelsBackward:
    """A ``Backward``."""

    zeros: Tensor | None = None  # for the gradients that come

    def __init__(self, inputs: _Inputs, states: dict[int, Tensor], dout: Tensor, dtypes: Sequence[torch.dtype]) -> None:
        """dtypes: of the tokens."""
        self.inputs, self.states, self.dout, self.dtypes = inputs, states, dout.contiguous()[None], dtypes
        f = inputs.fragments
        if f.scanned:
            forth, back, self.is_whole, self.is_whole_back = _library().get_warmup_chunks_bidi(
                inputs.gates, f.rows, f.skipped, f.skipped_back, _library().CHUNK_SIZE
            )
            if f.is_folded:
                self.row_states, self.matrices = inputs.scan(forth)
            _, self.dstates = _library().fused_gdr_dh(
                inputs.q, inputs.k, inputs.inverse, inputs.gates, inputs.beta, self.dout, None, output_dh0=True,
                output_dh=False, scale=inputs.scale, cu_seqlens=f.rows, num_warmup_chunks=back,
            )  # fmt: skip

    def state_grads(self) -> Sequence[Tensor]:
        """As ``Backward.state_grads``."""
        f, dstates = self.inputs.fragments, self.dstates
        if f.is_folded:
            dstates, _ = _library().aggregate_card_state(
                dstates, self.matrices, self.is_whole_back, f.first_row, reverse=True, transpose_m=True,
                compute_m=False,
            )  # fmt: skip
        return [dstates[place] for place in f.mapped]

    def prepare(self, waiting: Collection[int] = ()) -> None:
        """As ``Backward.prepare``: the states before all chunks, [1, chunks, H, K, V] in 16 bits; and zeros."""
        library, x, f = _library(), self.inputs, self.inputs.fragments
        first = x.placed(
            self.states,
            lambda raw: library.correct_initial_states(raw, self.row_states, self.matrices, self.is_whole, f.first_row),
        )
        self.before, _, _ = library.fused_gdr_h(
            x.k, x.v, x.inverse, x.gates, x.beta, first, output_final_state=False, cu_seqlens=f.fragments
        )
        self.zeros = x.zeros(waiting)

    def finish(self, dends: dict[int, Tensor]) -> Tokens:
        """As ``Backward.finish``."""
        library, x, f = _library(), self.inputs, self.inputs.fragments
        last = x.placed(
            dends,
            lambda raw: library.correct_terminal_states(
                raw, self.dstates, self.matrices, self.is_whole_back, f.first_row
            ),
            self.zeros,
        )
        dq, dk, dv, dg, dbeta, _ = library.fused_gdr_bwd(
            x.q, x.k, x.v, x.inverse, x.gates, x.beta, self.dout, last, self.before, x.scale, f.fragments
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
        self, tokens: Tokens, lengths: Sequence[int], scale: float, states: dict[int, Tensor],
        kept: tuple[Tensor, ...], dout: Tensor, mapped: Sequence[int] = (),
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
            out, kept = Kernels().start(tokens, lengths, scale).finish({})
        ctx.save_for_backward(*tokens, *kept)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *kept = ctx.saved_tensors
        lengths, scale = ctx.rest
        with own_dtypes(dout.device):
            started = Kernels().start_backward(Tokens(q, k, v, g, beta), lengths, scale, {}, tuple(kept), dout)
            started.prepare()
            grads = started.finish({})
        return *grads, None, None


documents = _Documents.apply
"""out [T, H, V] of q, k, v, g, beta, the lengths of documents, at least one, and the scale. Differentiable once."""
