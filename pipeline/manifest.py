"""The manifest: what a user asks for, as a YAML or JSON file.

    version: 1
    batch: spring
    model: demo                       # a preset of configs/models, or a local folder
    output: ./renders
    defaults: {size: 128x128, frames: 81, fps: 16, steps: 20, guidance: 3.0}
    attention: {kinds: auto, density: 0.38, dense_steps: 0.2, dense_layers: 1}
    encode: {codec: h264, crf: 18}
    clips:
      - {id: opening, prompt: "a red circle moving left", seed: 7}

A clip's settings are its own, else those of `defaults`, else those of the model's
preset. A manifest is untrusted: what becomes part of a file's name is letters, digits
and dashes, and everything else in it is data.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from pipeline.document import Document, Fault, read_document
from pipeline.schema import Checked, check, shorten

# One clip's side: 8K video, and half the places of Wan's rotary table.
MOST_PIXELS = 8192
# Wan's rotary table has 1024 places in time, each a latent frame: 4 * 1023 + 1.
MOST_FRAMES = 4093
# The noise's key has 32 bits; jax would cut a larger seed without a word.
MOST_SEED = 2**32 - 1

# A side of a tile: matrix units take multiples of 16 (GPUs) or of more (TPUs).
LEAST_TILE, MOST_TILE = 16, 8192

_SIZE = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")
_FPS = re.compile(r"([0-9]{1,6})(?:/([0-9]{1,4}))?")
# Line breaks and tabs are the only control characters that a prompt may hold.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BROADCAST = {
    "23.976": "24000/1001",
    "23.98": "24000/1001",
    "29.97": "30000/1001",
    "47.952": "48000/1001",
    "59.94": "60000/1001",
    "119.88": "120000/1001",
}


def parse_size(text: str) -> tuple[int, int]:
    """Returns the width and height, in pixels, that "1280x720" says.

    Raises:
        ValueError: It says none, or one that is odd or absurd.
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError(
            f"{shorten(repr(text))} is no size; give WIDTHxHEIGHT in pixels, as "
            "1280x720"
        )
    width, height = int(match[1]), int(match[2])
    for name, side in (("width", width), ("height", height)):
        if not 2 <= side <= MOST_PIXELS:
            raise ValueError(
                f"a {name} of {side} pixels; give an even number from 2 to "
                f"{MOST_PIXELS}"
            )
    if width % 2 or height % 2:
        even = f"{width + width % 2}x{height + height % 2}"
        raise ValueError(
            f"{text} is odd, and a colour sample of video stands for 2x2 pixels; give "
            f"even numbers, as {even}"
        )
    return width, height


def _check_size(text: str) -> str:
    width, height = parse_size(text)
    return f"{width}x{height}"


def _parse_fps(value: Any) -> Fraction | None:
    if value is None:
        return None
    match = _FPS.fullmatch(str(value)) if type(value) in (int, str, Fraction) else None
    right = 'a whole number, as 16, or a fraction in quotes, as "24000/1001"'
    if not match or (match[2] and not int(match[2])):
        exact = _BROADCAST.get(str(value))
        right = f'"{exact}", which is that rate exactly' if exact else right
        raise ValueError(f"{shorten(repr(value))} is no frame rate; give {right}")
    fps = Fraction(int(match[1]), int(match[2] or 1))
    if not 1 <= fps <= 240:
        raise ValueError(f"{fps} frames per second; give {right}, from 1 to 240")
    return fps


def _check_text(text: str) -> str:
    if control := _CONTROL.search(text):
        raise ValueError(f"holds the control character {control[0]!r}; remove it")
    return text


def _check_prompt(text: str) -> str:
    if not text.strip():
        raise ValueError("empty; give a sentence that says what the clip shows")
    return _check_text(text)


def _check_version(number: int) -> int:
    if number != 1:
        raise ValueError(f"{number} is not known to this version, which reads 1")
    return number


def parse_tile(text: str) -> tuple[int, int]:
    """Returns the queries and keys of a tile that "64x64" says.

    Raises:
        ValueError: It says none, or sides that no hardware takes.
    """
    match = _SIZE.fullmatch(text)
    sides = (int(match[1]), int(match[2])) if match else ()
    if not sides or any(n % 16 or not LEAST_TILE <= n <= MOST_TILE for n in sides):
        raise ValueError(
            f"{shorten(repr(text))} is no tile; give QUERIESxKEYS, multiples of "
            f"16 from {LEAST_TILE} to {MOST_TILE}, as 64x64"
        )
    return sides


def _check_tile(text: str) -> str:
    queries, keys = parse_tile(text)
    return f"{queries}x{keys}"


_NAME_FIELD = Field(
    pattern=r"^[a-z0-9][a-z0-9-]*$",
    max_length=64,
    description="up to 64 lower-case letters, digits and dashes, no dash first",
)
_Text = Annotated[str, Field(max_length=10_000), AfterValidator(_check_text)]
_Path = Annotated[
    str, Field(min_length=1, max_length=4096), AfterValidator(_check_text)
]


