"""SGLang's side of the cache; ``docs/sglang.md`` says which release imports which module."""
