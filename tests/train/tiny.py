"""A random two-layer target with its tokenizer, and token shards for it."""

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle_fsd.draft_head import DraftHead, DraftHeadConfig
from eagle_fsd.files import write_json
from train.prepare import tokenizer_identity
from train.shards import (
    FORMAT_NAME,
    FORMAT_VERSION,
    META_FILE,
    ShardWriter,
    token_dtype,
)

V, H = 128, 32


def tiny_config(vocab_size=V, hidden_size=H, **changes):
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    return LlamaConfig(**(fields | changes))


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.2, **changes)).eval()
    model.requires_grad_(False)
    model.lm_head.weight *= 3  # a law with something to learn, not a nearly uniform one
    return model


def tiny_head(seed=0, bias=False, **changes):
    torch.manual_seed(seed)
    return DraftHead(DraftHeadConfig.for_target(tiny_config(**changes), bias=bias))


def tiny_tokenizer(vocab_size=V, prefix="w"):
    words = {f"{prefix}{i}": i for i in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, f"{prefix}0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=f"{prefix}0")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def save_target(folder, seed=0):
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def random_conversations(num=12, seed=0, longest=40):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        length = int(torch.randint(8, longest, (), generator=generator))
        ids = torch.randint(0, V, (length,), generator=generator)
        start = int(torch.randint(1, 5, (), generator=generator))
        yield ids.tolist(), [i >= start for i in range(length)]


def save_shards(folder, train, held_out=(), shard_tokens=100, tokenizer=None):
    tokenizer = tokenizer or tiny_tokenizer()
    dtype, splits = token_dtype(len(tokenizer)), {}
    for name, conversations in (("train", train), ("validation", held_out)):
        with ShardWriter(folder / name, dtype, shard_tokens) as writer:
            for ids, mask in conversations:
                writer.add(ids, mask)
        splits[name] = writer.summary()
    meta = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "dtype": dtype.name,
        "tokenizer": {"name": "tiny"} | tokenizer_identity(tokenizer),
        "splits": splits,
        "identity": {},
    }
    write_json(folder / META_FILE, meta)
    return str(folder)
