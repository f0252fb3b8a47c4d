"""The reference router: one OpenAI-compatible address in front of prefill and decode engines."""
