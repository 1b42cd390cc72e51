"""tinyvllm (public names are exported here by the engine)."""
