"""What a vLLM engine's KV is: model, weights, layout, topology; and where its pages lie."""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
from pathlib import Path
from typing import Any

from lmcache.errors import ConfigError
from lmcache.integration.vllm.layer_pages import GroupLayout, page_tensors
from lmcache.logging import init_logger
from lmcache.v1.keys import Namespace, digest
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.utils.weights import folder_state, weights_fingerprint

logger = init_logger(__name__)

_SUPPORTED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_NULL_BLOCK = 0  # vLLM's block pool keeps the first block as the null block


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what would be cached wrongly.

    Raises:
        ConfigError: one line that names the feature and the remedy.
    """
    parallel = vllm_config.parallel_config
    for what in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, what, 1) > 1:
            raise ConfigError(
                f"{what}={getattr(parallel, what)}: KV spread over context-parallel ranks is not cached; set it to 1"
            )
    model = vllm_config.model_config
    pooler = getattr(model, "pooler_config", None)
    if pooler is not None and not model.is_prefix_caching_supported:
        kinds = [getattr(pooler, f"{of}_pooling_type", None) for of in ("seq", "tok")]
        named = ", ".join(kind for kind in kinds if kind) or "of this model"
        raise ConfigError(
            f"pooling {named}: needs every token of a prompt, so no prefix can be taken from a cache; run this model"
            " without the connector"
        )
    for group in kv_cache_config.kv_cache_groups:
        for spec in _layer_specs(group.kv_cache_spec):
            kind = type(spec).__name__
            if kind not in _SUPPORTED_SPECS or getattr(spec, "tokens_per_state", 1) != 1:
                raise ConfigError(
                    f"KV cache group of {kind} ({group.layer_names[0]}, …): this connector caches"
                    f" {', '.join(_SUPPORTED_SPECS)} only; run this model without it"
                )
        if getattr(group, "is_eagle_group", False):
            raise ConfigError(
                "a draft model with KV of its own: not cached; run without the connector or the draft model"
            )


def attention_windows(kv_cache_config: Any) -> list[int]:
    """Tokens of the windows of attention behind which the engine frees pages, of all groups."""
    windows = []
    for group in kv_cache_config.kv_cache_groups:
        spec = _layer_specs(group.kv_cache_spec)[0]
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        if window is not None and "Full" not in type(spec).__name__:  # those keep all pages
            windows.append(int(window))
    return windows


def _layer_specs(spec: Any) -> list[Any]:
    """The specs of a group's layers: several where a group mixes sizes of one type."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]


def model_revision(vllm_config: Any, given: str) -> str:
    """Identity of the weights: what the user says, else the local folder's content, else the hub's commit."""
    if given:
        return f"given:{given}"
    model = vllm_config.model_config
    folder = Path(model.model)
    if folder.exists():
        return f"local:{weights_fingerprint(folder)}"
    commit = hub_commit(model.model, model.revision, vllm_config.load_config.download_dir)
    if commit:
        return f"hub:{commit}"
    logger.warning(
        "%s: which revision of its weights this is cannot be told, so nothing is shared with other engines;"
        " set lmcache.mp.model_revision to a name of your own for them",
        model.model,
    )
    return f"unknown:{secrets.token_hex(16)}"


def hub_commit(repo: str, revision: str | None, folder: str | None = None) -> str:
    """The commit that vLLM takes from its hub cache (or from ``folder``); empty if it cannot be told."""
    if re.fullmatch("[0-9a-f]{40}", revision or ""):
        return str(revision)
    cache = Path(folder or _hub_cache()).expanduser()
    ref = cache / f"models--{repo.replace('/', '--')}" / "refs" / (revision or "main")
    return ref.read_text().strip() if ref.is_file() else ""


def _hub_cache() -> str:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE  # it knows every variable that moves it
    except ImportError:
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        return os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")
    return str(HF_HUB_CACHE)


_adapters: dict[tuple[int, str, str], tuple[object, str]] = {}
"""State of an adapter's files when it was first seen, and its identity, by the engine's id, name and path."""


