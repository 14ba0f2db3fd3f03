"""Which tiles of an attention matrix are computed.

A clip has F latent frames of S tokens. In a sparse head's own layout
(`kernels.layouts`) a query may look at the keys of the first frame (the sink's
columns), the first frame's queries at every key (the sink's rows), and all at the keys
within `band` places of their own. A tile of queries by keys that this pattern touches
is computed, any other is not. Everything here is in closed form: no array has an entry
for each element of the attention matrix.
"""

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:  # planning must not wait for jax
    import jax

AnyArray = TypeVar("AnyArray", np.ndarray, "jax.Array")


class HeadKind(enum.IntEnum):
    """How a head looks at the clip.

    SPATIAL and TEMPORAL heads compute the tiles of the pattern, with tokens near in
    space or near in time next to each other; DENSE heads compute all tiles.
    """

    SPATIAL = 0
    TEMPORAL = 1
    DENSE = 2


class TileKind(enum.IntEnum):
    """How much of a tile the pattern keeps, padding left out."""

    EMPTY = 0
    BOUNDARY = 1
    FULL = 2


class TokenGrid(NamedTuple):
    """The tokens of a clip: latent frames, and tokens of each."""

    frames: int
    positions: int

    @property
    def tokens(self) -> int:
        """Tokens of the clip."""
        return self.frames * self.positions


class TileShape(NamedTuple):
    """Queries by keys of a tile."""

    queries: int
    keys: int

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}"


@dataclasses.dataclass(frozen=True)
class TileTable:
    """The tiles that a sparse head computes. Hashable, so that a jit can be told it.

    Attributes:
        grid: The clip's tokens.
        tile: The shape of the tiles; those at the ends may reach past the tokens.
        band: The farthest that a query looks beside the sink, in tokens of its layout.
        rounding: "tile" computes the whole of every tile that the pattern touches;
            "exact" masks what the pattern leaves out within them.

    Raises:
        ValueError: A size is not positive, or the band negative.
    """

    grid: TokenGrid
    tile: TileShape
    band: int
    rounding: Literal["tile", "exact"] = "tile"

    def __post_init__(self):
        if min(*self.grid, *self.tile) < 1 or self.band < 0:
            raise ValueError(
                f"a token grid {tuple(self.grid)} with tiles of {self.tile} and a band "
                f"of {self.band}; sizes must be 1 or more, and the band 0 or more"
            )
        if self.rounding not in ("tile", "exact"):
            raise ValueError(f'rounding {self.rounding!r}; give "tile" or "exact"')

    @classmethod
    def within(
        cls,
        density: float,
        grid: TokenGrid,
        tile: TileShape,
        rounding: Literal["tile", "exact"] = "tile",
    ) -> "TileTable":
        """Returns the table with the widest band that keeps to a density.

        Args:
            density: The largest share of all tiles that may be computed.
            grid: The clip's tokens.
            tile: The shape of the tiles.
            rounding: See the class.

        Raises:
            ValueError: The sink and the diagonal alone take more; names the least
                density that can be had.
        """
        narrowest = cls(grid, tile, 0, rounding)
        if not narrowest.density <= density:
            least = -(-narrowest.tiles * 10_000 // narrowest.all_tiles) / 10_000
            raise ValueError(
                f"a density of {density:g} is less than the first frame and the "
                f"diagonal take of {grid.frames} latent frame"
                f"{'s' * (grid.frames != 1)} of {grid.positions} tokens in tiles of "
                f"{tile}; the least is {least:.4f}"
            )
        fits, fails = 0, grid.tokens
        while fails - fits > 1:
            band = (fits + fails) // 2
            if cls(grid, tile, band, rounding).density <= density:
                fits = band
            else:
                fails = band
        return cls(grid, tile, fits, rounding)

    @property
    def rows(self) -> int:
        """Tiles along the queries."""
        return -(-self.grid.tokens // self.tile.queries)

    @property
    def columns(self) -> int:
        """Tiles along the keys."""
        return -(-self.grid.tokens // self.tile.keys)

    @property
    def runs(self) -> np.ndarray:
        """The live tiles of each row as two runs of columns, int64 [rows, 3].

        Row r computes the columns [0, runs[r, 0]) and [runs[r, 1], runs[r, 2]); the
        second run is empty, and ends where it begins, where it would touch the first.
        """
        tokens, sink = self.grid.tokens, self.grid.positions
        first = np.arange(self.rows) * self.tile.queries
        last = np.minimum(first + self.tile.queries, tokens) - 1
        start = np.maximum(first - self.band, 0) // self.tile.keys
        end = np.minimum(last + self.band, tokens - 1) // self.tile.keys + 1
        sink_end = np.full(self.rows, -(-sink // self.tile.keys))
        sink_end = np.where(start <= sink_end, np.maximum(sink_end, end), sink_end)
        sink_end[first < sink] = self.columns
        apart = start > sink_end
        start, end = np.where(apart, start, sink_end), np.where(apart, end, sink_end)
        return np.stack([sink_end, start, end], 1)

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles that a sparse head computes."""
        sink_end, start, end = self.runs.T
        return int((sink_end + end - start).sum())

    @property
    def all_tiles(self) -> int:
        """Tiles that a dense head computes."""
        return self.rows * self.columns

    @property
    def density(self) -> float:
        """Tiles that a sparse head computes, over all."""
        return self.tiles / self.all_tiles

    def live(self) -> np.ndarray:
        """The live tiles row by row as (row, column), int32 [tiles, 2]."""
        sink_end, start, end = self.runs.T
        counts = sink_end + end - start
        row = np.repeat(np.arange(self.rows, dtype=np.int32), counts)
        place = np.arange(self.tiles) - np.repeat(counts.cumsum() - counts, counts)
        column = np.where(
            place < sink_end[row], place, place - sink_end[row] + start[row]
        )
        return np.stack([row, column], 1).astype(np.int32)

    def keeps(self, query: AnyArray, key: AnyArray) -> AnyArray:
        """Whether the pattern, before any rounding, lets queries look at keys.

        Args:
            query: Places in the head's own layout, of any broadcastable shape.
            key: Likewise.
        """
        sink = self.grid.positions
        return (query < sink) | (key < sink) | (abs(query - key) <= self.band)

    def classify(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Returns the `TileKind` of tiles, int8, of any broadcastable shapes."""
        tokens, sink = self.grid.tokens, self.grid.positions
        row, column = np.broadcast_arrays(np.asarray(row), np.asarray(column))
        top, left = row * self.tile.queries, column * self.tile.keys
        bottom = np.minimum(top + self.tile.queries, tokens) - 1
        right = np.minimum(left + self.tile.keys, tokens) - 1
        nearest = np.maximum(np.maximum(top - right, left - bottom), 0)
        touched = (top < sink) | (left < sink) | (nearest <= self.band)
        # The corner of the tile that is neither in the sink's rows nor its columns.
        inner_top, inner_left = np.maximum(top, sink), np.maximum(left, sink)
        farthest = np.maximum(bottom - inner_left, right - inner_top)
        whole = (inner_top > bottom) | (inner_left > right) | (farthest <= self.band)
        kinds = np.where(touched, TileKind.BOUNDARY, TileKind.EMPTY)
        return np.where(whole, TileKind.FULL, kinds).astype(np.int8)
