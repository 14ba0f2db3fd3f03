"""Makes one clip: text, noise, denoising steps, frames. Knows nothing of Ray."""

import dataclasses
import functools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels import attention as tiled
from kernels import profiling
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from workers import checkpoint, samplers
from workers.job import ClipJob
from workers.models import text_encoder, transformer, vae
from workers.models.params import nest
from workers.models.tokenizer import Tokenizer
from workers.output import HeadWork
from workers.samplers import SamplerState

TEXT_LENGTH = (
    512  # tokens: prompts of every length are padded to it, as Wan was trained
)


class NumericalError(Exception):
    """Latents or frames that are not finite: trying again does not save the clip."""


@dataclasses.dataclass(frozen=True)
class ClipState:
    """A clip between two denoising steps.

    Attributes:
        job: what is being made.
        step: denoising steps done.
        text: embeddings of the guidance branches, [1 or 2, TEXT_LENGTH, text_dim].
        sampler: latents and the sampler's history, each float32
            [latent frames, height / 8, width / 8, channels].
    """

    job: ClipJob
    step: int
    text: Array
    sampler: SamplerState

    def to_tensors(self) -> dict[str, np.ndarray]:
        """Everything that a checkpoint must hold beside the job."""
        tensors = {k: np.asarray(v) for k, v in self.sampler._asdict().items()}
        return {**tensors, "text": np.asarray(self.text), "step": np.array(self.step)}

    @classmethod
    def from_tensors(cls, job: ClipJob, tensors: dict[str, np.ndarray]) -> "ClipState":
        """The state that `to_tensors` gave."""
        fields = {name: jnp.asarray(tensors[name]) for name in SamplerState._fields}
        return cls(
            job=job,
            step=int(tensors["step"]),
            text=jnp.asarray(tensors["text"]),
            sampler=SamplerState(**fields),
        )


@functools.partial(jax.jit, static_argnames=("config",))
def denoise_step(
    params: dict,
    state: SamplerState,
    text: Float[Array, "branches words text_dim"],
    timestep: Float[Array, ""],
    row: Float[Array, "9"],
    guidance: Float[Array, ""],
    attention: transformer.SparseStep | None = None,
    *,
    config: transformer.TransformerConfig,
) -> tuple[SamplerState, Array, transformer.HeadStats | None]:
    """One denoising step of one clip.

    With two branches of text, the velocity is that of the second (negative prompt)
    plus `guidance` times the difference to it (https://arxiv.org/abs/2207.12598).

    Returns:
        The next state, whether all its latents are finite, and what the heads did.
    """
    branches = text.shape[0]
    latents = jnp.broadcast_to(state.sample, (branches, *state.sample.shape))
    timesteps = jnp.broadcast_to(timestep, (branches,))
    velocity, stats = transformer.forward(
        params, config, latents, timesteps, text, attention
    )
    guided = velocity[-1] + guidance * (velocity[0] - velocity[-1])
    following = samplers.update(state, guided, row)
    return following, jnp.isfinite(following.sample).all(), stats


def _sparse_step(
    job: ClipJob, table: TileTable | None, step: int
) -> transformer.SparseStep | None:
    """How a step goes through tiles: a function of the job and the step alone.

    So a clip that goes on from a checkpoint has the same heads as one that was not
    stopped.
    """
    attention = job.attention
    if attention is None or table is None:
        return None
    key = jax.random.fold_in(jax.random.key(job.seed), step)
    return transformer.SparseStep(
        table=table,
        tolerance=attention.tolerance,
        dense_layers=attention.dense_layers,
        dense=jnp.asarray(step < attention.dense_steps),
        rows=profiling.sample(key, table.grid.tokens, attention.samples),
    )