def lora_identity(lora_request: Any) -> str:
    """Name, path and content of an adapter as it was first seen; empty without one.

    Raises:
        OSError: if it cannot be read, or if its files changed and it is not loaded anew: then nobody can tell
            which of the two the engine computes with.
    """
    if lora_request is None:
        return ""
    name, path = lora_request.lora_name, Path(lora_request.lora_path)
    here = path.exists()
    state = folder_state(path) if here else hub_commit(str(path), None)
    key = (getattr(lora_request, "lora_int_id", 0), name, str(path))
    seen, identity = _adapters.get(key, (None, ""))
    if seen is None or (seen != state and getattr(lora_request, "load_inplace", False)):
        content = weights_fingerprint(path) if here else state
        seen, identity = state, digest("lora", [name, str(path), content]).hex()
        _adapters[key] = (seen, identity)
    if seen != state:
        raise OSError(f"adapter {name}: {path} changed since it was loaded; load it under a new id")
    return identity


def media_by_content(vllm_config: Any) -> bool:
    """Whether vLLM names media by what is in them. Where it neither keeps processed media nor caches prefixes it
    saves itself the hash, and numbers them: every process from the same number on."""
    settings = getattr(vllm_config.model_config, "multimodal_config", None)
    kept = getattr(settings, "mm_processor_cache_gb", 1)
    return settings is None or kept != 0 or bool(vllm_config.cache_config.enable_prefix_caching)


def _model_extra(vllm_config: Any) -> dict[str, str]:
    """Settings that change KV values without changing its layout."""
    import vllm

    model = vllm_config.model_config
    hf = model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else {}
    return {
        "vllm": str(vllm.__version__),  # pages are opaque: what is inside may change with the release
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_model_len": str(model.max_model_len),  # chooses rope factors (longrope) and attention scaling
        "mm_processor_kwargs": json.dumps(
            getattr(model.multimodal_config, "mm_processor_kwargs", None), sort_keys=True, default=str
        ),  # what a user's own id for an item does not tell
        "load_format": str(vllm_config.load_config.load_format),
        "hf_config": digest("hf_config", json.dumps(hf, sort_keys=True, default=str)).hex(),
        "draft": str(getattr(vllm_config.speculative_config, "method", "")),
    }


def describe_groups(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], revision: str, rank: int
) -> list[KVGroupPages]:
    """The worker's KV groups as pages, in vLLM's group order.

    Args:
        kv_caches: layer name to cache, as vLLM registers them: a tensor, or K and V as a tuple.
        rank: this worker's rank among tensor- and pipeline-parallel workers.

    Raises:
        LayoutError: if a page is not one contiguous run of bytes, or layers of a group differ.
    """
    parallel = vllm_config.parallel_config
    order = kv_cache_config.kv_cache_layout or "LBHNC"
    replicas = max(1, kv_cache_config.kv_tp_replicas)
    tp = parallel.tensor_parallel_size
    extra = _model_extra(vllm_config)
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _layer_specs(group.kv_cache_spec)[0]
        said = GroupLayout(
            order, spec.block_size, kv_cache_config.num_blocks, mla=type(spec).__name__.startswith("MLA")
        )
        found = page_tensors(kv_caches, group.layer_names, said)
        layout = found.layout(_packing(vllm_config, group.layer_names[0]))
        device = found.tensors[0].device.type
        namespace = Namespace(
            model=vllm_config.model_config.model,
            revision=revision,
            engine="vllm",
            format=layout.format,
            dtype=layout.dtype,
            block_size=spec.block_size,
            chunk_size=spec.block_size,  # the server's to say: see EngineDrivenTransferContext
            kv_heads=layout.num_kv_heads,
            head_size=layout.head_size,
            page_bytes=layout.page_bytes,
            packing=layout.packing,
            layers=found.names,
            group=index,
            groups=len(kv_cache_config.kv_cache_groups),
            tp_rank=rank % tp // replicas,
            tp_size=tp,
            pp_rank=rank // tp,
            pp_size=parallel.pipeline_parallel_size,
            extra=extra
            | {
                "order": found.order,
                "split": str(layout.split),
                "kv_dtype": str(vllm_config.cache_config.cache_dtype),
            },
        )
        groups.append(
            KVGroupPages(
                namespace=namespace,
                num_blocks=kv_cache_config.num_blocks,
                addresses=[t.data_ptr() for t in found.tensors] if device == "cpu" else [],
                strides=[p.page_stride_bytes for p in found.pages],
                null_block=_NULL_BLOCK,
                device=device,
                tensors=found.tensors,
            )
        )
    return groups


def _packing(vllm_config: Any, layer_name: str) -> str:
    """How the attention backend orders bytes inside a page, as far as it says: backend, instruction set, machine."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else "unknown"
    parts = ["vllm", backend, getattr(layer, "isa", ""), platform.machine()]
    return "-".join(p for p in parts if p).lower()
