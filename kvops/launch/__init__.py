"""From a topology to running processes: plan, supervisor, canary, and what is left on disk."""
