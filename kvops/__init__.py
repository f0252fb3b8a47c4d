"""kvops: launch, check, trace and measure disaggregated vLLM fleets that move KV cache over NIXL."""

__version__ = "0.1.0"
