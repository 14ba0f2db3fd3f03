"""One host of a slice: holds the model and works on one clip at a time.

All calls are short, since a call cannot be interrupted: some denoising steps, some
frames. What a clip leaves behind goes through the output handed over with it, so
that nothing here knows where or under which names things are stored.
"""

import dataclasses
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from PIL import Image

from workers.denoiser import ClipState, Denoiser
from workers.job import ClipJob
from workers.output import Advanced, ClipOutput, Decoded, Written

# Lossless at any level. Of rendered frames, level 1 makes files about a tenth
# larger than the default 6 in a third of the time.
_PNG_COMPRESSION = 1
_SHARD_VERSION = 1


class Host:
    """Renders clips on one machine; as a Ray actor, or in this very process.

    The calls for a clip, in order: `encode` (unless its embeddings are stored) and
    `begin`, or `resume`; `advance` and `checkpoint` until all steps are done;
    `decode` until it names the shard.
    """

    def __init__(self):
        self._denoiser: Denoiser | None = None
        self._output: ClipOutput | None = None
        self._state: ClipState | None = None
        self._frames: Iterator[np.ndarray] | None = None
        self._files: list[Written] = []

    def load(self, model: str) -> dict[str, Any]:
        """Loads a model's folder and returns what `Denoiser.describe` tells of it.

        Raises:
            CheckpointError: The folder is not a whole model.
        """
        self._denoiser = Denoiser.load(Path(model))
        return self._denoiser.describe()

    def encode(self, job: ClipJob, output: ClipOutput) -> Written:
        """Stores the prompts' embeddings, over those that may be there."""
        return output.write_text(safetensors.numpy.save(self._model.encode(job)))

    def begin(self, job: ClipJob, output: ClipOutput) -> None:
        """Makes a clip the current one, at its noise; `encode` came before."""
        text = output.read_text()
        if text is None:
            raise RuntimeError(f"clip {job.clip}: begin was called before encode")
        self._open(output)
        self._state = self._model.begin(job, safetensors.numpy.load(text))

    def resume(self, job: ClipJob, output: ClipOutput, step: int) -> None:
        """Makes a clip the current one, at its checkpoint after `step` steps."""
        tensors = safetensors.numpy.load(output.read_checkpoint(step))
        self._open(output)
        self._state = ClipState.from_tensors(job, tensors)

    def advance(self, steps: int) -> Advanced:
        """Does some denoising steps of the current clip.

        Raises:
            NumericalError: The latents are no longer finite; names the step.
        """
        start = time.monotonic()
        self._state, attention = self._model.advance(self._current, steps)
        return Advanced(time.monotonic() - start, attention)

    def checkpoint(self) -> Written:
        """Stores the current clip's state."""
        state, output = self._current, self._target
        tensors = state.to_tensors()
        metadata = {"clip": output.clip, "epoch": str(output.epoch)}
        data = safetensors.numpy.save(tensors, metadata | {"step": str(state.step)})
        return output.write_checkpoint(state.step, data)

    def decode(self, frames: int) -> Decoded:
        """Decodes and stores at most `frames` more frames of the current clip.

        A host holds one shard, number 0, with all frames. Where a frame cannot be
        stored, the ones before it are removed: without its shard.json a shard is
        nothing, and a full disk has then room again to say what went wrong.

        Returns:
            How far it is; with the shard's name once all is written.
        """
        output = self._target
        if self._frames is None:
            output.clear_shard(0)
            self._files = []
            self._frames = self._model.decode(self._current)
        try:
            for _ in range(min(frames, self._current.job.frames - len(self._files))):
                frame = next(self._frames, None)
                if frame is None:
                    raise RuntimeError(
                        f"the decoder ended after {len(self._files)} of "
                        f"{self._current.job.frames} frames"
                    )
                data = _png(frame)
                self._files.append(output.write_frame(0, len(self._files), data))
            if len(self._files) < self._current.job.frames:
                return Decoded(len(self._files), "")
            shard = output.write_shard(0, self._shard_json())
        except BaseException:
            self._frames = None
            output.clear_shard(0)
            raise
        self._frames = None
        return Decoded(len(self._files), shard.name)

    def _shard_json(self) -> bytes:
        job, output = self._current.job, self._target
        content = {
            "version": _SHARD_VERSION,
            "clip": output.clip,
            "epoch": output.epoch,
            "shard": 0,
            "first": 0,
            "frames": len(self._files),
            "overlap": 0,
            "width": job.width,
            "height": job.height,
            "pixel_format": "rgb24",
            "files": [
                dataclasses.asdict(file) | {"name": file.name.rpartition("/")[2]}
                for file in self._files
            ],
        }
        return json.dumps(content, indent=1).encode() + b"\n"

    def _open(self, output: ClipOutput) -> None:
        self._output = output
        self._state = None
        self._frames = None
        self._files = []

    @property
    def _model(self) -> Denoiser:
        if self._denoiser is None:
            raise RuntimeError("load was not called")
        return self._denoiser

    @property
    def _current(self) -> ClipState:
        if self._state is None:
            raise RuntimeError("no clip is open: begin or resume was not called")
        return self._state

    @property
    def _target(self) -> ClipOutput:
        if self._output is None:
            raise RuntimeError("no clip is open: begin or resume was not called")
        return self._output


def _png(frame: np.ndarray) -> bytes:
    """Returns a frame, uint8 [height, width, 3], as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG", compress_level=_PNG_COMPRESSION)
    return file.getvalue()
