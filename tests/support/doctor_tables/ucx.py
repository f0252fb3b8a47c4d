"""What must be noticed about UCX."""

from __future__ import annotations

from doctor_cases import FAIL, PASS, SKIP, WARN, Case, Scene, set_config
from doctor_hosts import SITE, p5en


def with_bundled_ucx() -> Scene:
    """The NIXL wheel's own UCX, as the package index has it."""
    host = p5en()
    set_config(host, backends=["UCX"])
    return Scene(host)


def drop_efa_from_bundle(scene: Scene) -> None:
    scene.host.listing(f"{SITE}/nixl_cu12.libs/ucx", "libuct_ib.so.0.0.0")


def use_ucx(version: str):
    return lambda scene: scene.host.command("ucx_info -v", f"# Library version: {version}\n")


CASES = (
    Case(
        "NX-10", FAIL, "no EFA transport", lambda s: s.host.replace("ucx_info -d", "Transport: srd", "Transport: tcp")
    ),
    Case("NX-10", WARN, "1.19.0", use_ucx("1.19.0")),
    Case("NX-10", PASS, "wheel's UCX", lambda s: None, with_bundled_ucx),
    Case("NX-10", FAIL, "no libuct_ib_efa.so", drop_efa_from_bundle, with_bundled_ucx),
    Case(
        "NX-10",
        FAIL,
        "over TCP",
        lambda s: s.host.log("ucp_context_0 inter-node cfg#2 rma_am(tcp/eth1) am(tcp/eth1)\n"),
    ),
    Case("NX-11", FAIL, "it is srd", lambda s: s.host.env(UCX_TLS="efa,cuda_copy")),
    Case("NX-11", FAIL, "no transport for EFA", lambda s: s.host.env(UCX_TLS="tcp,cuda_copy")),
    Case("NX-11", PASS, "exists", lambda s: s.host.env(UCX_TLS="srd,cuda_copy", UCX_NET_DEVICES="rdmap85s0:1")),
    Case("NX-11", WARN, "efa0", lambda s: s.host.env(UCX_NET_DEVICES="efa0")),
    Case(
        "NX-12",
        FAIL,
        "cannot register GPU memory",
        lambda s: s.host.replace("ucx_info -d", ", cuda (access,reg,cache,dmabuf)", ""),
    ),
    Case("NX-13", WARN, "UCX 1.18.0 opens 16 of 32", use_ucx("1.18.0")),
    Case("NX-13", WARN, "16 of 32", lambda s: s.host.env(UCX_MAX_COMPONENT_MDS="16")),
    Case("NX-13", SKIP, "16 EFA devices", lambda s: None, with_bundled_ucx),
)

GONE = {
    "NX-10": ("ucx_info",),
    "NX-11": ("/proc/4242/environ",),
    "NX-12": ("ucx_info",),
    "NX-13": ("ucx_info",),
}
