"""The network between nodes, store and clients, in which any direction between two of them can be cut.

Where the machine allows it, each member has a network namespace of its own, joined by a router that can drop what one
member sends to another: nobody is told, connections stay, and what was lost is sent again by TCP when the cut is over.
Elsewhere, all members are on loopback and connect through proxies, which swallow what passes while they are told to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from tests.integration.proxies import Proxy
from tests.integration.store_servers import free_port

STORE = "store"
INSIDE = "NEMESIS_INSIDE"  # in the environment of a run that has its namespaces
_NETNS = Path("/run/netns")


class Network(Protocol):
    """A network of members, known by their names."""

    name: str

    def add(self, member: str) -> None:
        """Make a place for a member."""

    def command(self, member: str, *, machine: bool = False, user: tuple[int, int] | None = None) -> list[str]:
        """What stands before a command that is to run there; with `machine`, as if it were on another machine."""

    def host(self, member: str) -> str:
        """The address at which it listens."""

    def port(self) -> int:
        """A port for a server."""

    def way(self, source: str, target: str, url: str) -> str:
        """The URL of a target, as the source must use it."""

    def drop(self, source: str, target: str) -> None:
        """Lose what the source sends to the target from now on."""

    def heal(self, source: str, target: str) -> None:
        """End that."""

    def close(self) -> None: ...


class Namespaces:
    """A namespace for each member, and this process as the router between them. Needs a namespace of its own."""

    name = "namespaces"

    def __init__(self) -> None:
        _NETNS.mkdir(parents=True, exist_ok=True)
        _do("mount", "-t", "tmpfs", "none", str(_NETNS))
        _do("ip", "link", "set", "lo", "up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        self._numbers: dict[str, int] = {}

    def add(self, member: str) -> None:
        number = self._numbers[member] = len(self._numbers) + 1
        here, there = f"10.77.{number}.1", f"10.77.{number}.2"
        _do("ip", "netns", "add", member)
        _do("ip", "link", "add", f"r{number}", "type", "veth", "peer", "name", f"m{number}")
        _do("ip", "link", "set", f"m{number}", "netns", member)
        _do("ip", "addr", "add", f"{here}/30", "dev", f"r{number}")
        _do("ip", "link", "set", f"r{number}", "up")
        _do("ip", "-n", member, "addr", "add", f"{there}/30", "dev", f"m{number}")
        _do("ip", "-n", member, "link", "set", f"m{number}", "up")
        _do("ip", "-n", member, "link", "set", "lo", "up")
        _do("ip", "-n", member, "route", "add", "default", "via", here)

    def command(self, member: str, *, machine: bool = False, user: tuple[int, int] | None = None) -> list[str]:
        words = ["nsenter", f"--net={_NETNS}/{member}"]
        if user is not None:
            words += ["--setgid", str(user[1]), "--setuid", str(user[0])]
        if machine:  # nobody sees whether its process is alive
            words += ["unshare", "--pid", "--fork", "--kill-child"]
        return words

    def host(self, member: str) -> str:
        return f"10.77.{self._numbers[member]}.2"

    def port(self) -> int:
        return 7700

    def way(self, source: str, target: str, url: str) -> str:
        return url

    def drop(self, source: str, target: str) -> None:
        _do("ip", "rule", "add", "from", self.host(source), "to", self.host(target), "type", "blackhole")

    def heal(self, source: str, target: str) -> None:
        _do("ip", "rule", "del", "from", self.host(source), "to", self.host(target), "type", "blackhole")

    def close(self) -> None:
        """All of it goes with this process's namespaces."""


class Proxies:
    """Everybody on loopback. A node has one address for all other nodes, so it is cut off from all of them at once."""

    name = "proxies"

    def __init__(self) -> None:
        self._proxies: dict[tuple[str, str], Proxy] = {}

    def add(self, member: str) -> None:
        """Nothing needs to be made."""

    def command(self, member: str, *, machine: bool = False, user: tuple[int, int] | None = None) -> list[str]:
        return []

    def host(self, member: str) -> str:
        return "127.0.0.1"

    def port(self) -> int:
        return free_port()[0]

    def way(self, source: str, target: str, url: str) -> str:
        link = self._link(source, target)
        parts = urlsplit(url)
        if link not in self._proxies:
            self._proxies[link] = Proxy(("127.0.0.1", parts.port or 80))
        user = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user[0]}{user[1]}127.0.0.1:{self._proxies[link].port}").geturl()

    @staticmethod
    def _link(source: str, target: str) -> tuple[str, str]:
        return ("nodes" if source[:4] == target[:4] == "node" else source, target)

    def drop(self, source: str, target: str) -> None:
        self._set(source, target, swallows=True)

    def heal(self, source: str, target: str) -> None:
        self._set(source, target, swallows=False)

    def _set(self, source: str, target: str, *, swallows: bool) -> None:
        for asker, asked, name in ((source, target, "swallow"), (target, source, "swallow_answers")):
            proxy = self._proxies.get(self._link(asker, asked))
            if proxy is not None:
                setattr(proxy, name, swallows)
                if not swallows:
                    proxy.cut_all()  # what was swallowed is missing

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()


def can_have_namespaces() -> bool:
    """Whether this machine lets us make namespaces, and join and cut them."""
    if os.geteuid() != 0:
        return False
    trial = (
        "mkdir -p /run/netns && mount -t tmpfs none /run/netns && ip netns add a && "
        "ip link add r0 type veth peer name m0 && ip link set m0 netns a && "
        "ip rule add from 10.77.1.2 to 10.77.2.2 type blackhole && "
        "nsenter --net=/run/netns/a unshare --pid --fork --kill-child true"
    )
    try:
        return subprocess.run([*_UNSHARED, "sh", "-c", trial], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


# A process space, too, so that nothing is left behind whatever becomes of a run.
_UNSHARED = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def command_inside() -> list[str]:
    """The command that repeats this program in namespaces of its own."""
    return [*_UNSHARED, "env", f"{INSIDE}=1", sys.executable, "-m", "tests.nemesis.run", *sys.argv[1:]]


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
