"""Turns prompts into the token ids that the text encoder takes."""

import html
import re
from pathlib import Path

import ftfy
import numpy as np
import tokenizers
from jaxtyping import Int

END = "</s>"
PAD = "<pad>"


def clean(prompt: str) -> str:
    """Mends a prompt's text as diffusers' `WanPipeline` does.

    Broken encodings are repaired (ftfy), HTML entities resolved, twice over, and runs
    of whitespace become one space each.
    """
    prompt = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", prompt).strip()


class Tokenizer:
    """The tokenizer of a checkpoint, from its folder's tokenizer.json.

    Args:
        folder: The checkpoint's tokenizer/ folder.

    Raises:
        ValueError: if there is no tokenizer.json, if it cannot be read, or if it does
            not end prompts with `</s>` or has no `<pad>`, as UMT5's does.
    """

    def __init__(self, folder: Path | str):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{path} is missing: the tokenizer/ folder of a checkpoint in the "
                "diffusers layout holds it"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if self._tokenizer.encode("").tokens != [END]:
            raise ValueError(f"{path}: its post-processor does not add {END!r} alone")
        pad = self._tokenizer.token_to_id(PAD)
        if pad is None:
            raise ValueError(f"{path}: {PAD!r} is not in its vocabulary")
        self._pad: int = pad

    def encode(
        self, texts: list[str], length: int = 512
    ) -> tuple[Int[np.ndarray, "texts length"], Int[np.ndarray, "texts length"]]:
        """Encodes prompts, cleaned, each with `</s>` at its end.

        Args:
            texts: The prompts.
            length: Tokens of each row: longer prompts are cut (their `</s>` stays),
                shorter ones padded.

        Returns:
            The token ids and the mask (1 for a prompt's own tokens), int32.
        """
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length, pad_id=self._pad, pad_token=PAD)
        rows = [self._tokenizer.encode(clean(text)) for text in texts]
        ids = np.array([row.ids for row in rows], np.int32)
        mask = np.array([row.attention_mask for row in rows], np.int32)
        return ids.reshape(-1, length), mask.reshape(-1, length)
