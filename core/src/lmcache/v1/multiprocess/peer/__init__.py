"""Another server as a storage tier: objects are pushed into its L1 (prefill to decode) and pulled from there."""
