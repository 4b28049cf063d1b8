"""One run of ``lmcache demo``, in a process of its own: ``python -m … ADDRESS TOKENS`` prints a JSON object.

The model is a small Llama with grouped-query attention and random-normal weights from a fixed seed, so every
process makes the same one and nothing is downloaded. The weights are wide enough for answers to depend on KV.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lmcache.integration.transformers import PrefixCache

_SEED = 7
_VOCABULARY = 8192
_NEW_TOKENS = 24
_WARM_UP_TOKENS = 64


def build_model(max_tokens: int) -> Any:
    """The demo's model in float32 on the CPU; equal in every process."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(_SEED)
    return LlamaForCausalLM(config).eval()


def prompt(tokens: int) -> torch.Tensor:
    """``[1, tokens]`` int64 ids from the fixed seed."""
    return torch.randint(0, _VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(_SEED))


def step(model: Any, ids: torch.Tensor, past: DynamicCache) -> torch.Tensor:
    """The most likely next token ``[1, 1]`` after ``ids``, whose KV is appended to ``past``."""
    logits = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


@torch.inference_mode()
def measure(model: Any, cache: PrefixCache, ids: torch.Tensor) -> dict[str, Any]:
    """Answer ``ids``, with what the cache knows; then save. Times in seconds."""
    began = time.perf_counter()
    past, reused = cache.load(ids)
    loaded = time.perf_counter()
    past = DynamicCache(config=model.config) if past is None else past
    answer = [step(model, ids[:, reused:], past)]
    first = time.perf_counter()
    while len(answer) < _NEW_TOKENS:
        answer.append(step(model, answer[-1], past))
    before = time.perf_counter()
    stored = cache.save(ids, past)
    layer = past.layers[0].keys
    return {
        "path": cache.path,
        "ttft_s": first - began,
        "load_s": loaded - began,
        "save_s": time.perf_counter() - before,
        "tokens_reused": reused,
        "tokens_stored": stored,
        "bytes_per_token": 2 * len(past.layers) * layer.shape[1] * layer.shape[3] * layer.itemsize,
        "parameters": sum(p.numel() for p in model.parameters()),
        "answer": [int(token) for token in answer],
    }


def main(address: str, tokens: int) -> None:
    model = build_model(tokens + _NEW_TOKENS)
    with PrefixCache(address, model) as cache, torch.inference_mode():
        step(
            model, prompt(_WARM_UP_TOKENS), DynamicCache(config=model.config)
        )  # allocators, threads, kernels
        result = measure(model, cache, prompt(tokens))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
