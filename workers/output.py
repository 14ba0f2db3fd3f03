"""What a host hands out: the seam between it and whoever stores things."""

import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Written:
    """A file that an output has taken.

    Attributes:
        name: Its full name, from the batch's root.
        bytes: Its size.
        crc32c: Its checksum, eight hexadecimal digits.
    """

    name: str
    bytes: int
    crc32c: str


class ClipOutput(Protocol):
    """Where one clip's files go; travels between processes by pickling."""

    clip: str
    epoch: int

    def read_text(self) -> bytes | None:
        """Returns the clip's text embeddings, None where there are none yet."""
        ...

    def write_text(self, data: bytes) -> Written:
        """Stores the clip's text embeddings, over those that may be there."""
        ...

    def read_checkpoint(self, step: int) -> bytes:
        """Returns the clip's state after `step` steps."""
        ...

    def write_checkpoint(self, step: int, data: bytes) -> Written:
        """Stores the clip's state after `step` steps."""
        ...

    def clear_shard(self, number: int) -> None:
        """Removes what an earlier attempt of this epoch has left of a shard."""
        ...

    def write_frame(self, number: int, index: int, data: bytes) -> Written:
        """Stores a frame of a shard; `index` counts in the clip, from 0."""
        ...

    def write_shard(self, number: int, data: bytes) -> Written:
        """Stores what a shard holds; after this, the shard counts as whole."""
        ...


@dataclasses.dataclass(frozen=True)
class HeadWork:
    """What the heads of self-attention did, over some steps, layers and branches.

    Attributes:
        tiles: Tiles computed.
        all_tiles: Tiles there are.
        spatial: Heads that were SPATIAL.
        temporal: Heads that were TEMPORAL.
        dense: Heads that were DENSE.
        profiled: Heads whose kind was found by profiling; the others had to be DENSE.
        online: Heads whose softmax kept a running maximum; None where that is no
            choice, on all but TPUs.
    """

    tiles: int
    all_tiles: int
    spatial: int
    temporal: int
    dense: int
    profiled: int
    online: int | None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "HeadWork":
        """Reads what `dataclasses.asdict` gave, of a later version too.

        Raises:
            ValueError: a field is missing or no count.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        counts: dict[str, Any] = {name: values.get(name) for name in names}
        if any(type(counts[n]) is not int for n in names if n != "online"):
            raise ValueError(f"heads' work is counts of {', '.join(names)}")
        return cls(**counts)

    def __add__(self, other: "HeadWork") -> "HeadWork":
        *mine, online = dataclasses.astuple(self)
        *theirs, more = dataclasses.astuple(other)
        sums = (a + b for a, b in zip(mine, theirs, strict=True))
        known = None if online is None or more is None else online + more
        return HeadWork(*sums, online=known)


@dataclasses.dataclass(frozen=True)
class Advanced:
    """What some denoising steps came to.

    Attributes:
        seconds: How long they took.
        attention: What the heads did; None for a clip that is dense throughout.
    """

    seconds: float
    attention: HeadWork | None


@dataclasses.dataclass(frozen=True)
class Decoded:
    """How far a host has decoded its clip.

    Attributes:
        frames: Frames written so far.
        shard: Name of the shard.json, "" until all frames are written.
    """

    frames: int
    shard: str
