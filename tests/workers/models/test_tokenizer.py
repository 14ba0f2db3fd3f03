import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from workers.models.tokenizer import Tokenizer, clean

WORDS = ["<pad>", "</s>", "<unk>", "\N{LOWER ONE EIGHTH BLOCK}", "a", "red", "circle"]


def save(folder, words=WORDS, template="$A </s>"):
    """A unigram tokenizer of the kind of UMT5's."""
    unigram = models.Unigram([(word, -1.0 * len(word)) for word in words], unk_id=2)
    result = tokenizers.Tokenizer(unigram)
    result.pre_tokenizer = pre_tokenizers.Metaspace()
    result.add_special_tokens(["<pad>", "</s>", "<unk>"])
    if template:
        result.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("</s>", 1)]
        )
    # As published ones do, it may carry settings of its own.
    result.enable_truncation(3)
    result.enable_padding(length=4)
    result.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save(tmp_path_factory.mktemp("tokenizer")))


def test_a_prompt_ends_with_its_end_token_and_is_padded_to_512(tokenizer):
    ids, mask = tokenizer.encode(["a red circle", ""])
    assert ids.dtype == mask.dtype == np.int32
    assert ids.shape == mask.shape == (2, 512)
    own = ids[0, : mask[0].sum()].tolist()
    assert [WORDS[i] for i in own if i != 3] == ["a", "red", "circle", "</s>"]
    assert mask.sum(1).tolist() == [len(own), 1]
    assert not ids[mask == 0].any()
    assert ids[1, 0] == 1


def test_a_long_prompt_is_cut_and_keeps_its_end(tokenizer):
    ids, mask = tokenizer.encode(["red " * 600, "a"], length=512)
    assert mask.sum(1)[0] == 512
    assert ids[0, -1] == 1
    assert (ids[0] == 1).sum() == 1
    short, _ = tokenizer.encode(["red " * 600], length=8)
    np.testing.assert_array_equal(short[0, :7], ids[0, :7])


def test_no_prompts_give_no_rows(tokenizer):
    ids, mask = tokenizer.encode([])
    assert ids.shape == mask.shape == (0, 512)


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("  a \n\t red   circle ", "a red circle"),
        ("salt &amp;amp; pepper &lt;3", "salt & pepper <3"),
        ("The MoneyÃ¢â‚¬â„¢s", "The Money's"),
        ("\N{LEFT DOUBLE QUOTATION MARK}hi\N{RIGHT DOUBLE QUOTATION MARK}", '"hi"'),
        ("a\N{NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}b", "a b"),
        ("half \ud83d of a pair", "half \N{REPLACEMENT CHARACTER} of a pair"),
        ("", ""),
    ],
)
def test_prompts_are_mended(prompt, cleaned):
    assert clean(prompt) == cleaned


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=40))
def test_any_text_is_encoded(tokenizer, text):
    ids, mask = tokenizer.encode([text], length=16)
    count = mask.sum()
    assert ids[0, count - 1] == 1
    assert mask[0].tolist() == [1] * count + [0] * (16 - count)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("template", [None, "</s> $A </s>"])
def test_a_tokenizer_that_does_not_end_prompts_is_refused(tmp_path, template):
    with pytest.raises(ValueError, match="post-processor"):
        Tokenizer(save(tmp_path, template=template))


def test_a_tokenizer_without_padding_is_refused(tmp_path):
    path = save(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text().replace("<pad>", "<nil>"))
    with pytest.raises(ValueError, match="'<pad>'"):
        Tokenizer(tmp_path)
