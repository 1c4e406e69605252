"""Pipelines of transformers and sentence-transformers around a model that is attached, or is refused in words."""

from pathlib import Path
from typing import Any

import pytest
import torch

import graphdispatch as gd

transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("input_ids", "attention_mask", "token_type_ids")
TEXTS = [["abc def", "hello you", "some words here"], ["x y z"] * 2, ["one two", "three"], ["qwe rty uio", "a b c"]]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A BERT of two layers and its tokenizer of letters."""
    letters = [chr(97 + place) for place in range(26)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_pipeline_of_transformers_is_served(folder: str) -> None:
    """Its model is attached; texts of other lengths are padded, and features are those of eager."""
    pipe = transformers.pipeline("feature-extraction", model=folder, device="cpu")
    expected = [pipe(texts) for texts in TEXTS]
    shape: Any = {0: "batch", 1: gd.Dim("length", [8, 16, 32])}
    handle = gd.attach(pipe.model, dynamic=dict.fromkeys(NAMES, shape), sizes=(1, 4))
    for _ in range(8):
        for texts, features in zip(TEXTS, expected, strict=True):
            for got, wanted in zip(pipe(texts), features, strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), atol=1e-5, rtol=1e-4)
    assert handle.stats.hits > handle.stats.calls // 2, handle.health()


@pytest.fixture
def encoder(folder: str) -> Any:
    """A sentence-transformers model around it."""
    modules = pytest.importorskip("sentence_transformers.models")
    transformer = modules.Transformer(folder, max_seq_length=32)
    return sentence_transformers.SentenceTransformer(modules=[transformer, modules.Pooling(32)], device="cpu")


def test_the_model_of_a_sentence_transformer_is_served(encoder: Any, tmp_path: Path) -> None:
    """Its owner calls ``forward``, which is attached; texts are padded, and the model is saved as before."""
    expected = [encoder.encode(texts, convert_to_tensor=True) for texts in TEXTS]
    shape: Any = {0: "batch", 1: gd.Dim("length", [8, 16, 32])}
    options = gd.CUDAGraphOptions(capture_share=None)
    handle = gd.attach(
        encoder[0].auto_model, method="forward", dynamic=dict.fromkeys(NAMES, shape), sizes=(1, 4), options=options
    )
    for _ in range(40):  # token types that are all zero are compared sixteen times for each shape
        for texts, embeddings in zip(TEXTS, expected, strict=True):
            got = encoder.encode(texts, convert_to_tensor=True)
            torch.testing.assert_close(got, embeddings, atol=1e-5, rtol=1e-4)
    assert handle.stats.hits > handle.stats.calls // 2, handle.health()
    encoder.save(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(again.encode(TEXTS[0], convert_to_tensor=True), expected[0])
    encoder.to(torch.float64)
    assert encoder.encode(TEXTS[0], convert_to_tensor=True).dtype is torch.float64


def test_a_module_of_a_sentence_transformer_answers_as_before(encoder: Any) -> None:
    """It is given a mapping of a class that torch does not know, and writes its result into it: refused in words."""
    expected = [encoder.encode(texts, convert_to_tensor=True) for texts in TEXTS]
    handle = gd.attach(encoder[0], dynamic={f"features['{name}']": 0 for name in NAMES}, sizes=(4,))
    for _ in range(3):
        for texts, embeddings in zip(TEXTS, expected, strict=True):
            torch.testing.assert_close(encoder.encode(texts, convert_to_tensor=True), embeddings)
    assert set(handle.stats.reasons) == {gd.Reason.NO_TENSORS}
    assert "BatchEncoding" in handle.last_decision.explain()
