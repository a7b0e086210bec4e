"""The house rules that can be read from the files: who imports whom, sizes, names, and the README's file tree."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]
# A file may import from its own folder and from the floors below; folders of one floor do not know each other.
FLOORS = (
    ("core",),
    ("data", "reward", "grouping", "policy", "cluster"),
    ("actors", "learners"),
    ("evaluation", "serve"),
    ("train", "benchmarks"),
)
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
TOP_FILES = ("train.py", "preparation.py", "training_run.py")  # the folder "train" of the rules
NOT_IN_CORE = {"torch", "ray", "vllm", "deepspeed"}
NOT_A_NOUN = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
LONG_FILES: dict[str, str] = {}  # path -> why it may have more lines


def source_files() -> list[PurePosixPath]:
    """Python files of the project, relative to its root: those git does not ignore, or all of them without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
        paths = [PurePosixPath(line) for line in listed.splitlines() if (ROOT / line).is_file()]
    except (OSError, subprocess.CalledProcessError):
        paths = []
    if not paths:
        folders = [*FLOOR_OF, "tests"]
        found = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
        paths = [PurePosixPath(path.relative_to(ROOT).as_posix()) for path in found]
    return sorted(paths)


def folder_of(path: PurePosixPath) -> str | None:
    """The folder of the rules a file belongs to; None for tests."""
    if path.name in TOP_FILES and len(path.parts) == 1:
        return "train"
    return path.parts[0] if len(path.parts) > 1 and path.parts[0] in FLOOR_OF else None


def folder_of_module(module: str) -> str | None:
    return folder_of(PurePosixPath(f"{module.replace('.', '/')}.py")) or (module if module in FLOOR_OF else None)


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in a file, with its line; relative imports start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names if alias.name != "*")


def broken_floors(path: PurePosixPath, source: str) -> list[str]:
    """A sentence for each import of a file that goes up, sideways or by a relative name."""
    own = folder_of(path)
    if own is None:
        return []
    found = {}
    for module, line in imported_modules(ast.parse(source)):
        other = folder_of_module(module)
        if module.startswith("."):
            found[line] = f"{path}:{line} imports {module}; imports are absolute here"
        elif other not in (None, own) and FLOOR_OF[other] >= FLOOR_OF[own]:
            found[line] = f"{path}:{line} of {own} imports {module}; {own} stands on the floors below only"
        elif own == "core" and module.split(".")[0] in NOT_IN_CORE:
            found[line] = f"{path}:{line} imports {module}; core runs without it"
    return list(found.values())


