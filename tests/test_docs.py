"""Every command in README.md and docs/ is one that works: checked as typed, by what it starts; the tour is also run."""

import importlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import checkpoint_of_target

from paceline.conf import entry
from paceline.conf.entry import load
from paceline.models import drafter as drafters
from paceline.models.drafter import Shape, build
from paceline.models.embedded import folder
from paceline.models.export import save_export
from paceline.models.target import Target

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("make", ".", "export", "echo", "mkdocs")  # what else a reader is told to type
PROGRAM = re.compile(r"(python|accelerate launch|torchrun) .*")
PLACES = [
    "drafter",
    "from",
    "method.init_from",
    "method.model",
    "target.path",
    "data.path",
    "given.path",
    "eval.prompts",
    "plain",
]


def commands(page: Path) -> list[str]:
    """What is typed at a shell, each in one line: of fenced blocks, and inline."""
    found, whole = [], page.read_text()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", whole, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines() if not language else ():
            words = line.split()
            if words and (PROGRAM.fullmatch(line) or words[0] in SHELL):
                found.append(line)
    text = re.sub(r"^```.*?^```$", "", whole, flags=re.MULTILINE | re.DOTALL)
    found += [code for code in re.findall(r"`([^`\n]+)`", text) if PROGRAM.fullmatch(code) and ".py" in code]
    return found


ALL = [(page.name, command) for page in PAGES for command in commands(page)]


