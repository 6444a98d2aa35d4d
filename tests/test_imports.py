"""Who may import whom. Reads the sources, and looks at what a fresh process really loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "models": {"models"},
    "data": {"data"},
    "decode": {"decode", "models"},
    "conf": {"conf", "models"},
    "train": {"train", "decode", "models", "data", "conf"},
    "scripts": {"scripts", "decode", "models", "data", "conf"},
}
# A library, and the only rooms or files that may import it.
ONLY_IN = {
    "accelerate": ("train/",),
    "wandb": ("train/",),
    "hydra": ("conf/entry.py",),
    "omegaconf": ("conf/entry.py",),
    "peft": ("models/target.py",),
    "transformers": (
        "models/target.py",
        "models/embedded.py",
        "models/cache.py",
        "models/draft_model.py",
        "data/",
        "scripts/benchmark",
        "scripts/adapters/",
    ),
    "datasets": ("data/",),
}
# scripts/evaluate.py measures with transformers' own generate as the yardstick, through the model that Target holds.
LIBRARY_NAMES_ALLOWED = {"scripts/evaluate.py"}
SOURCES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            yield from (f"{module}.{a.name}" for a in node.names) if module == "paceline" else [module]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for module in imports(path):
        top, _, rest = module.partition(".")
        assert top not in MAY_IMPORT, f"{name} imports bare {module}: it would load a second copy of every class"
        if top == "paceline":
            room = rest.split(".")[0]
            steps = name == "scripts/adapters/step_paceline.py" and module.startswith("paceline.train.step")
            assert room in MAY_IMPORT[name.split("/")[0]] or steps, f"{name} may not import {module}"
        if top in ONLY_IN:
            assert name.startswith(ONLY_IN[top]), f"{name} may not import {module}: only {', '.join(ONLY_IN[top])}"


def test_tests_use_the_installed_names() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for module in imports(path):
            assert module.split(".")[0] not in MAY_IMPORT, f"{path.name} imports bare {module}"


def test_no_program_bears_a_librarys_name() -> None:
    # The folder of a program started by path comes first on sys.path: train/datasets.py would hide the library.
    libraries = {path.stem.split("-")[0] for entry in sys.path for path in Path(entry or ".").glob("*/__init__.py")}
    libraries |= {
        path.parent.name for entry in sys.path if "site-packages" in entry for path in Path(entry).glob("*/*.py")
    }
    libraries |= set(sys.stdlib_module_names)
    for room in ("train", "scripts"):
        for path in (ROOT / room).glob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            assert path.stem == "__init__" or path.stem not in libraries or name in LIBRARY_NAMES_ALLOWED, name


def test_paceline_is_a_namespace() -> None:
    assert not (ROOT / "__init__.py").exists()


@pytest.mark.parametrize("module", ["paceline.models", "paceline.models.drafter", "paceline.decode"])
def test_the_runtime_loads_without_the_trainers_libraries(module: str) -> None:
    # None in sys.modules is "not installed": transformers takes accelerate along where it finds it.
    absent = ["accelerate", "hydra", "omegaconf", "datasets", "wandb", "peft"]
    above = ["paceline.train", "paceline.conf", "paceline.data"]
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n"
        f"import {module}\nprint([name for name in {above} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == "[]", done.stderr
