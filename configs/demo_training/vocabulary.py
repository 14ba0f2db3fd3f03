"""The demo model's tokenizer: one token a word, lower case, `</s>` at the end."""

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from configs.demo_training import draw

SPECIAL = ("<pad>", "</s>", "<unk>")
WORDS = SPECIAL + tuple(
    sorted(
        {*draw.COLOURS, *draw.SHAPES, *draw.DIRECTIONS}
        | {
            word
            for phrase in draw.PHRASES
            for word in phrase.split()
            if "{" not in word
        }
    )
)
LONGEST = 8  # tokens of the longest phrase and its end
UNPROMPTED = 0.12  # share of clips trained without a prompt, for guidance


def tokenizer() -> Tokenizer:
    """The tokenizer that tokenizer.json holds."""
    result = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>")
    )
    result.normalizer = normalizers.Lowercase()
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    result.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return result


def random_prompts(
    rng: np.random.Generator, words: list[tuple[str, str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask [clips, LONGEST] of a random phrase for each clip."""
    encode = tokenizer()
    ids = np.zeros((len(words), LONGEST), np.int64)
    mask = np.zeros_like(ids)
    for row, (colour, shape, direction) in enumerate(words):
        phrase = draw.PHRASES[rng.integers(len(draw.PHRASES))]
        text = phrase.format(colour=colour, shape=shape, direction=direction)
        if rng.random() < UNPROMPTED:
            text = ""
        tokens = encode.encode(text).ids
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return ids, mask
