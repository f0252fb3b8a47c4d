"""Grafana dashboards and Prometheus rules of a disaggregated vLLM fleet, generated from the metric catalogue."""
