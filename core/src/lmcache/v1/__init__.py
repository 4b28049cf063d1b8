"""The v1 tree: layers from the platform contracts down to the engine (see the architecture notes in docs)."""
