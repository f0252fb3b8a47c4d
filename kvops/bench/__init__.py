"""Measuring a fleet under load: workloads, the client, and the files of a run."""