def parts(command: str) -> tuple[list[str], str, list[str]]:
    """A command -> how it is launched, the program as `train/medusa.py`, its own words."""
    words = shlex.split(command, comments=True)
    at = next(i for i, word in enumerate(words) if re.fullmatch(r"(train|scripts)/\w+\.py", word))
    return words[:at], words[at], words[at + 1 :]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained drafters by the program that trains their kind."""
    target = Target.load(folder("tiny"), "float32", vocab=259)
    about = {"name": "tiny", "path": None, "fingerprint": target.fingerprint, "vocab": target.vocab}
    made = {}
    for kind in ("medusa", "eagle"):
        drafter = build(load(kind, "target=tiny", "method.draft_vocab=null").method.fitted(target), Shape.of(target))
        made[f"train/{kind}.py"] = save_export(drafter, tmp_path_factory.mktemp(kind) / "export", "float32", about)
    return made


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of_target(tmp_path_factory.mktemp("target"))


def furnish(cwd: Path, words: list[str], export: Path, target: Path) -> None:
    """Make what a command expects to find, which a reader has by then: exports, targets, files."""
    (cwd / "conf").symlink_to(ROOT / "conf")
    for name in re.findall(r"path: (\w+\.jsonl)", " ".join(words)):
        (cwd / name).write_text((target / "data.jsonl").read_text())
    for name in re.findall(r"export: ([\w/]+)", " ".join(words)):
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).symlink_to(export)
    for key, _, value in (word.partition("=") for word in words):
        if key not in PLACES or value in ("ngram", "none", "bench", "demo"):
            continue
        place = cwd / value
        place.parent.mkdir(parents=True, exist_ok=True)
        if "FILE" in value or value.endswith((".jsonl", ".txt", ".json")):
            place.write_text((target / "data.jsonl").read_text())
        elif not place.exists():
            place.symlink_to(export if key in ("drafter", "from", "method.init_from") else target)


@pytest.fixture
def _methods_of_today(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A method that a page brings along is forgotten again."""
    monkeypatch.setattr(drafters, "_METHODS", dict(drafters._METHODS))
    yield
    for name in [name for name in sys.modules if name.startswith("paceline_methods_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_methods_of_today")
@pytest.mark.parametrize(("page", "command"), [one for one in ALL if PROGRAM.fullmatch(one[1])])
def test_a_program_is_called_as_it_can_be(
    page: str,
    command: str,
    exports: dict[str, Path],
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    launcher, program, words = parts(command)
    if launcher[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        launch_command_parser().parse_args([*launcher[2:], program])
    elif launcher[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*launcher[1:], program])
    assert (ROOT / program).is_file()
    furnish(tmp_path, words, exports.get(program, exports["train/medusa.py"]), target_folder)
    if page == "extending.md":
        for name, text in re.findall(
            r"`(mine/\S+)`:\n\n```\w+\n(.*?)```\n", (ROOT / "docs" / page).read_text(), re.DOTALL
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setenv("PACELINE_METHODS", "mine/recurrent.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *words])
    monkeypatch.setattr(entry.hydra, "main", lambda **_: lambda job: lambda: None)  # checked, and not begun
    importlib.import_module("paceline." + program.removesuffix(".py").replace("/", ".")).main()


@pytest.mark.parametrize(("page", "command"), [one for one in ALL if not PROGRAM.fullmatch(one[1])])
def test_what_else_is_typed_is_there(page: str, command: str) -> None:
    word = shlex.split(command, comments=True)
    if word[0] == "make":
        subprocess.run(["make", "-n", *word[1:]], cwd=ROOT, check=True, capture_output=True)
    elif word[0] == "mkdocs":
        assert (ROOT / "mkdocs.yml").is_file()
    else:
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_pages_and_the_menu_are_the_same() -> None:
    menu = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert menu == {page.name for page in PAGES} - {"README.md"}
    assert len(ALL) > 40


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
    words = ["build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "mkdocs", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "tour" / "index.html").read_text()
    assert "Watch something that needs no training" in html and "fonts.googleapis" not in html


TRAINING = (
    "target=tiny train.epochs=null train.steps=2 data.limit=20 data.features=online data.cache=null "
    "eval.held_out_prompts=1 eval.max_new_tokens=4 dtype=float32"
)
SHRUNK = {
    "train/medusa.py": TRAINING,
    "train/eagle.py": TRAINING,
    "train/mtp.py": TRAINING,
    "train/draft.py": TRAINING + " method.target_layers=null",
    "scripts/evaluate.py": "eval.limit=2 eval.max_new_tokens=4 dtype=float32 hf_prompts=null",
    "scripts/watch.py": "max_new_tokens=8 dtype=float32",
    "scripts/generate.py": "max_new_tokens=4 dtype=float32",
    "scripts/convert.py": "",
}


def shrunk(program: str, words: list[str]) -> list[str]:
    """The same command for the random target, in seconds."""
    small = SHRUNK[program].split()
    if "target=smollm2" in words or "drafter=ngram" in words:
        small.append("target=tiny")
    taken = {word.split("=")[0] for word in small}
    return [entry._quoted(word, ("prompt",)) for word in words if word.split("=")[0] not in taken] + [
        *dict.fromkeys(small)
    ]


@pytest.mark.parametrize("page", ["README.md", "tour.md", "medusa.md", "hydra.md", "mtp.md", "draft.md"])
def test_the_pages_are_walked_as_a_reader_would(page: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Every training, evaluation, conversion and conversation of a page, one after the other, on the random target."""
    monkeypatch.chdir(tmp_path)
    (path,) = (path for path in PAGES if path.name == page)
    exports = []
    for command in commands(path):
        if command.startswith("echo"):
            subprocess.run(command, shell=True, check=True)
        if not PROGRAM.fullmatch(command) or "--cfg" in command or re.search(r"[A-Z]{3}|outputs/self", command):
            continue
        _, program, words = parts(command)
        if program not in SHRUNK:
            continue
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/stats\n/plain\n"))
        module = importlib.import_module("paceline." + program.removesuffix(".py").replace("/", "."))
        cfg = load(Path(program).stem, *shrunk(program, words))
        module.run(cfg)
        if program.startswith("train/"):
            exports.append(Path(cfg.out or next((tmp_path / "outputs").iterdir())) / "export")
        if program == "scripts/evaluate.py":
            assert (Path(cfg.out) / "report.html").is_file()
    assert exports and all((export / "model.safetensors").is_file() for export in exports)
    if page == "tour.md":
        assert (tmp_path / "outputs" / "watch" / "watch.html").is_file()
        assert (tmp_path / "outputs" / "demo" / "vllm" / "config.json").is_file()
        assert "times as fast" in capsys.readouterr().err