class Settings(Checked):
    """What decides a clip beside its prompt; None where it is not said."""

    size: Annotated[str, AfterValidator(_check_size)] | None = Field(
        default=None, description="WIDTHxHEIGHT in pixels, as 1280x720"
    )
    frames: int | None = Field(
        default=None,
        ge=1,
        le=MOST_FRAMES,
        description=f"a whole number from 1 to {MOST_FRAMES}",
    )
    fps: Annotated[
        Fraction | None,
        BeforeValidator(_parse_fps),
        PlainSerializer(lambda fps: None if fps is None else str(fps)),
    ] = Field(
        default=None, description='a whole number, or a fraction, as "24000/1001"'
    )
    steps: int | None = Field(
        default=None, ge=1, le=1000, description="a whole number from 1 to 1000"
    )
    guidance: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="a number from 0 to 100 (at 1 or less, the prompt alone counts)",
    )
    flow_shift: float | None = Field(
        default=None, gt=0, le=100, description="a number over 0, up to 100"
    )
    sampler: Literal["unipc", "euler"] | None = Field(
        default=None, description="unipc or euler"
    )
    negative_prompt: _Text | None = Field(
        default=None, description="text of up to 10,000 characters; it may be empty"
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MOST_SEED,
        description=f"a whole number from 0 to {MOST_SEED}",
    )
    priority: int | None = Field(
        default=None,
        ge=-1_000_000,
        le=1_000_000,
        description="a whole number; larger ones are rendered first",
    )

    def over(self, base: "Settings") -> dict[str, Any]:
        """Returns these settings, with those of `base` where nothing is said."""
        return {
            name: getattr(base if getattr(self, name) is None else self, name)
            for name in Settings.model_fields
        }


class Clip(Settings):
    """One video to make."""

    id: str = _NAME_FIELD
    prompt: Annotated[str, Field(max_length=10_000), AfterValidator(_check_prompt)] = (
        Field(description="a sentence, up to 10,000 characters")
    )


class Attention(Checked):
    """How attention is computed.

    What is not said of density and tile is chosen for each clip by the plan.
    """

    kinds: Literal["auto", "dense"] = Field(
        default="auto",
        description="auto (heads are profiled while rendering) or dense",
    )
    density: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="a number over 0, up to 1: the share of tiles that a sparse head "
        "may compute",
    )
    dense_steps: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="a number from 0 to 1: the share of first steps that are dense",
    )
    dense_layers: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="a whole number from 0 to 1000: the first layers that are dense",
    )
    tolerance: float = Field(
        default=0.15,
        ge=0,
        le=1000,
        description="a number from 0 to 1000: the largest relative error of a head "
        "that is sparse",
    )
    tile: Annotated[str, AfterValidator(_check_tile)] | None = Field(
        default=None, description="QUERIESxKEYS, as 64x64"
    )
    rounding: Literal["tile", "exact"] = Field(
        default="tile",
        description="tile (whole tiles) or exact (masked within them)",
    )


class Encode(Checked):
    """How videos are encoded."""

    codec: Literal["h264"] = Field(
        default="h264", description="h264, the one codec of this version"
    )
    crf: int = Field(
        default=18,
        ge=0,
        le=51,
        description="a whole number from 0 (lossless) to 51 (worst); 18 looks lossless",
    )


class Manifest(Checked):
    """A batch of clips; see the module's text."""

    version: Annotated[int, AfterValidator(_check_version)] = Field(description="1")
    batch: str = _NAME_FIELD
    model: _Path = Field(description="a preset's name, as demo, or a model's folder")
    output: _Path | None = Field(
        default=None, description="the folder for the batch's folder"
    )
    defaults: Settings = Field(
        default=Settings(), description="a mapping of settings that clips share"
    )
    attention: Attention = Field(
        default=Attention(), description="a mapping with kinds: auto or dense"
    )
    encode: Encode = Field(default=Encode(), description="{codec: h264, crf: 18}")
    clips: list[Clip] = Field(
        min_length=1, max_length=10_000, description="a list of 1 to 10,000 clips"
    )

    def understood(self, preset: Settings) -> "Manifest":
        """Returns the manifest with every setting in its clip, and nowhere else.

        Two manifests that ask for the same are equal after this.

        Args:
            preset: The model's settings, all of them said.
        """
        shared = Settings(**self.defaults.over(preset))
        clips = [clip.model_copy(update=clip.over(shared)) for clip in self.clips]
        return self.model_copy(update={"clips": clips, "defaults": Settings()})


def load_manifest(path: Path) -> Manifest:
    """Reads and checks a manifest; raises as `check_manifest` and `read_document`."""
    return check_manifest(read_document(path))


def check_manifest(document: Document) -> Manifest:
    """Returns a document as a manifest.

    Raises:
        RequestError: It is none; names file, line, field, remedy.
    """
    return check(document, Manifest, list(_repeated_ids(document)))


def _repeated_ids(document: Document) -> Iterator[Fault]:
    clips = document.value.get("clips") if isinstance(document.value, dict) else None
    first: dict[str, int] = {}
    for index, clip in enumerate(clips if isinstance(clips, list) else []):
        name = clip.get("id") if isinstance(clip, dict) else None
        place = ("clips", index, "id")
        if not isinstance(name, str):
            continue
        line = document.line(place)
        if name in first:
            message = (
                f"{shorten(repr(name))} is taken by the clip on line {first[name]}"
            )
            yield Fault(line, place, f"{message}; give each clip its own")
        else:
            first[name] = line
