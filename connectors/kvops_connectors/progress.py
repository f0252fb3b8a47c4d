"""How long NIXL's progress thread sleeps between looks at the network.

NIXL's Python API sets the delay of that thread to 0 microseconds with no way to say otherwise (``nixl_agent.__init__``,
NIXL 1.5): its poll returns at once, and every rank keeps a whole core busy from start to end, idle or not. With a delay
the thread sleeps in poll, from which anything that arrives wakes it.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("vllm.kvops")


@contextmanager
def progress_delay(agent_class: Any, microseconds: int) -> Iterator[None]:
    """Give the NIXL agents that are made inside the block this delay; 0 leaves them as they are.

    Args:
        agent_class: NIXL's Python agent; None where there is no NIXL.
        microseconds: longest sleep; NIXL rounds it up to whole milliseconds.
    """
    bindings = getattr(sys.modules.get(getattr(agent_class, "__module__", "")), "nixlBind", None)
    original = getattr(bindings, "nixlAgent", None)
    if not microseconds or bindings is None or original is None:
        if microseconds:
            logger.warning("kvops: this NIXL has no progress delay to set; its progress thread may keep a core busy")
        yield
        return

    def delayed(name: str, config: Any) -> Any:
        config.pthrDelay = microseconds
        return original(name, config)

    bindings.nixlAgent = delayed
    try:
        yield
    finally:
        bindings.nixlAgent = original
