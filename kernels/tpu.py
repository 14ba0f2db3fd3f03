"""Sparse attention on TPUs: a Pallas kernel whose grid runs over the live tiles alone.

A tile's scores are computed transposed, S^T = K Q^T, and so is what they weigh,
O^T = V^T P^T: sums and maxima over keys then run down sublanes as plain vector
additions, and the second product streams only head_dim rows through a fully used
array. Exponents are base 2, with the scale folded into q.

Softmax needs a reference for each query, near enough to its largest score that no
exponent overflows and their sum does not vanish. There are two kernels:

- *bounded*: the reference is |q| times the longest key, above every score. Right where
  it is not so far above that the largest weight could vanish (`SAFE`), and cheapest.
- *online*: the reference starts as the query's score with its own key, which every
  pattern keeps, and is raised where a score exceeds it by more than `RAISE`. For that
  a tile's scores are computed one step of the grid before their exponents are taken.
  (Beyond scores of 1e9, float32 rounds a score by more than that room.)

The array is 256 deep and head_dim fills half of it. In the other half the same product
takes the reference off the scores, and padded keys out of the sum, at no cost
(`_key_marks`, `_mark_queries`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from kernels import chip, layouts
from kernels.chip import LANES, SIDE_BITS, SUBLANES, VMEM_BYTES
from kernels.tiles import HeadKind, TileKind, TileTable

# Base 2. A float32 exponent ends at -126; what lies between is left to the smaller
# terms of the sum.
SAFE = 100.0
# Base 2. Weights up to 2^64 times 2^20 keys times values up to 2^40 stay finite.
RAISE = 64.0
# What a score gets added that must not count.
MASKED = float(jnp.finfo(jnp.bfloat16).min)

# bfloat16 numbers that make up a float32.
_PARTS = 3
# Of an operand, whose heads are computed together.
HBM_BYTES = 2**29
# Keys whose scores are computed at a time, and queries likewise in the online kernel:
# the fastest of those tried (docs/kernels.md).
BOUNDED_KEYS = 512
ONLINE_KEYS, ONLINE_QUERIES = 256, 512

# Bits of a tile's word; its row is the lowest.
_COLUMN = SIDE_BITS
_FIRST, _LAST, _BOUNDARY = (2 * SIDE_BITS + n for n in range(3))


class WorkList(NamedTuple):
    """Which tile each step of the grid computes, as scalars.

    A step t belongs to a segment s, one for each head that takes part, which `_place`
    finds by `blocks` and `starts`. Its tile is `tiles[t + offsets[s]]`, of the head
    `heads[s]`.

    Attributes:
        tiles: the tiles of a dense head, then those of a sparse one, packed.
        blocks: the segment that each run of 2^n steps begins in.
        starts: the first step of each segment, and at the end the number of steps.
        offsets: from steps to places in `tiles`.
        heads: the head of each segment.
    """

    tiles: Int[Array, " tiles"]
    blocks: Int[Array, " blocks"]
    starts: Int[Array, " segments+1"]
    offsets: Int[Array, " segments"]
    heads: Int[Array, " segments"]


def attend(
    q: Float[Array, "heads tokens head_dim"],
    k: Float[Array, "heads tokens head_dim"],
    v: Float[Array, "heads tokens head_dim"],
    table: TileTable,
    kinds: Int[Array, " heads"],
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "heads tokens head_dim"], Bool[Array, " heads"]]:
    """Attention through the live tiles; see `kernels.attention.attend`.

    Operands of the matrix unit are bfloat16, as XLA's own are on TPUs by default.

    Args:
        q: queries, the table's tokens in frame-major order.
        k: keys, likewise.
        v: values, likewise.
        table: the live tiles of SPATIAL and TEMPORAL heads.
        kinds: each head's `kernels.tiles.HeadKind`.
        interpret: runs the kernels without a TPU, step by step: for tests.

    Returns:
        The result, and which heads took the online kernel.

    Raises:
        ValueError: the tiles are not multiples of 128, or their lists or scores do not
            fit into the core's memories.
    """
    heads, tokens, head_dim = q.shape
    # What is made of q, k and v takes several times their room: not of all heads at
    # once where that is much.
    group = min(heads, max(1, HBM_BYTES // (2 * tokens * head_dim)))
    chip.check(table, group, head_dim)
    parts, done = [], jnp.zeros((), v.dtype)
    for first in range(0, heads, group):
        some = slice(first, first + group)
        # The barrier has one group wait for the one before it.
        ours = q[some], k[some], v[some]
        (qs, ks, vs), done = jax.lax.optimization_barrier((ours, done))
        parts.append(_attend(qs, ks, vs, kinds[some], table, interpret))
        done = parts[-1][0].ravel()[0]
    outs, online = zip(*parts, strict=True)
    return jnp.concatenate(outs), jnp.concatenate(online)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    kinds: Array,
    table: TileTable,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Array, Array]:
    heads, tokens, head_dim = q.shape
    rows, columns = table.rows * table.tile.queries, table.columns * table.tile.keys
    temporal = (kinds == HeadKind.TEMPORAL)[:, None, None]

    def arrange(x: Array) -> Array:
        return jnp.where(temporal, layouts.to_position_major(x, table.grid), x)

    q = (q.astype(jnp.float32) * (math.log2(math.e) / math.sqrt(head_dim))).astype(
        jnp.bfloat16
    )
    q, k, v = arrange(q), arrange(k.astype(jnp.bfloat16)), arrange(v)
    bound, own, online = references(q, k)

    depth = -(-head_dim // LANES) * LANES
    q = jnp.pad(q.swapaxes(1, 2), ((0, 0), (0, depth - head_dim), (0, rows - tokens)))
    k = jnp.pad(k, ((0, 0), (0, columns - tokens), (0, depth - head_dim)))
    values = jnp.pad(
        v.astype(jnp.bfloat16).swapaxes(1, 2), ((0, 0), (0, 0), (0, columns - tokens))
    )
    reference = jnp.where(online[:, None], own, bound)
    reference = jnp.pad(reference, ((0, 0), (0, rows - tokens)))[:, None]

    out = jnp.zeros((heads, head_dim, rows), v.dtype)
    for kernel, mine in ((_bounded, ~online), (_online, online)):
        call = functools.partial(
            _call, kernel, q, k, values, reference, table, kinds, mine, interpret
        )
        out = jax.lax.cond(mine.any(), call, lambda out: out, out)
    out = out[:, :, :tokens].swapaxes(1, 2)
    return jnp.where(temporal, layouts.to_frame_major(out, table.grid), out), online


def references(
    q: Float[Array, "heads tokens head_dim"], k: Float[Array, "heads tokens head_dim"]
) -> tuple[
    Float[Array, "heads tokens"], Float[Array, "heads tokens"], Bool[Array, " heads"]
]:
    """What stands for each query's largest score, in the scores' base 2.

    Returns:
        A bound above all scores, the score with its own key, and the heads where the
        bound is not safe: where it exceeds a query's own score, and so may exceed its
        largest one, by more than `SAFE`, or is not finite.
    """
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    longest = jnp.sqrt((k**2).sum(-1).max(-1, keepdims=True))
    bound = jnp.sqrt((q**2).sum(-1)) * longest
    own = (q * k).sum(-1)
    return bound, own, ~((bound - own).max(-1) <= SAFE)


def _key_marks(table: TileTable) -> np.ndarray:
    """Lanes beside the keys, [2, keys, LANES], that go with `_mark_queries`.

    The first are of a column without padding, the others of the last column.
    """
    marks = np.zeros((2, table.tile.keys, LANES), np.float32)
    marks[:, :, :_PARTS] = 1
    marks[1, table.grid.tokens - (table.columns - 1) * table.tile.keys :, _PARTS] = (
        MASKED
    )
    return marks


def _mark_queries(marks: Any, reference: Array) -> None:
    """Writes rows beside the queries, [LANES, queries], that go with `_key_marks`.

    A float32 is the sum of three bfloat16 numbers, each a third of its bits.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, marks.shape, 0)
    rows, rest = jnp.where(row == _PARTS, 1.0, 0.0), -reference
    for part in range(_PARTS):
        bits = jax.lax.bitcast_convert_type(rest, jnp.int32) & -(1 << 16)
        some = jax.lax.bitcast_convert_type(bits, jnp.float32)
        rows, rest = jnp.where(row == part, some, rows), rest - some
    marks[...] = rows.astype(marks.dtype)


