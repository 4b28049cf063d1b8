"""What SGLang's LMCache integration uses of ours, read off its source: run it on a new SGLang wheel.

    python tools/sglang_names.py sglang-0.5.23-….whl [more.whl …] > tests/unit/sglang_names.json

Nothing of the wheel is imported. ``tests/unit/test_sglang_names.py`` holds our classes to the table.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections import defaultdict
from typing import Any

_FOLDER = "sglang/srt/mem_cache/storage/lmcache/"
_ROLES = {
    r"(self\.)?(lmcache_connector|lmc_connector|connector)": "connector",
    r"flow|f": "LMCacheExternalFlow",
    r"(flow|f)\.load|load": "LMCacheLoadOperation",
    r"flow\.lookup": "LMCacheLookupOperation",
    r"pending": "LMCachePendingStore",
    r"pending\.operation|operation": "LMCacheStoreOperation",
    r"(flow\.load|pending\.operation)\.future": "Outcome",
}
"""What the code calls things, and which record or class that is."""


def role(node: ast.expr, connector: str) -> str | None:
    """Which of our classes an expression is an instance of."""
    text = ast.unparse(node)
    for pattern, name in _ROLES.items():
        if re.fullmatch(pattern, text):
            return connector if name == "connector" else name
    return None


def used(source: str) -> dict[str, Any]:
    """Imports by module; per class its attributes, and its and its methods' calls as ``[positional, keywords]``.

    Of several connectors, named ``A|B``, one must have what is used.
    """
    tree = ast.parse(source)
    modules: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lmcache."):
            modules[str(node.module)] = sorted(alias.name for alias in node.names)
    imported = [name for names in modules.values() for name in names]
    connector = "|".join(name for name in imported if name.endswith("Connector"))
    dicts = {
        node.targets[0].id: [str(k.arg) for k in node.value.keywords]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "dict"
    }
    attributes: dict[str, set[str]] = defaultdict(set)
    calls: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := role(node.value, connector)):
            attributes[owner].add(node.attr)
        if isinstance(node, ast.Call):
            target = node.func
            keywords: list[str] = []
            for k in node.keywords:
                keywords += [k.arg] if k.arg else dicts.get(ast.unparse(k.value), [])
            shape = json.dumps([len(node.args), keywords])
            if isinstance(target, ast.Name) and target.id in imported:
                calls[target.id].add(shape)
            elif isinstance(target, ast.Attribute) and (owner := role(target.value, connector)):
                calls[f"{owner}.{target.attr}"].add(shape)
    return {
        "modules": modules,
        "attributes": {name: sorted(found) for name, found in sorted(attributes.items())},
        "calls": {name: [json.loads(s) for s in sorted(found)] for name, found in sorted(calls.items())},
    }


def of_wheel(path: str) -> tuple[str, dict[str, Any]]:
    """Version, and what the wheel's integration uses."""
    with zipfile.ZipFile(path) as wheel:
        sources = [n for n in wheel.namelist() if re.fullmatch(_FOLDER + r"lmc\w*_radix_cache\.py", n)]
        if len(sources) != 1:
            raise SystemExit(f"{path}: {len(sources)} radix caches below {_FOLDER}: expected one")
        about = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        version = re.search(r"^Version: (\S+)$", wheel.read(about).decode(), re.MULTILINE)
        return version.group(1) if version else path, used(wheel.read(sources[0]).decode())


def main() -> None:
    print(json.dumps(dict(map(of_wheel, sys.argv[1:])), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
