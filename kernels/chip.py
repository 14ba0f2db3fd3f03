"""What a core of a TPU v6e holds, and so which tables `kernels.tpu` can serve.

Knows nothing of jax, so that a plan can ask.
"""

from kernels.tiles import TileShape, TileTable

LANES, SUBLANES = 128, 8
# A quarter of a core's scalar memory, for the lists that say which tile comes next.
SMEM_BYTES = 256 * 2**10
# Of 128 MiB; the compiler itself needs some.
VMEM_BYTES = 112 * 2**20
# Rows and columns have this many bits in the lists.
SIDE_BITS = 12


def serves(tile: TileShape) -> bool:
    """Whether the kernels can take tiles of a shape: whole registers both ways."""
    return tile.queries % LANES == 0 and tile.keys % LANES == 0


def block_bits(table: TileTable) -> int:
    """Runs of 2^n steps are so short that no more than one head begins within each."""
    return table.tiles.bit_length() - 1


def list_bytes(table: TileTable, heads: int) -> int:
    """Bytes of the lists of a call: `kernels.tpu.WorkList`."""
    blocks = (heads * table.all_tiles >> block_bits(table)) + 1
    return 4 * (table.all_tiles + table.tiles + blocks + 3 * heads + 1)


def check(table: TileTable, heads: int, head_dim: int) -> None:
    """Checks that the kernels can serve a table.

    Args:
        table: The tiles.
        heads: The heads of a call.
        head_dim: Of each.

    Raises:
        ValueError: They cannot; says what would do.
    """
    tile = table.tile
    if not serves(tile):
        raise ValueError(
            f"tiles of {tile}; on a TPU both sides must be multiples of {LANES}"
        )
    if max(table.rows, table.columns) >= 1 << SIDE_BITS:
        raise ValueError(
            f"{table.rows} by {table.columns} tiles of {tile}, and a TPU's lists hold "
            f"up to {(1 << SIDE_BITS) - 1} each way: take larger tiles"
        )
    if (found := list_bytes(table, heads)) > SMEM_BYTES:
        raise ValueError(
            f"{table.all_tiles:,} tiles of {tile} take lists of {found:,} bytes, and a "
            f"TPU's core has {SMEM_BYTES:,} for them: take larger tiles"
        )
    # The scores, and twice what is fetched while they are computed.
    sides = tile.queries + tile.keys
    held = 4 * tile.queries * tile.keys + 8 * sides * (head_dim + 2 * LANES)
    if held > VMEM_BYTES:
        raise ValueError(
            f"tiles of {tile} take about {held >> 20} MiB of a TPU core's memory, and "
            f"{VMEM_BYTES >> 20} is what there is: take smaller tiles"
        )
