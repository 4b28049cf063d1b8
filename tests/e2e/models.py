"""Small models with random-normal weights, whose output depends on their KV (dummy weights' does not)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 1000


def _save(config: Any, folder: Path, seed: int, std: float = 0.15) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    model.save_pretrained(folder)
    return folder


def gqa(folder: Path, seed: int = 0) -> Path:
    """A Llama with 8 query and 4 KV heads."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(config, folder, seed)


def mla(folder: Path, seed: int = 0) -> Path:
    """A DeepSeek-style model with latent attention, all layers dense."""
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=3, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(config, folder, seed)


def hybrid(folder: Path, seed: int = 0) -> Path:
    """A Gemma 3 text model: sliding-window and full-attention layers in turns, so two KV groups."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, sliding_window=512,
        layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=64, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(config, folder, seed)


def lora(folder: Path, seed: int = 0) -> Path:
    """An adapter for ``gqa``, on the attention projections."""
    import json

    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, width in (("q_proj", 512), ("k_proj", 256), ("v_proj", 256)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
