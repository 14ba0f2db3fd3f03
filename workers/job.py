"""What one clip asks of a slice, as plain data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ClipJob:
    """One clip: everything that decides its pixels, and nothing else.

    Plain JSON both ways: `dataclasses.asdict(job)` and `ClipJob(**d)`.

    Attributes:
        clip: The clip's id.
        prompt: What to show.
        negative_prompt: What guidance steers away from.
        seed: Seeds the noise.
        width: Width asked for, in pixels.
        height: Height asked for, in pixels.
        frames: Number of frames asked for.
        render_width: Width that the model renders, a multiple of 16 pixels.
        render_height: Height that the model renders, a multiple of 16 pixels.
        render_frames: Number of frames that the model renders, 4k + 1.
        steps: Denoising steps.
        guidance: Guidance scale; at 1.0 or less only the prompt's branch runs.
        flow_shift: Shift of the noise schedule.
        sampler: "unipc" or "euler".

    The rendered frames are cropped from the centre, `(render - asked) // 2` from
    the top left, and cut to the first `frames`.
    """

    clip: str
    prompt: str
    negative_prompt: str
    seed: int
    width: int
    height: int
    frames: int
    render_width: int
    render_height: int
    render_frames: int
    steps: int
    guidance: float
    flow_shift: float
    sampler: str
