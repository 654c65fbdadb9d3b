"""YAML as people mean it: a key that is there twice is a mistake, and a day is a text like every other time."""

from __future__ import annotations

from typing import Any, Final

import yaml

_RESOLVERS: Final = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_LOADER: Final[Any] = type("_Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": _RESOLVERS})


def read_yaml(content: bytes) -> Any:
    """The plain values of a document; raises yaml.YAMLError."""
    loader = _LOADER(content)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: Any, looked_at: set[int]) -> None:
    if id(node) in looked_at or isinstance(node, yaml.ScalarNode):
        return
    looked_at.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(each, looked_at)
        return
    keys = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in keys:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
        keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        _check_keys(value, looked_at)
