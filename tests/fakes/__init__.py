"""Stand-ins that behave like the real thing on the wire."""
