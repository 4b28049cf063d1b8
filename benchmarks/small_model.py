"""Makes the model of ``bench_original.py``: a Llama whose KV is 8 KiB per token, with random-normal weights.

Run as a script in an interpreter that has torch and transformers: ``small_model.py FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCAB = 1000


def make(folder: Path, seed: int = 0, std: float = 0.15) -> None:
    """8 layers, 4 KV heads of 64: in bfloat16 31 MB of KV for 3,840 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