def work_list(
    table: TileTable, kinds: Int[Array, " heads"], mine: Bool[Array, " heads"]
) -> WorkList:
    """Lists the tiles of the heads that take part, head after head."""
    every = np.stack(np.divmod(np.arange(table.all_tiles), table.columns), 1)
    live = table.live()
    boundary = table.classify(*live.T) == TileKind.BOUNDARY
    packed = np.concatenate([_pack(every), _pack(live) | boundary << _BOUNDARY])
    dense = kinds == HeadKind.DENSE
    order = jnp.argsort(~mine, stable=True).astype(jnp.int32)
    lengths = jnp.where(mine, jnp.where(dense, table.all_tiles, table.tiles), 0)[order]
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), lengths.cumsum(dtype=jnp.int32)])
    offsets = jnp.where(dense[order], 0, table.all_tiles) - starts[:-1]
    most = kinds.shape[0] * table.all_tiles
    begin = jnp.arange(0, most + 1, 1 << chip.block_bits(table))
    blocks = (begin[:, None] >= starts[1:]).sum(1)
    return WorkList(
        tiles=jnp.asarray(packed, jnp.int32),
        blocks=jnp.minimum(blocks, kinds.shape[0] - 1).astype(jnp.int32),
        starts=starts,
        offsets=offsets.astype(jnp.int32),
        heads=order,
    )


