"""Tiny models to train prompts of, made on the spot: causal ones, masked ones, and ones with a head; their tokenizers."""

from __future__ import annotations

import functools
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests import tiny_hf

WORDS = (
    "the film was good and the food is great; a bad play, a terrible meal, it is what it was.\n",
    "the sea is blue and wide, the rose is red, a lake is deep and cold\n",
    "my card was charged twice: one charge is only held and goes back in three days\n",
)
FRAME = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BERT_FRAME = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

gpt2 = tiny_hf.gpt2
llama = tiny_hf.llama
causal_tokenizer = tiny_hf.byte_tokenizer


def roberta_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pieces; two texts stand as <s> a </s></s> b </s>."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    given = named | {"unk_token": "<unk>", "mask_token": "<mask>"}
    tokenizer = Tokenizer.from_str(tiny_hf.trained_on_bytes(WORDS, 400, FRAME))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given)


@functools.cache
def _bert_trained() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(BERT_FRAME))
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer.to_str()


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """Word pieces; the second of two texts is of another type."""
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    made = Tokenizer.from_str(_bert_trained())
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **named,
    )


def _encoder(config: str, **options: Any) -> Any:
    given: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.3,
    }
    return getattr(transformers, config)(**(given | options))


def roberta(kind: str = "RobertaForMaskedLM", *, context: int = 128, **options: Any) -> Any:
    """Positions that begin behind the padding id."""
    given: dict[str, Any] = {"vocab_size": 400, "max_position_embeddings": context + 2, "type_vocab_size": 1}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = _encoder("RobertaConfig", **(given | ids | options))
    return tiny_hf._made(kind, config)


def bert(kind: str = "BertForSequenceClassification", *, context: int = 128, **options: Any) -> Any:
    """Two types of tokens, and a pooler under the head."""
    config = _encoder("BertConfig", vocab_size=300, max_position_embeddings=context, **options)
    return tiny_hf._made(kind, config)


def roformer(kind: str = "RoFormerForSequenceClassification", **options: Any) -> Any:
    """No positions: how far two tokens are apart is seen from their places."""
    config = _encoder("RoFormerConfig", vocab_size=300, max_position_embeddings=128, pad_token_id=0, **options)
    return tiny_hf._made(kind, config)
