"""A link between two network namespaces that delays, loses and can stop all packets.

    python slow_link.py NAMESPACE NAMESPACE NETWORK DELAY LOSS SWITCH

The namespaces get the addresses NETWORK.1 and NETWORK.2 on a TUN device each, and this process forwards IP packets
between the two: every packet DELAY seconds later, or with probability LOSS never. While the file SWITCH exists, no
packet passes. It serves where the kernel has no netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000


def open_tun(namespace: str, address: str, peer: str) -> int:
    """Create a TUN device in a namespace and return its file descriptor; this process stays in its own namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"tun{address.replace('.', '')[-10:]}"
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{namespace}") as other:
        if libc.setns(other.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22s", name.encode(), IFF_TUN | IFF_NO_PI, b""))
            for words in (("addr", "add", address, "peer", peer, "dev", name), ("link", "set", name, "up")):
                subprocess.run(("ip", *words), check=True)
        finally:
            libc.setns(own.fileno(), CLONE_NEWNET)
    return device


def forward(devices: tuple[int, int], delay: float, loss: float, switch: Path) -> None:
    """Forward packets between two TUN devices for ever."""
    draws, waiting = random.Random(0), list[tuple[float, int, int, bytes]]()
    for number in range(sys.maxsize):
        pause = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        ready, _, _ = select.select(devices, [], [], pause)
        for device in ready:
            packet = os.read(device, 65_536)
            if not switch.exists() and draws.random() >= loss:
                other = devices[device == devices[0]]
                heapq.heappush(waiting, (time.monotonic() + delay, number, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            with suppress(OSError):  # a full queue loses the packet
                os.write(device, packet)


if __name__ == "__main__":
    one, other, network, delay, loss, switch = sys.argv[1:]
    ends = f"{network}.1", f"{network}.2"
    both = open_tun(one, *ends), open_tun(other, *reversed(ends))
    print("ready", flush=True)
    forward(both, float(delay), float(loss), Path(switch))
