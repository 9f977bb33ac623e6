"""Network interfaces of this machine. This file must never import torch: every process of a cluster imports it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from drumroll.errors import ConfigError


def interfaces() -> dict[str, str]:
    """Map each network interface of this machine to its first IPv4 address (Linux)."""
    import fcntl

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(interface: str) -> str:
    """Return the address of a network interface of this machine."""
    known = interfaces()
    if interface not in known:
        have = ", ".join(f"{name} ({address})" for name, address in known.items())
        raise ConfigError(
            f"cluster.interface: {socket.gethostname()} has no interface '{interface}' with an address; it has {have}."
        )
    return known[interface]
