"""Asks AWS, read-only, about the instance that kvops runs on; only where the user said ``--aws``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvops.doctor.host import Gap, Output
from kvops.doctor.parsers import ParseError, cloud
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops.doctor.host import Argv, LiveHost

# The first is where a Nitro guest shows its id, the second where cloud-init keeps it.
ID_FILES = ("/sys/devices/virtual/dmi/id/board_asset_tag", "/var/lib/cloud/data/instance-id")


def command(operation: str, *words: str) -> Argv:
    """Return the argv of one ``aws ec2`` call."""
    return ("aws", "ec2", operation, *words, "--output", "json")


def ask(host: LiveHost) -> None:
    """Let the host run the calls that the network checks look at; answers are kept by the host.

    Raises:
        KvopsError: the instance's id is not to be found, or AWS does not describe it.
    """
    texts = [host.read(path) for path in ID_FILES]
    ids = [text.strip() for text in texts if isinstance(text, str) and re.fullmatch(r"i-[0-9a-f]{8,17}", text.strip())]
    if not ids:
        raise KvopsError("this machine does not show an EC2 instance id", "run --aws on the instance itself")
    described = host.run(command("describe-instances", "--instance-ids", ids[0]))
    if isinstance(described, Gap) or described.exit:
        why = described if isinstance(described, Gap) else described.stderr.strip()[:160]
        raise KvopsError(f"aws describe-instances has failed: {why}", "install and configure the aws command")
    instance = _first_instance(described)
    groups = [str(group.get("GroupId")) for group in cloud.rows(instance, "SecurityGroups")]
    host.prefetch(
        [
            command("describe-security-groups", "--group-ids", *groups),
            command("describe-network-interfaces", "--filters", f"Name=attachment.instance-id,Values={ids[0]}"),
            command("describe-instance-types", "--instance-types", str(cloud.dig(instance, "InstanceType"))),
        ]
    )


def _first_instance(described: Output) -> object:
    try:
        answer = cloud.parse_object(described.stdout)
    except ParseError as error:
        raise KvopsError(f"aws describe-instances answered with {error}", "look at aws configure") from error
    return cloud.dig(answer, "Reservations", 0, "Instances", 0)
