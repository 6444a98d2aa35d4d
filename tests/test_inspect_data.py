"""Looking at data: the figures are right, the page needs nothing else and cannot be made to run what the data says."""

import json
import re
from pathlib import Path

import pytest

from paceline.conf.entry import load
from paceline.scripts.benchmark import run as benchmark
from paceline.scripts.inspect_data import run

RECORDS = [
    {"prompt": "a", "response": "bb"},
    {"messages": []},
    {"prompt": "<script>x</script>", "response": "b < c & d"},
    {"prompt": "a" * 300, "response": "cut"},
]


def test_the_figures_are_those_of_the_data_and_the_page_holds_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    where = [
        f"data.path={file}",
        f"out={tmp_path / 'out'}",
        "data.cache=null",
        "data.held_out=0.0",
        "data.max_length=64",
    ]
    run(load("inspect_data", "target=tiny", "data=jsonl", *where))
    about = json.loads((tmp_path / "out" / "inspect.json").read_text())
    # START user \n a END \n, START assistant \n bb END \n
    lengths = [9 + 11 + 2 + 2, 26 + 11 + 9 + 2]
    assert about["counts"]["rows to train on"] == 2 and about["counts"]["tokens"] == sum(lengths)
    assert about["counts"]["supervised tokens"] == 3 + 10  # the replies and their ends
    assert about["counts"]["supervised tokens cut"] == about["provenance"]["supervised_tokens_cut"] == 4
    assert "4 of 17 supervised tokens lie beyond data.max_length=64" in capsys.readouterr().out
    assert about["quantiles"]["tokens"] == [24, 24, 24, 48, 48, 48]
    assert about["quantiles"]["supervised"] == [3, 3, 3, 10, 10, 10]
    assert about["skipped"] == {"no messages": {"count": 1, "first": [2]}}
    assert about["unsupervised"] == {"the first reply begins beyond max_length=64": {"count": 1, "first": [4]}}
    assert about["coverage"][-1] == {"ids": 259, "covered": 1.0}

    page = (tmp_path / "out" / "inspect.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "<mark>bb&lt;|im_end|&gt;</mark>" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page.count("data:image/png;base64,") == 1 and (tmp_path / "out" / "inspect.png").stat().st_size > 1000


def test_the_benchmark_counts_every_token_and_keeps_the_rows_of_other_parts(tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text(json.dumps({"rows": [{"part": "other", "name": "x"}]}))
    for _ in range(2):
        benchmark(load("benchmark", "target=tiny", "part=data", "conversations=100", f"out={tmp_path}"))
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [(row["part"], row["name"]) for row in rows] == [
        ("other", "x"),
        ("data", "10 conversations"),
        ("data", "100 conversations"),
    ]
    assert rows[2]["tokens"] > 5 * rows[1]["tokens"] > 0
    assert rows[1]["tokens_per_second"] > 0 and 0.3 < rows[2]["filled"] <= 1