def long_functions(path: PurePosixPath, source: str) -> list[str]:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(node, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [f"{path}:{node.lineno} {node.name} has {size} lines" for node, size in sizes if size > MAX_FUNCTION_LINES]


def import_cycle(imports: dict[str, set[str]]) -> list[str]:
    """One cycle of modules, its first again at the end; empty without one."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        found = next((cycle for other in sorted(imports[module]) if (cycle := visit(other, [*trail, module]))), [])
        done.add(module)
        return found

    return next((cycle for module in sorted(imports) if (cycle := visit(module, []))), [])


def module_graph(files: dict[PurePosixPath, str]) -> dict[str, set[str]]:
    """Which of the project's modules each of them imports, anywhere in its file."""
    names = {str(path.with_suffix("")).replace("/", ".").removesuffix(".__init__"): path for path in files}
    return {
        name: {module for module, _ in imported_modules(ast.parse(files[path])) if module in names and module != name}
        for name, path in names.items()
    }


def tree_block(readme: str) -> str:
    """The fenced or indented block of the README that draws the file tree: the one that names core/ and train.py."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", readme, re.M | re.S)
    indented = re.findall(r"(?:^(?: {4}|\t)[^\n]*\n|^[ \t]*\n)+", readme, re.M)
    drawn = [block for block in (*fenced, *indented) if all(f(block) for f in (names_core, names_train))]
    return drawn[0] if drawn else ""


def names_core(block: str) -> bool:
    return re.search(r"(^|[\s│├└─])core/", block, re.M) is not None


def names_train(block: str) -> bool:
    return re.search(r"^[\s│├└─|`-]*train\.py\b", block, re.M) is not None


def tree_paths(block: str) -> list[str]:
    """Paths of a drawn tree, relative to its root: a line names files or a folder/, then two spaces and words on it."""
    parents: list[tuple[int, str]] = []  # (indent, folder/)
    paths = []
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip(" \t│├└─|`-"))
        entry = re.split(r"\s{2,}|\s+#", line[indent:].strip(), maxsplit=1)[0]
        names = [name for name in re.split(r"[,\s]+", entry) if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", name)]
        names = [name for name in names if name.endswith("/") or "." in name.strip(".") or name == "Makefile"]
        while parents and parents[-1][0] >= indent:
            parents.pop()
        above = parents[-1][1] if parents else ""
        paths += [above + name for name in names]
        if names and names[0].endswith("/"):
            parents.append((indent, above + names[0]))
    return paths


@pytest.fixture(scope="module")
def files() -> dict[PurePosixPath, str]:
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in source_files()}


def test_imports_go_down_the_floors_only(files):
    assert [sentence for path, source in files.items() for sentence in broken_floors(path, source)] == []


def test_no_module_imports_itself_in_a_circle(files):
    assert import_cycle(module_graph({path: text for path, text in files.items() if folder_of(path)})) == []


def test_no_module_is_named_after_nothing(files):
    assert [str(path) for path in files if NOT_A_NOUN & {part.removesuffix(".py") for part in path.parts}] == []


def test_files_are_short(files):
    sizes = {str(path): text.count("\n") for path, text in files.items()}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_LINES and path not in LONG_FILES} == {}
    assert [path for path in LONG_FILES if sizes.get(path, 0) <= MAX_FILE_LINES] == []  # a reason no longer needed


def test_functions_are_short(files):
    assert [sentence for path, source in files.items() for sentence in long_functions(path, source)] == []


def test_packages_have_empty_init_files(files):
    assert [str(path) for path, text in files.items() if path.name == "__init__.py" and text.strip()] == []


def test_the_tree_in_the_readme_is_true(files):
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    named = tree_paths(tree_block(readme.read_text(encoding="utf-8")))
    assert named, "README.md must draw the file tree in a block that names core/ and train.py"
    assert [path for path in named if not any(ROOT.glob(path.rstrip("/")))] == []
    package = {str(path) for path in files if folder_of(path) and path.name != "__init__.py"}
    assert sorted(package - expanded(named)) == []


def expanded(named: Iterable[str]) -> set[str]:
    """The named paths with * filled in."""
    return {path.relative_to(ROOT).as_posix() for name in named for path in ROOT.glob(name.rstrip("/"))}


@pytest.mark.parametrize(
    ("path", "source", "num_broken"),
    [
        ("core/x.py", "import ray\nfrom torch import nn\nimport json", 2),
        ("core/x.py", "from data.row import Row", 1),
        ("reward/x.py", "from core.config import Config\nimport grouping.worker", 1),
        ("actors/x.py", "def f():\n    from learners import loss", 1),
        ("serve/x.py", "from ray import serve as ray_serve\nfrom learners.loss import y", 0),
        ("serve/x.py", "import evaluation.heldout\nimport train", 2),
        ("learners/x.py", "from . import loss", 1),
        ("benchmarks/x.py", "import training_run\nimport core", 1),
        ("train.py", "import training_run\nfrom evaluation import heldout", 0),
        ("tests/core/test_x.py", "import ray, train, learners.loss", 0),
    ],
)
def test_the_floors_rule_sees_what_it_must(path, source, num_broken):
    assert len(broken_floors(PurePosixPath(path), source)) == num_broken


def test_the_cycle_rule_sees_a_cycle():
    sources = {"core/a.py": "from core import b", "core/b.py": "from core.c import x", "core/c.py": "import core.a"}
    files = {PurePosixPath(path): source for path, source in sources.items()}
    assert import_cycle(module_graph(files)) == ["core.a", "core.b", "core.c", "core.a"]
    files[PurePosixPath("core/c.py")] = "import json"
    assert import_cycle(module_graph(files)) == []


def test_the_size_rule_sees_a_long_function():
    source = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    assert long_functions(PurePosixPath("core/x.py"), source) == ["core/x.py:1 f has 61 lines"]


@pytest.mark.parametrize(
    "drawn",
    [
        "train.py        the loop\ncore/           words  of all\n    config.py   a tree, checked\n"
        "    a.py, b.py  two files\n"
        "data/\n    deep/\n        row.py  one row\nMakefile  what to type\n",
        "├── train.py  # the loop\n├── core/\n│   ├── config.py\n│   ├── a.py  first\n│   └── b.py\n├── data/\n"
        "│   └── deep/\n│       └── row.py\n└── Makefile\n",
    ],
)
def test_a_drawn_tree_is_read(drawn):
    readme = f"# x\n```bash\nmake demo\n```\nwords\n\n```\n{drawn}```\n"
    files = {"train.py", "core/config.py", "core/a.py", "core/b.py", "data/deep/row.py", "Makefile"}
    assert set(tree_paths(tree_block(readme))) == files | {"core/", "data/", "data/deep/"}
    as_indented = "# x\n\n" + "".join(f"    {line}\n" for line in drawn.splitlines()) + "\nwords\n"
    assert set(tree_paths(tree_block(as_indented))) == files | {"core/", "data/", "data/deep/"}
