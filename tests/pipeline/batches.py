"""Batches in a store, made without a manifest."""

import dataclasses
import json
from typing import Any

from pipeline import names
from pipeline.batch import Batch
from pipeline.store import open_store
from workers.job import ClipJob, SparseAttention

# Of a clip of 3 latent frames of 4 tokens: a frame's tokens a tile, 7 of 9 computed.
# No head of random weights differs by ten times what it should be.
SPARSE = SparseAttention(
    band=0,
    tile=(4, 4),
    rounding="tile",
    density=0.8,
    achieved=7 / 9,
    dense_steps=1,
    dense_layers=1,
    tolerance=10.0,
)


def small_job(clip: str = "a", **changes) -> ClipJob:
    """Returns a job that the tiny model does in no time."""
    job = ClipJob(
        clip=clip,
        prompt="a red circle",
        negative_prompt="",
        seed=7,
        width=30,
        height=28,
        frames=6,
        render_width=32,
        render_height=32,
        render_frames=9,
        steps=4,
        guidance=3.0,
        flow_shift=3.0,
        sampler="unipc",
        attention=SPARSE,
    )
    return dataclasses.replace(job, **changes)


def work(tiles: int, online: int | None = None) -> dict[str, Any]:
    """Returns what a step's event says of attention: `tiles` of 1,000 computed."""
    heads = {"spatial": 50, "temporal": 20, "dense": 30, "profiled": 75}
    return {"tiles": tiles, "all_tiles": 1000, **heads, "online": online}


def make_batch(uri: str, jobs: list[ClipJob]) -> Batch:
    """Writes batch.json for some jobs and opens the batch."""
    clips = [
        {
            "job": dataclasses.asdict(job),
            "priority": 0,
            "fps": "16",
            "encode": {"codec": "h264", "crf": 18},
            "cost": 1.0,
        }
        for job in jobs
    ]
    info = {
        "version": 1,
        "batch": "spring",
        "model": "tiny",
        "manifest": {
            "clips": [{"id": job.clip} for job in jobs],
        },
        "clips": clips,
        "versions": {},
        "hash": "0",
    }
    open_store(uri).create(names.BATCH, json.dumps(info).encode())
    return Batch.open(uri)
