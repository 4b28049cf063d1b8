"""Small transformers models with random-normal weights, prompts, and greedy answers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import DynamicCache

ANSWER = 8
"""Tokens of an answer."""


def make_model(seed: int = 0, **changes: Any) -> Any:
    """A tiny Llama with grouped-query attention, random-normal weights, float32."""
    settings = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes))).eval()


def prompt(tokens: int, seed: int) -> Any:
    return torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def answer(model: Any, ids: Any, past: Any = None, reused: int = 0) -> tuple[list[int], Any]:
    """Greedy tokens after ``ids``, of which ``past`` holds the first ``reused``; and the KV of all."""
    past = DynamicCache(config=model.config) if past is None else past
    fresh, tokens = ids[:, reused:], []
    for _ in range(ANSWER):
        logits = model(input_ids=fresh, past_key_values=past, use_cache=True).logits
        fresh = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(fresh))
    return tokens, past
