"""Every name under OUTPUT/BATCH, made and read in this one place.

All names are relative to the batch's root and use "/"; see `pipeline.store`.
"""

import re

_NUMBERED = re.compile(r"(?:^|/)(?:step-|frame-)?(\d+)(?:\.[a-z]+)?$")

BATCH = "batch.json"
REPORT = "index.html"
LEASES = "lease/"
CLIPS = "clips/"
VIDEOS = "videos/"


def lease(epoch: int) -> str:
    """Returns the name of the lease that began an epoch."""
    return f"{LEASES}{epoch:04d}.json"


def events(clip: str) -> str:
    """Returns what the names of all events of a clip begin with."""
    return f"{CLIPS}{clip}/state/"


def event(clip: str, number: int) -> str:
    """Returns the name of a clip's event; numbers count from 1."""
    return f"{events(clip)}{number:04d}.json"


def text(clip: str) -> str:
    """Returns the name of a clip's text embeddings."""
    return f"{CLIPS}{clip}/text.safetensors"


def checkpoints(clip: str) -> str:
    """Returns what the names of all checkpoints of a clip begin with."""
    return f"{CLIPS}{clip}/checkpoints/"


def checkpoint(clip: str, step: int) -> str:
    """Returns the name of a clip's state after `step` denoising steps."""
    return f"{checkpoints(clip)}step-{step:04d}.safetensors"


def shards(clip: str) -> str:
    """Returns what the names of all shards of a clip begin with."""
    return f"{CLIPS}{clip}/shards/"


def shard(clip: str, epoch: int, number: int) -> str:
    """Returns what all names of one shard begin with; shards count from 0."""
    return f"{shards(clip)}{epoch:04d}/{number:03d}/"


def frame_file(index: int) -> str:
    """Returns the last part of a frame's name; `index` counts in the clip, from 0."""
    return f"frame-{index:06d}.png"


def frame(clip: str, epoch: int, number: int, index: int) -> str:
    """Returns the name of a frame of a shard; `index` counts in the clip, from 0."""
    return shard(clip, epoch, number) + frame_file(index)


def shard_json(clip: str, epoch: int, number: int) -> str:
    """Returns the name of the file that says what a shard holds."""
    return f"{shard(clip, epoch, number)}shard.json"


def video(clip: str, extension: str = "mp4") -> str:
    """Returns the name of a clip's video."""
    return f"{VIDEOS}{clip}.{extension}"


def provenance(clip: str) -> str:
    """Returns the name of the file that says how a clip's video came to be."""
    return f"{VIDEOS}{clip}.json"


def sheet(clip: str) -> str:
    """Returns the name of a clip's contact sheet."""
    return f"{VIDEOS}{clip}.webp"


def number(name: str) -> int | None:
    """Returns the number in an event's, lease's, checkpoint's or frame's name.

    None for a name that is none of ours, so that a stray file does no harm.
    """
    match = _NUMBERED.search(name)
    return int(match.group(1)) if match else None
