"""The page says what the results say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from benchmarks.report import BEGIN, END, PAGE, page_of, read_reports

REPORT: dict[str, Any] = {
    "versions": {"shardline": "1.2.3"},
    "commit": "0123456789abcdef",
    "command": "python -m benchmarks.gpu_pipeline",
    "processor": "a processor",
    "driver": None,
    "gpus": [{"name": "A GPU", "driver": "580.1", "memory_bytes": 1}] * 2,
    "model": {"geometry": "qwen3-8b", "layers": 36, "weights": "random"},
    "options": {"seed": 0, "prompt": 128, "steps": 64, "warm": 8, "trials": 5},
    "layouts": {
        "one": {
            "split": [36],
            "stage_facts": [{"resident_bytes": 1 << 32}],
            "start_seconds": 12.3,
            "loads": [{"bytes": 4e9, "seconds": 8.0, "processor_seconds": 6.0, "read_seconds": 1.0}],
            "parity": {
                "sequences_compared_with_one_stream": 1234,
                "sequences_compared_with_another_layout_or_batch": 5,
                "logprobs_compared": 99,
                "different": [],
                "equal": True,
            },
            "predicted_tokens_per_second": {"64": 4321.0},
            "decode": [
                {
                    "flight": "planned",
                    "depth": 2,
                    "batch": 64,
                    "tokens_per_second": {"median": 7777.0, "least": 7000.0, "most": 8000.0},
                    "busy_shares": [{"median": 0.93}],
                    "rows_a_step": 32.0,
                    "engine_core_share": {"median": 0.41},
                }
            ],
        }
    },
}


def empty() -> str:
    return f"# Page\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"


def test_the_page_of_this_checkout_is_what_its_results_give() -> None:
    page = PAGE.read_text()
    assert page_of(page, read_reports()) == page, "python -m benchmarks.report"


def test_figures_stand_in_the_tables_and_the_rest_of_the_page_stays() -> None:
    page = page_of(empty(), [("gpu_pipeline_x.json", REPORT)])
    assert page.startswith("# Page\n\nbefore\n")
    assert page.endswith("\n\nafter\n")
    assert "old" not in page
    row = "| one | as planned (2) | 64 | 7777 (7000 - 8000) | 1.00 | 4321 | 32.0 | 93% | 41% |"
    for words in ("2 x A GPU", "580.1", "0123456789ab", "gpu_pipeline_x.json", "1234 sequences", "all were equal", row):
        assert words in page, words
    assert page_of(page, [("gpu_pipeline_x.json", REPORT)]) == page


def test_another_figure_is_another_page() -> None:
    changed = copy.deepcopy(REPORT)
    changed["layouts"]["one"]["decode"][0]["tokens_per_second"]["median"] += 1
    assert page_of(empty(), [("a", REPORT)]) != page_of(empty(), [("a", changed)])


def test_what_differed_or_failed_is_not_hidden() -> None:
    changed = copy.deepcopy(REPORT)
    changed["layouts"]["one"]["parity"]["different"] = ["sequence 3 differs at token 4"]
    changed["layouts"]["4x8GiB"] = {"error": "Traceback"}
    page = page_of(empty(), [("a", changed)])
    assert "**1 were different** (sequence 3 differs at token 4)" in page
    assert "| 4x8GiB | failed |" in page


@pytest.mark.parametrize("page", ["no marks", f"{BEGIN}", f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="the page must have one line"):
        page_of(page, [])
