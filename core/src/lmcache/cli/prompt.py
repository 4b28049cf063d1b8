"""The prompt that a verb is about: tokens, and what else separates equal prompts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from lmcache.cli.args import pair
from lmcache.cli.tokens import add_token_source, read_tokens
from lmcache.errors import ConfigError

__all__ = ["Prompt", "add_account", "add_prompt", "read_account", "read_prompt"]


@dataclass(frozen=True)
class Prompt:
    """Tokens in a scope: those of requests with this adapter, salt and these tags."""

    tokens: list[int]
    lora: str
    salt: str
    tags: dict[str, str]

    def hashes(self, chunk_size: int) -> list[bytes]:
        """Digests of its complete chunks."""
        from lmcache.v1.keys import Scope, chunk_hashes

        scope = Scope(chunk_size=chunk_size, lora=self.lora, salt=self.salt, tags=self.tags)
        return chunk_hashes(self.tokens, scope)


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The flags that name a prompt."""
    add_token_source(parser)
    flag = parser.add_argument
    flag(
        "--lora",
        default="",
        metavar="NAME=PATH",
        help="LoRA adapter of the requests meant, as given to vLLM (none)",
    )
    flag("--salt", default="", help="their cache salt (none)")
    flag(
        "--tag",
        type=pair,
        action="append",
        metavar="KEY=VALUE",
        help="one of their request tags; may be repeated",
    )


def read_prompt(args: argparse.Namespace) -> Prompt:
    """The prompt that the flags name.

    Raises:
        ConfigError: if they name none. LMCacheError: if the text cannot be tokenized.
    """
    return Prompt(read_tokens(args), _lora(args.lora), args.salt, dict(args.tag or ()))


def add_account(parser: argparse.ArgumentParser) -> None:
    """The flags that name an account: by the salt of its requests, or as lists show it."""
    parser.add_argument("--salt", help="the cache salt whose account is meant")
    parser.add_argument("--account", metavar="ID", help="the account, as lists show it, instead of --salt")


def read_account(args: argparse.Namespace) -> str | None:
    """The account that the flags name; None: neither is given.

    Raises:
        ConfigError: if both are given.
    """
    from lmcache.v1.keys import account_id

    if args.salt is not None and args.account is not None:
        raise ConfigError("--salt and --account: expected one of them")
    return account_id(args.salt) if args.salt is not None else args.account


def _lora(text: str) -> str:
    """The identity that the connector gives to the adapter ``NAME=PATH``; other text is one already."""
    name, equals, path = text.partition("=")
    if not equals:
        return text
    from lmcache.integration.vllm.identity import lora_identity

    try:
        return lora_identity(argparse.Namespace(lora_name=name, lora_path=path))
    except OSError as exc:
        raise ConfigError(f"--lora {text}: {path} cannot be read ({exc.strerror})") from None
