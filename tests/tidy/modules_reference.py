"""The list of modules in docs/internals/README.md: each with the first sentence of its docstring.

`python -m tests.tidy.modules_reference --write` renews the page; without `--write` it prints.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.tidy.repo import PACKAGE, ROOT, modules, tree_of, with_part

PAGE = ROOT / "docs" / "internals" / "README.md"
BEGIN = "<!-- modules: made by `python -m tests.tidy.modules_reference --write` from the docstrings -->"
END = "<!-- end of modules -->"


def rendered() -> str:
    """A heading for each package and a line for each of its modules; those that are generated are named together."""
    folders: dict[Path, list[Path]] = {}
    for module in modules():
        folders.setdefault(module.parent, []).append(module)
    return "\n\n".join(_section(folder, folders[folder]) for folder in sorted(folders))


def _section(folder: Path, found: list[Path]) -> str:
    name = folder.relative_to(PACKAGE.parent).as_posix()
    lines = [f"### {name}/", "", _first_sentence(folder / "__init__.py"), ""]
    written = [module for module in found if module.name != "__init__.py"]
    if folder.name == "sync":
        lines.append(f"Generated: {', '.join(f'`{_path(module)}`' for module in written)}.")
    else:
        lines += [f"- `{_path(module)}`: {_first_sentence(module)}" for module in written]
    return "\n".join(lines).rstrip()


def _path(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


def _first_sentence(module: Path) -> str:
    """The first paragraph of the module's docstring, on one line."""
    said = ast.get_docstring(tree_of(module)) or ""
    return " ".join(said.partition("\n\n")[0].split())


def with_modules(page: str) -> str:
    """The page, with the part between the two marks made anew."""
    return with_part(page, BEGIN, END, rendered())


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(with_modules(PAGE.read_text()))
    else:
        sys.stdout.write(rendered() + "\n")
