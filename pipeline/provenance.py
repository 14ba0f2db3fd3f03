"""How a clip's video came to be, as the JSON file that lies beside it."""

import dataclasses
import hashlib
import json
from typing import Any

from pipeline.attention import shares
from pipeline.batch import Batch, BatchClip, versions
from pipeline.events import ClipStatus
from pipeline.ffmpeg import find_ffmpeg
from pipeline.store import checksum
from workers.output import HeadWork

_VERSION = 1
# The IPTC's name for media made by a trained model, which editors and archives read:
# https://cv.iptc.org/newscodes/digitalsourcetype/
_SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"


def provenance(
    batch: Batch,
    clip: BatchClip,
    status: ClipStatus,
    files: dict[str, bytes],
    stitch_seconds: float,
) -> bytes:
    """Returns the provenance of a clip's video as JSON.

    Args:
        batch: The clip's batch.
        clip: The clip.
        status: What its events say, for the model that made it and the timings.
        files: What is published of it: name in the store -> content.
        stitch_seconds: How long it took to make the video of the frames.
    """
    settings = dataclasses.asdict(clip.job)
    name, prompt, negative_prompt, seed = (
        settings.pop(key) for key in ("clip", "prompt", "negative_prompt", "seed")
    )
    settings |= {"fps": str(clip.fps), "encode": clip.encode}
    engine = dict(status.engine)
    model = {"name": batch.info["model"], "hash": engine.pop("model_hash", None)}
    seconds = status.seconds | {"stitch": round(stitch_seconds, 3)}
    fields = {
        "version": _VERSION,
        "machine_made": True,
        "digital_source_type": _SOURCE_TYPE,
        "batch": batch.name,
        "clip": name,
        "manifest_hash": batch.info["hash"],
        "model": model,
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "seed": seed,
        "settings": settings,
        "attention": _attention(status.attention),
        "files": {key: _digests(data) for key, data in files.items()},
        "shards": list(status.shards),
        "seconds": seconds,
        "rendered_with": engine,
        "stitched_with": versions() | {"ffmpeg": find_ffmpeg().version},
    }
    return json.dumps(fields, indent=1, ensure_ascii=False).encode() + b"\n"


def _attention(work: HeadWork | None) -> dict[str, Any]:
    """Returns what attention's heads did; what was planned is in the settings."""
    if work is None:
        return {"kinds": {"dense": 1.0}}
    return {
        "tiles_computed": work.tiles,
        "tiles": work.all_tiles,
        "kinds": {kind: round(share, 4) for kind, share in shares(work).items()},
    }


def speaks_of(provenance: bytes, files: dict[str, bytes]) -> bool:
    """Tells whether a provenance file is that of these very files."""
    try:
        known = json.loads(provenance)["files"]
    except (ValueError, TypeError, KeyError):
        return False
    return known == {key: _digests(data) for key, data in files.items()}


def _digests(data: bytes) -> dict[str, Any]:
    return {
        "bytes": len(data),
        "crc32c": checksum(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
