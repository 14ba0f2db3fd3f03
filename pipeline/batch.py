"""A batch in the store: what batch.json says of it, and its clips' events."""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from pipeline import names
from pipeline.errors import RequestError
from pipeline.events import EventLog
from pipeline.plan import Plan
from pipeline.store import Exists, Missing, Store, open_store
from workers.job import ClipJob

_VERSION = 1
_PACKAGES = (
    "tilereel",
    "apache-beam",
    "ffmpeg-python",
    "imageio-ffmpeg",
    "jax",
    "jaxlib",
    "numpy",
    "pillow",
    "ray",
    "safetensors",
    "tokenizers",
)
_MOST_DIFFERENCES = 20


@dataclasses.dataclass(frozen=True)
class BatchClip:
    """One clip of a batch, in the order in which clips are dealt.

    Attributes:
        job: Everything that decides its pixels.
        priority: Larger ones are rendered first.
        fps: Frames per second, exact.
        encode: How its video is encoded: {"codec": ..., "crf": ...}.
        cost: How long it takes, relative to the batch's other clips.
    """

    job: ClipJob
    priority: int
    fps: Fraction
    encode: dict[str, Any]
    cost: float


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch in the store. Made by `Batch.open` or `begin`.

    Attributes:
        uri: Its root, OUTPUT/BATCH: an absolute path or a URI.
        store: The store at that root.
        info: All of batch.json: "batch" (its name), "manifest" (as understood),
            "model", "hash" (of all that is fixed), "versions" (of what began it).
        clips: Its clips, in the order in which they are dealt.
        log: Its clips' events.
    """

    uri: str
    store: Store
    info: dict[str, Any]
    clips: tuple[BatchClip, ...]
    log: EventLog

    @classmethod
    def open(cls, uri: str) -> "Batch":
        """Opens a batch that is in the store.

        Raises:
            RequestError: There is none, or its batch.json is damaged.
            StoreError: The store cannot be read.
        """
        store = open_store(uri)
        try:
            info = json.loads(store.read(names.BATCH))
            if info["version"] != _VERSION:
                raise ValueError("its version is unknown to this version of Tilereel")
            clips = tuple(_clip(fields) for fields in info["clips"])
        except Missing:
            raise RequestError(
                f"{uri} is no batch: it holds no {names.BATCH}; give the folder that "
                "`tilereel render` named (OUTPUT/BATCH)"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(
                f"{store.url(names.BATCH)} is damaged: {error!r}; delete it and "
                "render the manifest again to have it written anew"
            ) from error
        return cls(uri, store, info, clips, EventLog(store))

    @property
    def name(self) -> str:
        """The batch's name."""
        return self.info["batch"]


def begin(plan: Plan) -> Batch:
    """Writes batch.json for a plan, or finds the one that is there to be the same.

    Args:
        plan: What to render, and where.

    Returns:
        The batch at OUTPUT/BATCH.

    Raises:
        RequestError: A batch of this name with another content is there; the
            message shows the difference.
        StoreError: The store cannot be read or written.
    """
    uri = f"{plan.output.rstrip('/')}/{plan.batch}"
    store = open_store(uri)
    info = _info(plan)
    data = json.dumps(info, indent=1, ensure_ascii=False).encode() + b"\n"
    try:
        store.create(names.BATCH, data)
    except Exists:
        batch = Batch.open(uri)
        _refuse_changes(batch, json.loads(data))
        return batch
    return Batch.open(uri)


def find_batches(output: str) -> list[str]:
    """Returns the roots of the batches at an output: it may be one, or hold some.

    Raises:
        RequestError: There is none.
        StoreError: The store cannot be read.
    """
    output = output.rstrip("/")
    store = open_store(output)
    if names.BATCH in store.list(names.BATCH):
        return [store.url(names.BATCH).removesuffix(f"/{names.BATCH}")]
    found = [f for f in store.folders("") if store.list(f"{f}/{names.BATCH}")]
    if not found:
        raise RequestError(
            f"{output} holds no batch; give the output of a `tilereel render`, or the "
            "batch's folder in it"
        )
    return [store.url(folder) for folder in found]


def _clip(fields: dict[str, Any]) -> BatchClip:
    rest = dict(fields)
    job = ClipJob.from_json(rest.pop("job"))
    return BatchClip(
        job=job,
        priority=rest["priority"],
        fps=Fraction(rest["fps"]),
        encode=rest["encode"],
        cost=rest["cost"],
    )


def _info(plan: Plan) -> dict[str, Any]:
    info = {
        "version": _VERSION,
        "batch": plan.batch,
        "model": plan.model.name,
        "manifest": plan.manifest.model_dump(mode="json"),
        "clips": [
            {
                "job": dataclasses.asdict(clip.job),
                "priority": clip.priority,
                "fps": str(Fraction(clip.fps)),
                "encode": clip.encode.model_dump(mode="json"),
                "cost": clip.cost,
            }
            for clip in plan.clips
        ],
        "versions": versions(),
    }
    canonical = json.dumps(_fixed(info), sort_keys=True).encode()
    return info | {"hash": hashlib.sha256(canonical).hexdigest()}


def _fixed(info: dict[str, Any]) -> dict[str, Any]:
    """Returns what may not change under one batch name: all that shows in videos.

    The order of the clips and where the batch lies may change, and so may what
    planning thinks a clip costs.
    """
    clips = {}
    for clip in info["clips"]:
        settings = {key: value for key, value in clip.items() if key != "cost"}
        # Jobs of the first batches had no attention: theirs was dense.
        job = {"attention": None} | settings.pop("job")
        clips[job["clip"]] = settings | job
    return {"model": info["model"], "clips": clips}


def versions() -> dict[str, str]:
    """Returns the versions of all that takes part in a render."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _refuse_changes(batch: Batch, info: dict[str, Any]) -> None:
    old, new = _fixed(batch.info), _fixed(info)
    lines = [f"  {line}" for line in _differences(old, new)]
    if not lines:
        return
    shown = lines[:_MOST_DIFFERENCES]
    if len(lines) > len(shown):
        shown.append(f"  and {len(lines) - len(shown)} more")
    dense = all(clip.job.attention is None for clip in batch.clips)
    if dense and any(".attention: null" in line for line in lines):
        shown.append(
            "The batch was begun dense, as all were in earlier versions: "
            "`attention: {kinds: dense}` goes on with it."
        )
    raise RequestError(
        f"batch {batch.name} at {batch.uri} was begun with another manifest "
        "(there -> now):\n" + "\n".join(shown) + "\nGive the changed manifest "
        "another batch name, or change it back to go on with this batch"
    )


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yields a line for each value of nested mappings that is not the same in both."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            inner = f"{path}.{key}" if path else key
            if key not in new:
                yield f"{inner}: gone"
            elif key not in old:
                yield f"{inner}: new"
            else:
                yield from _differences(old[key], new[key], inner)
    elif old != new:
        yield f"{path}: {json.dumps(old)} -> {json.dumps(new)}"
