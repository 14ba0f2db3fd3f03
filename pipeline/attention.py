"""What the heads of self-attention did, in words."""

from workers.job import SparseAttention
from workers.output import HeadWork


def skipped(work: HeadWork) -> float:
    """Returns the share of all tiles that were not computed."""
    return 1 - work.tiles / work.all_tiles


def shares(work: HeadWork) -> dict[str, float]:
    """Returns the share of heads of each kind, over steps, layers and branches."""
    heads = _heads(work)
    kinds = {"spatial": work.spatial, "temporal": work.temporal, "dense": work.dense}
    return {kind: count / heads for kind, count in kinds.items()}


def work_words(work: HeadWork) -> str:
    """Returns how many tiles were skipped, and how that came.

    As "30% of tiles skipped (30 of 100); heads: 40% spatial, 10% temporal, 50% dense
    (20% had to be, by dense_steps and dense_layers)".
    """
    count = f"{work.all_tiles - work.tiles:,} of {work.all_tiles:,}"
    kinds = ", ".join(f"{percent(x)} {kind}" for kind, x in shares(work).items())
    words = f"{percent(skipped(work))} of tiles skipped ({count}); heads: {kinds}"
    if forced := _heads(work) - work.profiled:
        share = percent(forced / _heads(work))
        words += f" ({share} had to be, by dense_steps and dense_layers)"
    if work.online is not None:
        words += f"; {percent(work.online / _heads(work))} kept a running maximum"
    return words


def setting_words(attention: SparseAttention | None) -> str:
    """Returns how a clip's heads attend, as planned."""
    if attention is None:
        return "dense"
    queries, keys = attention.tile
    return (
        f"density {attention.achieved:.3f} of {attention.density:g} asked for, "
        f"tiles of {queries}x{keys}, band {attention.band:,}, rounding "
        f"{attention.rounding}, tolerance {attention.tolerance:g}; dense: "
        f"{attention.dense_steps} first steps, {attention.dense_layers} first layers"
    )


def percent(share: float) -> str:
    """Writes a share so that little does not look like nothing: "41%", "0.4%"."""
    if 0 < share < 0.0005:
        return "under 0.1%"
    return f"{share:.0%}" if share == 0 or share >= 0.0995 else f"{share:.1%}"


def _heads(work: HeadWork) -> int:
    return work.spatial + work.temporal + work.dense
