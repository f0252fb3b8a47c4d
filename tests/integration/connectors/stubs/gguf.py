"""Stands in for the gguf package, which some vLLM versions import and no check needs."""
