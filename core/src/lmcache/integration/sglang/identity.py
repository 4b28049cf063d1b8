"""What SGLang's KV is: model, weights, settings that change its values; and what keeps equal tokens apart."""

from __future__ import annotations

import json
import secrets
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lmcache.errors import ConfigError
from lmcache.integration.vllm.identity import hub_commit
from lmcache.logging import init_logger
from lmcache.v1.keys import digest
from lmcache.v1.utils.weights import weights_fingerprint

__all__ = [
    "build_cache_salt",
    "check_no_adapters",
    "is_mla",
    "model_extra",
    "revision_or_none_shared",
    "sglang_version",
    "split_cache_salt",
    "weights_revision",
]

logger = init_logger(__name__)


def build_cache_salt(cache_salt: str | None, extra_key: str | None) -> str:
    """SGLang's salt and extra key (which names the LoRA adapter, among others) as one text; empty for neither.

    Two different pairs never give one text: it is a JSON list.
    """
    if not cache_salt and not extra_key:
        return ""
    return json.dumps([cache_salt or "", extra_key or ""])


def split_cache_salt(text: str) -> tuple[str, str]:
    """Salt and extra key of what :func:`build_cache_salt` made.

    Raises:
        ValueError: it did not make it.
    """
    if not text:
        return "", ""
    salt, extra = json.loads(text)
    if not isinstance(salt, str) or not isinstance(extra, str):
        raise ValueError("cache salt: expected what build_cache_salt gives")
    return salt, extra


def is_mla(model_config: Any) -> bool:
    """Whether SGLang calls the model's attention MLA: one latent per token, the same on all TP ranks."""
    arch = getattr(model_config, "attention_arch", None)
    return str(getattr(arch, "name", arch)) == "MLA"


def sglang_version() -> str:
    """Of the SGLang that is installed; empty if none is."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def weights_revision(model_config: Any, given: str = "") -> str:
    """Identity of the weights: what the user says, else the local folder's content, else the hub's commit; empty if it
    cannot be told.

    Raises:
        OSError: the folder cannot be read.
    """
    model = str(model_config.model_path)
    if given:
        return f"given:{given}"
    if Path(model).exists():
        return f"local:{weights_fingerprint(model)}"
    commit = hub_commit(model, getattr(model_config, "revision", None))
    return f"hub:{commit}" if commit else ""


def revision_or_none_shared(model_config: Any, given: str) -> str:
    """As :func:`weights_revision`; where it cannot be told, one that no other engine has."""
    revision = weights_revision(model_config, given)
    if revision:
        return revision
    logger.warning(
        "%s: which revision of its weights this is cannot be told, so nothing is shared with other engines; set"
        " lmcache.mp.model_revision to a name of your own for them",
        model_config.model_path,
    )
    return f"unknown:{secrets.token_hex(16)}"


def model_extra(model_config: Any) -> dict[str, str]:
    """Settings that change KV values without changing its layout."""
    hf: Any = getattr(model_config, "hf_config", None)
    content = hf.to_dict() if hasattr(hf, "to_dict") else {}
    return {
        "sglang": sglang_version(),  # what backends write into a page may change with the release
        "model_dtype": str(getattr(model_config, "dtype", "")),
        "quantization": str(getattr(model_config, "quantization", None)),
        "context_len": str(getattr(model_config, "context_len", "")),  # chooses rope factors (longrope)
        "overrides": str(getattr(model_config, "model_override_args", "")),
        "hf_config": digest("hf_config", json.dumps(content, sort_keys=True, default=str)).hex(),
    }


def check_no_adapters() -> None:
    """For releases of SGLang that say of a load neither which adapter nor which salt it is for.

    Raises:
        ConfigError: SGLang runs with LoRA adapters, so KV of one would be given to another.
    """
    settings = getattr(sys.modules.get("sglang.srt.server_args"), "get_global_server_args", None)
    if settings is None:
        return
    try:
        lora = getattr(settings(), "enable_lora", False)
    except ValueError:  # SGLang's way to say that there are none yet
        return
    if lora:
        raise ConfigError(
            "LoRA: this SGLang does not tell which adapter a load is for; expected SGLang 0.5.21 "
            "or later; or run it without LMCache"
        )
