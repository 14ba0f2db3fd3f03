"""Batches in a store, made without a manifest."""

import dataclasses
import json

from pipeline import names
from pipeline.batch import Batch
from pipeline.store import open_store
from workers.job import ClipJob


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
    )
    return dataclasses.replace(job, **changes)


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
            "attention": {"kinds": "dense"},
            "clips": [{"id": job.clip} for job in jobs],
        },
        "clips": clips,
        "versions": {},
        "hash": "0",
    }
    open_store(uri).create(names.BATCH, json.dumps(info).encode())
    return Batch.open(uri)
