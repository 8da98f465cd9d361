"""YAML that this process did not write, read within limits.

PyYAML's own loaders take documents that exhaust the stack of the C parser (which ends the process), that grow
without bound by merging, and that raise whatever a tag's constructor happens to stumble upon.
"""

from typing import TYPE_CHECKING, Any

from yaml import YAMLError
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, SequenceNode

if TYPE_CHECKING:
    from yaml import SafeLoader as _SafeLoader
else:
    try:
        from yaml.cyaml import CSafeLoader
    except ImportError:  # a PyYAML that was built without libyaml
        from yaml import SafeLoader as _SafeLoader
    else:

        class _SafeLoader(Composer, CSafeLoader):
            """The composer in Python over the parser in C: the one in C nests calls as deep as the text does."""

            def __init__(self, data: bytes) -> None:
                CSafeLoader.__init__(self, data)
                Composer.__init__(self)


_MAX_DEPTH = 64
_MAX_MERGED = 10_000
_MAX_SOURCES = 100
_MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """The text is not YAML, or exceeds a limit. The message is one line with place and cause."""


def load(data: bytes) -> Any:
    """The first document's content: dicts, lists, texts, numbers… Raises `YamlError`."""
    try:
        loader = _Loader(data)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except YAMLError as error:
        raise YamlError(" ".join(str(error).split()).replace(' in "<byte string>",', " in")) from error
    except Exception as error:  # KeyError, IndexError, AttributeError… of tags like `!!int ""`
        raise YamlError(f"a tag does not fit its value: {error}") from error


class _Loader(_SafeLoader):
    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._depth = 0
        self._merged = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ComposerError(None, None, f"nested deeper than {_MAX_DEPTH} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def flatten_mapping(self, node: MappingNode) -> None:
        merged = [value for key, value in node.value if key.tag == _MERGE]
        sources = sum(len(value.value) if isinstance(value, SequenceNode) else 1 for value in merged)
        if sources > _MAX_SOURCES:
            raise ConstructorError(None, None, f"merges more than {_MAX_SOURCES} mappings", node.start_mark)
        super().flatten_mapping(node)
        self._merged += len(node.value) if sources else 0
        if self._merged > _MAX_MERGED:
            raise ConstructorError(None, None, f"merges make more than {_MAX_MERGED} entries", node.start_mark)