def _pack(tiles: np.ndarray) -> np.ndarray:
    """Tiles (row, column), in order, with marks on each row's first and last."""
    row, column = tiles.T
    first = np.diff(row, prepend=-1) != 0
    last = np.diff(row, append=-1) != 0
    return row | column << _COLUMN | first << _FIRST | last << _LAST


class _Place(NamedTuple):
    """Where a step's tile is."""

    head: Array
    row: Array
    column: Array
    first: Array
    last: Array
    boundary: Array


def _place(step: Array, work: WorkList, bits: int) -> _Place:
    # The pipeline asks for the tile after the last one too.
    step = jnp.minimum(step, work.starts[work.heads.shape[0]] - 1)
    segment = work.blocks[step >> bits]
    segment = segment + (step >= work.starts[segment + 1]).astype(jnp.int32)
    word = work.tiles[step + work.offsets[segment]]
    side = (1 << SIDE_BITS) - 1
    return _Place(
        work.heads[segment],
        word & side,
        word >> _COLUMN & side,
        word >> _FIRST & 1,
        word >> _LAST & 1,
        word >> _BOUNDARY & 1,
    )


def _call(
    kernel: Callable[..., None],
    q: Array,
    k: Array,
    values: Array,
    reference: Array,
    table: TileTable,
    kinds: Array,
    mine: Array,
    interpret: bool | pltpu.InterpretParams,
    out: Array,
) -> Array:
    """Runs a kernel over the heads that are `mine`, into their rows of `out`."""
    height, width = table.tile
    depth, head_dim = q.shape[1], values.shape[1]
    work = work_list(table, kinds, mine)
    steps = work.starts[-1]
    bits = chip.block_bits(table)
    # The online kernel weighs a tile one step after its scores.
    lag = int(kernel is _online)

    def scored(step: Array, *work: Array) -> _Place:
        return _place(step, WorkList(*work), bits)

    def weighed(step: Array, *work: Array) -> _Place:
        return _place(jnp.maximum(step - lag, 0), WorkList(*work), bits)

    def by_row(place: _Place) -> tuple[Array, int, Array]:
        return place.head, 0, place.row

    specs = [
        pl.BlockSpec((None, depth, height), lambda *at: by_row(scored(*at))),
        pl.BlockSpec(
            (None, width, depth),
            lambda *at: (scored(*at).head, scored(*at).column, 0),
        ),
        pl.BlockSpec(
            (None, head_dim, width),
            lambda *at: (weighed(*at).head, 0, weighed(*at).column),
        ),
        pl.BlockSpec((None, 1, height), lambda *at: by_row(scored(*at))),
        pl.BlockSpec(
            (None, width, LANES),
            lambda *at: ((scored(*at).column == table.columns - 1).astype(int), 0, 0),
        ),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    scratch = [
        pltpu.VMEM((LANES, height), q.dtype),
        pltpu.VMEM((head_dim, height), jnp.float32),
        pltpu.VMEM((SUBLANES, height), jnp.float32),
    ]
    if lag:
        scratch += [
            pltpu.VMEM((width, height), jnp.float32),
            pltpu.VMEM((SUBLANES, height), jnp.float32),
            pltpu.VMEM((1, height), jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
        ]
    return pl.pallas_call(
        functools.partial(kernel, table, scored, weighed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(steps + lag,),
            in_specs=specs,
            out_specs=pl.BlockSpec(
                (None, head_dim, height), lambda *at: by_row(weighed(*at))
            ),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(work) + len(specs) - 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        name=f"tilereel{kernel.__name__}",
        interpret=interpret,
    )(*work, q, k, values, reference, jnp.asarray(_key_marks(table), k.dtype), out)


def _bounded(table, scored, _, *refs):
    """A step of the bounded kernel: a tile's scores, and what they weigh.

    References, in this order: the fields of `WorkList`; queries [depth, queries], keys
    [keys, depth], values [head_dim, keys], the queries' bounds [1, queries], the marks
    beside the keys [keys, LANES], the output's old contents (not read), the output
    [head_dim, queries]; for a row of tiles, the marks beside its queries [LANES,
    queries], its sums weighed [head_dim, queries] and of weights [SUBLANES, queries].
    """
    work, refs = refs[:5], refs[5:]
    q, k, v, bound, key_marks, _, out, query_marks, acc, total = refs
    place = scored(pl.program_id(0), *work)
    width = table.tile.keys
    keys = math.gcd(width, BOUNDED_KEYS)

    @pl.when(place.first == 1)
    def _():
        _mark_queries(query_marks, bound[...])
        acc[...] = jnp.zeros_like(acc)
        total[...] = jnp.zeros_like(total)

    queries = jnp.concatenate([q[...], query_marks[...]], 0)
    for start in range(0, width, keys):
        at = pl.ds(start, keys)
        scores = _dot(jnp.concatenate([k[at], key_marks[at]], 1), queries)
        if table.rounding == "exact":
            scores = _masked(scores, table, place, start, 0)
        weights = jnp.exp2(scores)
        total[...] += _down(weights, jnp.sum)
        acc[...] += _dot(v[:, at], weights.astype(v.dtype))

    @pl.when(place.last == 1)
    def _():
        out[...] = (acc[...] / total[...].sum(0, keepdims=True)).astype(out.dtype)


def _online(table, scored, weighed, *refs):
    """A step of the online kernel: a tile's scores, and what those before weigh.

    References as in `_bounded`, with each query's score with its own key in the place
    of its bound; then the scores [keys, queries] from one step to the next, the largest
    of each query [SUBLANES, queries], its reference [1, queries], and whether any
    exceeds its reference by more than `RAISE`.
    """
    work, refs = refs[:5], refs[5:]
    q, k, v, own, key_marks, _, out, query_marks, acc, total, *refs = refs
    scores, top, reference, exceeded = refs
    step = pl.program_id(0)
    before, place = weighed(step, *work), scored(step, *work)
    height, width = table.tile
    keys, queries = math.gcd(width, ONLINE_KEYS), math.gcd(height, ONLINE_QUERIES)

    # The first step has no scores yet, and what it makes of the zeros is not kept.
    @pl.when(step == 0)
    def _():
        scores[...] = jnp.zeros_like(scores)
        exceeded[0] = 0

    @pl.when(before.first == 1)
    def _():
        acc[...] = jnp.zeros_like(acc)
        total[...] = jnp.zeros_like(total)

    @pl.when(exceeded[0] == 1)
    def _():
        raised = jnp.maximum(top[...].max(0, keepdims=True), 0)
        reference[...] += raised
        _mark_queries(query_marks, reference[...])
        acc[...] *= jnp.exp2(-raised)
        total[...] *= jnp.exp2(-raised)

        def lower(n, _):
            at = pl.ds(n * SUBLANES, SUBLANES)
            scores[at] -= raised

        jax.lax.fori_loop(0, width // SUBLANES, lower, None)

    @pl.when((step == 0) | (place.first == 1))
    def _():
        reference[...] = own[...]
        _mark_queries(query_marks, reference[...])

    top[...] = jnp.full_like(top, MASKED)
    for start in range(0, width, keys):
        at = pl.ds(start, keys)
        marked = jnp.concatenate([k[at], key_marks[at]], 1)
        for left in range(0, height, queries):
            across = pl.ds(left, queries)
            weights = jnp.exp2(scores[at, across])
            total[:, across] += _down(weights, jnp.sum)
            acc[:, across] += _dot(v[:, at], weights.astype(v.dtype))
            following = _dot(
                marked, jnp.concatenate([q[:, across], query_marks[:, across]], 0)
            )
            if table.rounding == "exact":
                following = _masked(following, table, place, start, left)
            scores[at, across] = following
            top[:, across] = jnp.maximum(top[:, across], _down(following, jnp.max))
    exceeded[0] = (jnp.max(top[...]) > RAISE).astype(jnp.int32)

    # The last tile of a row is weighed in the step that scores the next row's first.
    @pl.when(before.last == 1)
    def _():
        out[...] = (acc[...] / total[...].sum(0, keepdims=True)).astype(out.dtype)


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _down(x: Array, reduce: Callable[..., Array]) -> Array:
    """Reduces [keys, queries] to the sublanes of a register."""
    return reduce(x.reshape(-1, SUBLANES, x.shape[1]), 0)


def _masked(
    scores: Array, table: TileTable, place: _Place, start: int, left: int
) -> Array:
    """Takes out what the pattern does not keep of scores [keys, queries]."""
    key = place.column * table.tile.keys + start
    query = place.row * table.tile.queries + left
    kept = table.keeps(
        query + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1),
        key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0),
    )
    return jnp.where(kept | (place.boundary == 0), scores, MASKED)
