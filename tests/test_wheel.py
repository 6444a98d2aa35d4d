"""The wheel, in another folder and without this repository on the path."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_trains_and_exports_with_its_own_conf_and_data(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("paceline-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "data/self/smollm2.jsonl.gz",
        "data/bench.jsonl",
        "conf/medusa.yaml",
        "models/tiny/tokenizer.json",
        "models/drafts.cpp",
        "models/kernels.cpp",
        "models/passes.cpp",
    ):
        assert f"paceline/{wanted}" in names
    assert not [name for name in names if "test" in name.split("/")[0]]

    # its own environment, which sees the libraries of this one but not its editable install
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    python = tmp_path / "env" / "bin" / "python"
    where = [python, "-c", "import paceline.models as m; print(m.__file__)"]
    assert subprocess.run(where, capture_output=True, text=True, env=clean).stdout.startswith(str(site))
    options = ["target=tiny", "train.steps=3", "out=run", "eval.held_out_prompts=2", "eval.max_new_tokens=8"]
    command = [python, "-m", "paceline.train.medusa", *options]
    done = subprocess.run(command, cwd=elsewhere, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (elsewhere / "run" / "export").iterdir()} == {
        "README.md",
        "config.json",
        "drafter.json",
        "model.safetensors",
    }
