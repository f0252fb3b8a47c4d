"""The Kubernetes manifests as a Helm chart, with the few values that change after rendering.

What decides how engines are built (devices, modes, scripts) stays fixed: it follows from kvops.yaml, which is rendered
anew. Sources: Helm's guides to charts and values (https://helm.sh/docs/topics/charts/).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import yaml

import kvops
from kvops.launch import kubernetes

if TYPE_CHECKING:
    from kvops.topology import Topology

_IMAGE, _KVOPS_IMAGE, _NAMESPACE = "kvops-chart-image", "kvops-chart-kvops-image", "kvops-chart-namespace"
_REPLICAS = {"10-prefill.yaml": "prefill", "10-decode.yaml": "decode", "20-router.yaml": "router"}
_VALUES_HEAD = """\
# image: engines. replicas: engines of a role, and routers. monitoring: needs the Prometheus operator's CRDs.
# Everything else is in kvops.yaml: change it there and render again.
"""


def render(topology: Topology) -> dict[str, str]:
    """Return the chart's files by name; its default values give what ``kubernetes.render`` gives, in any namespace.

    Raises:
        KvopsError: as ``kubernetes.render``.
    """
    kubernetes.render(topology)
    manifests = kubernetes.render(_with_marks(topology))
    # helm install --create-namespace makes it, and uninstalling must not take what others put there.
    del manifests["00-namespace.yaml"]
    files = {"Chart.yaml": _dump(_chart()), "values.yaml": _VALUES_HEAD + _dump(_values(topology))}
    files["values.schema.json"] = json.dumps(_schema(_values(topology)), indent=2) + "\n"
    return files | {f"templates/{name}": _template(name, text) for name, text in manifests.items()}


def _with_marks(topology: Topology) -> Topology:
    settings = topology.kubernetes
    marks = {"image": _IMAGE, "namespace": _NAMESPACE, "kvops_image": settings.kvops_image and _KVOPS_IMAGE}
    return topology.model_copy(update={"kubernetes": settings.model_copy(update=marks)})


def _template(name: str, text: str) -> str:
    # Braces of rules and dashboards are for Prometheus and Grafana.
    text = text.replace("{{", '{{ "{{" }}')
    text = text.replace(f"image: {_IMAGE}\n", "image: {{ .Values.image | quote }}\n")
    text = text.replace(f"image: {_KVOPS_IMAGE}\n", "image: {{ .Values.kvopsImage | quote }}\n")
    text = text.replace(_NAMESPACE, "{{ .Release.Namespace }}")
    if name in _REPLICAS:
        text = re.sub(r"(?m)^  replicas: \d+$", f"  replicas: {{{{ .Values.replicas.{_REPLICAS[name]} }}}}", text)
    return f"{{{{- if .Values.monitoring }}}}\n{text}{{{{- end }}}}\n" if name.startswith("40-") else text


def _chart() -> dict[str, Any]:
    return {
        "apiVersion": "v2",
        "name": "kvops",
        "description": "A disaggregated vLLM fleet: prefill and decode engines, router, policies and monitoring",
        "type": "application",
        "version": kvops.__version__,
        "appVersion": kvops.__version__,
    }


def _values(topology: Topology) -> dict[str, Any]:
    settings = topology.kubernetes
    return {
        "image": settings.image,
        **({"kvopsImage": settings.kvops_image} if settings.kvops_image else {}),
        "replicas": {role: group.replicas for role, group in topology.groups()} | {"router": settings.router_replicas},
        "monitoring": True,
    }


def _schema(value: Any) -> dict[str, Any]:
    """Return a JSON schema that takes values like ``value`` and no others, so that a misspelt one is told."""
    if isinstance(value, dict):
        properties = {key: _schema(item) for key, item in value.items()}
        return {"type": "object", "additionalProperties": False, "required": list(value), "properties": properties}
    if isinstance(value, bool):
        return {"type": "boolean"}
    return {"type": "integer", "minimum": 0} if isinstance(value, int) else {"type": "string", "minLength": 1}


def _dump(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=120)
