"""Makes the pages of the API reference: one for each room, with all its modules that have public names."""

import ast
from pathlib import Path

WHOLE = "kvblocks"
SPLIT = ("engine", "integrations")
"""Rooms with one page per folder, since a single page would be too long."""

HIDDEN = ("cli", "replay/report", "engine/demo", "server/page")
"""Rooms that nobody calls from outside: the command line, and what it shows."""


def api_pages(package: Path) -> dict[str, tuple[str, str]]:
    """Return title and Markdown of each page, by its path."""
    rooms: dict[str, list[str]] = {WHOLE: []}
    for path in sorted(package.rglob("*.py")):
        folder = path.parent.relative_to(package).as_posix()
        if folder.startswith(HIDDEN) or path.name == "__main__.py" or not has_public_names(path):
            continue
        name = "" if path.name == "__init__.py" else f".{path.stem}"
        rooms.setdefault(room_of(folder), []).append(f"kvblocks.{folder.replace('/', '.')}".rstrip(".") + name)
    pages = {"api/kvblocks.md": (WHOLE, first_page(package, rooms.pop(WHOLE)))}
    for room, modules in sorted(rooms.items()):
        pages[f"api/{room}.md"] = (room, f"# {room}\n\n" + "".join(f"::: {module}\n\n" for module in modules))
    return pages


def room_of(folder: str) -> str:
    """Return the name of the page that has the modules of `folder`."""
    if folder == ".":
        return WHOLE
    parts = folder.split("/")
    return ".".join([WHOLE, *parts[: 2 if parts[0] in SPLIT else 1]])


def has_public_names(path: Path) -> bool:
    """Whether the module defines a function, class or value whose name has no underscore before it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        if any(not name.startswith("_") for name in names):
            return True
    return False


def first_page(package: Path, modules: list[str]) -> str:
    """Return the page of the package itself: its public names with links, and the modules outside of all rooms."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    # "optional": a name without a docstring has no place of its own.
    link = '<autoref optional identifier="{home}.{name}"><code>{home}</code></autoref>'
    rows = [f"| `{name}` | {link.format(home=home, name=name)} |" for name, home in sorted(public_names(tree).items())]
    about = (ast.get_docstring(tree) or "").replace("kvblocks: ", "", 1)
    about = about[0].upper() + about[1:]
    text = f"# kvblocks\n\n{about}\n\n## Public names\n\n| `from kvblocks import` | its home |\n|---|---|\n"
    return text + "\n".join(rows) + "\n\n" + "".join(f"::: {module}\n\n" for module in modules if module != WHOLE)


def public_names(tree: ast.Module) -> dict[str, str]:
    """Return the module of each public name, by the imports that type checkers see."""
    return {
        alias.name: str(node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
