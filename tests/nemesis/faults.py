"""What happens to servers, networks, stores and clocks. Each fault is one function in `FAULTS`.

A fault is a generator: it does its harm, yields what it has done in words, and undoes it when it is resumed. To add
one, write it and put the mark on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from tests.nemesis.network import STORE

if TYPE_CHECKING:
    from tests.nemesis.run import Scene

Fault: TypeAlias = "Callable[[Scene], Iterator[str]]"
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


@fault
def kill(scene: Scene) -> Iterator[str]:
    """kill -9; started again when it is over."""
    node = scene.some_node()
    node.kill()
    yield node.name
    node.start()


@fault
def stop(scene: Scene) -> Iterator[str]:
    """SIGSTOP, as a machine that sleeps or swaps."""
    node = scene.some_node()
    node.freeze()
    yield node.name
    node.thaw()


@fault
def restart(scene: Scene) -> Iterator[str]:
    """SIGTERM, and a new start at once, node after node."""
    yield "rolling"
    for node in scene.nodes:
        if node.is_running and not node.frozen:
            node.stop()
            node.start()
            scene.wait_until_ready(node)


def _cut(scene: Scene, *ways: tuple[str, str]) -> Iterator[str]:
    done = [way for way in ways if scene.cut(*way)]
    yield ", ".join(f"{source} to {target}" for source, target in done)
    for way in done:
        scene.mend(*way)


@fault
def store_unreachable(scene: Scene) -> Iterator[str]:
    """A node cannot reach the store."""
    node = scene.some_node().name
    yield from _cut(scene, (node, STORE), (STORE, node))


@fault
def store_answers_lost(scene: Scene) -> Iterator[str]:
    """The store gets what a node sends, and its answers do not arrive."""
    yield from _cut(scene, (STORE, scene.some_node().name))


@fault
def nodes_apart(scene: Scene) -> Iterator[str]:
    """Two nodes cannot reach each other."""
    one, other = (node.name for node in scene.rng.sample(scene.nodes, 2))
    yield from _cut(scene, (one, other), (other, one))


@fault
def node_answers_lost(scene: Scene) -> Iterator[str]:
    """A node gets what another one sends, and its answers do not arrive."""
    one, other = (node.name for node in scene.rng.sample(scene.nodes, 2))
    yield from _cut(scene, (one, other))


@fault
def clients_apart(scene: Scene) -> Iterator[str]:
    """Some clients cannot reach a node."""
    place, node = scene.rng.choice(scene.places), scene.some_node().name
    yield from _cut(scene, (place, node), (node, place))


@fault
def client_answers_lost(scene: Scene) -> Iterator[str]:
    """A node gets what some clients send, and its answers do not arrive."""
    yield from _cut(scene, (scene.some_node().name, scene.rng.choice(scene.places)))


@fault
def alone(scene: Scene) -> Iterator[str]:
    """A node reaches clients only: neither the store nor other nodes."""
    node = scene.some_node().name
    others = [STORE, *(each.name for each in scene.nodes if each.name != node)]
    yield from _cut(scene, *((node, other) for other in others), *((other, node) for other in others))


@fault
def clock(scene: Scene) -> Iterator[str]:
    """The wall clock of a node jumps, and back."""
    node = scene.some_node()
    seconds = scene.rng.choice([-1, 1]) * scene.rng.choice([1, 5, 60, 3600])
    scene.set_clock(node, seconds)
    yield f"{node.name} by {seconds} s"
    scene.set_clock(node, 0)


@fault
def store_crash(scene: Scene) -> Iterator[str]:
    """The store's server crashes, and starts again with what it had stored."""
    scene.store.crash()
    yield STORE
    scene.store.start()


@fault
def client_kill(scene: Scene) -> Iterator[str]:
    """A client is killed, and another one takes its place."""
    worker = scene.rng.choice(scene.workers)
    worker.kill()
    yield worker.name
    worker.start()