def _head_work(table: TileTable, stats: transformer.HeadStats) -> HeadWork:
    """What the heads of one step did."""
    kinds = np.bincount(np.asarray(stats.kinds).ravel(), minlength=len(HeadKind))
    spatial, temporal, dense = kinds.tolist()
    profiled = int((~np.isnan(stats.errors).all(-1)).sum())
    return HeadWork(
        tiles=(spatial + temporal) * table.tiles + dense * table.all_tiles,
        all_tiles=(spatial + temporal + dense) * table.all_tiles,
        spatial=spatial,
        temporal=temporal,
        dense=dense,
        profiled=profiled,
        online=int(np.sum(stats.online)) if tiled.has_choice(table) else None,
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """One network of the model: its config and its tensors."""

    config: Any
    params: dict


def _load_part(
    folder: Path,
    parse: Callable[[dict[str, Any]], Any],
    shapes: Callable[[Any], dict[str, tuple[int, ...]]],
    stacked: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    dtype: str = "float32",
) -> _Part:
    config = checkpoint.read_config(folder, parse)
    tensors = checkpoint.load_tensors(
        folder, shapes(config), jnp.dtype(dtype), optional
    )
    return _Part(config, jax.tree.map(jnp.asarray, nest(tensors, stacked)))


class Denoiser:
    """A loaded model that makes clips, one at a time.

    Load it with `Denoiser.load`; a clip then goes through `encode`, `begin`,
    `advance` and `decode`.
    """

    def __init__(
        self,
        model: Path,
        tokenizer: Tokenizer,
        text: _Part,
        denoiser: _Part,
        autoencoder: _Part,
    ):
        self.model, self.tokenizer = model, tokenizer
        self._text, self._denoiser, self._vae = text, denoiser, autoencoder
        self._encode = jax.jit(
            functools.partial(text_encoder.encode, config=text.config)
        )
        self._decode_first = jax.jit(
            functools.partial(vae.decode_first, config=autoencoder.config)
        )
        self._decode_next = jax.jit(
            functools.partial(vae.decode_next, config=autoencoder.config)
        )

    @classmethod
    def load(cls, model: Path, dtype: str = "float32") -> "Denoiser":
        """Reads a model folder in the diffusers layout.

        Args:
            model: the folder.
            dtype: of the transformer's weights and activations; text encoder and VAE
                run in float32.

        Raises:
            CheckpointError: names the file or the tensor that is wrong.
        """
        model = Path(model)
        text = _load_part(
            model / "text_encoder",
            text_encoder.TextConfig.from_json,
            text_encoder.tensor_shapes,
            stacked=text_encoder.STACKED,
            # Some files hold the token embeddings a second time.
            optional=("encoder.embed_tokens.weight",),
        )
        main = _load_part(
            model / "transformer",
            transformer.TransformerConfig.from_json,
            transformer.tensor_shapes,
            stacked=("blocks",),
            dtype=dtype,
        )
        auto = _load_part(model / "vae", vae.VAEConfig.from_json, vae.tensor_shapes)
        checkpoint.check_fit(
            model,
            {
                "transformer text_dim and text encoder d_model": (
                    main.config.text_dim,
                    text.config.d_model,
                ),
                "transformer in_channels and vae z_dim": (
                    main.config.in_channels,
                    auto.config.z_dim,
                ),
                "transformer out_channels and vae z_dim": (
                    main.config.out_channels,
                    auto.config.z_dim,
                ),
            },
        )
        try:
            tokenizer = Tokenizer(model / "tokenizer")
        except (OSError, ValueError) as error:
            raise checkpoint.CheckpointError(
                f"{model / 'tokenizer'}: {error}"
            ) from error
        return cls(model, tokenizer, text, main, auto)

    def describe(self) -> dict[str, Any]:
        """What made the picture, for its provenance."""
        device = jax.devices()[0]
        networks = {"transformer": self._denoiser, "text_encoder": self._text}
        networks["vae"] = self._vae
        return {
            "model_hash": checkpoint.model_hash(self.model),
            "parameters": {
                name: sum(x.size for x in jax.tree.leaves(part.params))
                for name, part in networks.items()
            },
            "dtype": str(self._denoiser.params["proj_out"]["weight"].dtype),
            "jax": jax.__version__,
            "device": device.device_kind,
            "platform": device.platform,
            "python": platform.python_version(),
        }

    def encode(self, job: ClipJob) -> dict[str, np.ndarray]:
        """Embeddings of the prompt and the negative prompt, [TEXT_LENGTH, text_dim].

        Both are always encoded, in one batch of a fixed shape, since results of other
        shapes differ in their last bits.
        """
        prompts = [job.prompt, job.negative_prompt]
        ids, mask = self.tokenizer.encode(prompts, TEXT_LENGTH)
        text = np.asarray(self._encode(self._text.params, ids=ids, mask=mask))
        return {"prompt": text[0], "negative": text[1]}

    def latent_shape(self, job: ClipJob) -> tuple[int, int, int, int]:
        """(latent frames, height, width, channels) of a clip's latents."""
        return (
            (job.render_frames - 1) // self._vae.config.time_scale + 1,
            job.render_height // self._vae.config.space_scale,
            job.render_width // self._vae.config.space_scale,
            self._vae.config.z_dim,
        )

    def begin(self, job: ClipJob, text: dict[str, np.ndarray]) -> ClipState:
        """A clip's first state: noise for the whole clip, drawn from its seed."""
        noise = jax.random.normal(jax.random.key(job.seed), self.latent_shape(job))
        return self.begin_from(job, text, noise)

    def begin_from(
        self, job: ClipJob, text: dict[str, np.ndarray], noise: Array
    ) -> ClipState:
        """A clip's first state from given noise of `latent_shape`."""
        branches = ("prompt", "negative") if job.guidance > 1 else ("prompt",)
        return ClipState(
            job=job,
            step=0,
            text=jnp.stack([jnp.asarray(text[name]) for name in branches]),
            sampler=samplers.initial_state(jnp.asarray(noise, jnp.float32)),
        )

    def tile_table(self, job: ClipJob) -> TileTable | None:
        """The tiles of a clip's sparse heads; None for a clip that is dense."""
        attention = job.attention
        if attention is None:
            return None
        frames, height, width, _ = self.latent_shape(job)
        pt, ph, pw = self._denoiser.config.patch_size
        grid = TokenGrid(frames // pt, (height // ph) * (width // pw))
        tile = TileShape(*attention.tile)
        return TileTable(grid, tile, attention.band, attention.rounding)

    def advance(
        self, state: ClipState, steps: int
    ) -> tuple[ClipState, HeadWork | None]:
        """Takes up to `steps` denoising steps, no further than the clip's last.

        Returns:
            The clip after them, and what attention's heads did; None of a dense clip.

        Raises:
            NumericalError: latents are not finite; names the step.
        """
        job = state.job
        schedule = samplers.make_schedule(job.sampler, job.steps, job.flow_shift)
        sampler = state.sampler
        table = self.tile_table(job)
        work = None
        last = min(job.steps, state.step + steps)
        for step in range(state.step, last):
            sampler, finite, stats = denoise_step(
                self._denoiser.params,
                sampler,
                state.text,
                schedule.timesteps[step],
                schedule.rows[step],
                np.float32(job.guidance),
                _sparse_step(job, table, step),
                config=self._denoiser.config,
            )
            if not finite:
                raise NumericalError(
                    f"the latents are not finite after step {step + 1} of {job.steps}; "
                    "the checkpoint or its dtype is at fault, not the prompt"
                )
            if table is not None and stats is not None:
                done = _head_work(table, stats)
                work = done if work is None else work + done
        return dataclasses.replace(state, step=last, sampler=sampler), work

    def decode(self, state: ClipState) -> Iterator[np.ndarray]:
        """The clip's frames in order, uint8 [height, width, 3].

        Frames come as their latent frame is decoded, cropped from the centre and cut
        to what was asked for; memory does not grow with the clip's length.

        Raises:
            NumericalError: a frame is not finite; names it.
        """
        job = state.job
        top = (job.render_height - job.height) // 2
        left = (job.render_width - job.width) // 2
        cache, made = None, 0
        for latent in state.sampler.sample:
            if cache is None:
                frames, cache = self._decode_first(self._vae.params, z=latent[None])
            else:
                frames, cache = self._decode_next(
                    self._vae.params, z=latent[None], cache=cache
                )
            picture = np.asarray(frames[0], np.float32)
            if not np.isfinite(picture).all():
                raise NumericalError(
                    f"the picture is not finite from frame {made} on; the weights of "
                    "the autoencoder are at fault, not the prompt"
                )
            levels = np.rint((picture + 1) * 127.5)
            for frame in levels.astype(np.uint8)[: job.frames - made]:
                yield frame[top : top + job.height, left : left + job.width]
                made += 1
            if made == job.frames:
                return
