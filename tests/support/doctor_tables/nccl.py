"""What must be noticed about NCCL where an engine spans hosts."""

from __future__ import annotations

from doctor_cases import PASS, SKIP, UNKNOWN, WARN, Case, alone
from doctor_hosts import LOG

CASES = (
    Case("NX-17", WARN, "does not use EFA", lambda s: s.host.log("NCCL INFO Using network Socket\n")),
    Case("NX-17", WARN, "no OFI plugin", lambda s: s.host.log("nothing\n")),
    Case("NX-17", SKIP, "spans hosts", lambda s: None, alone),
    Case("NX-18", WARN, "sockets", lambda s: s.host.env(NCCL_NET="Socket")),
    Case("NX-18", PASS, "pinned", lambda s: s.host.env(NCCL_NET="AWS Libfabric")),
    Case(
        "NX-19",
        WARN,
        "1 of 1",
        lambda s: s.host.log("NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/1\n"),
    ),
    Case("NX-19", UNKNOWN, "NCCL_DEBUG=INFO", lambda s: s.host.log("nothing\n")),
)

GONE = {"NX-17": (LOG, "ldconfig"), "NX-18": ("/proc/4242/environ",), "NX-19": (LOG,)}
