"""The examples of docs/statistics.md print what the page says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
EXAMPLES = re.findall(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def test_every_example_has_its_output():
    assert len(EXAMPLES) == PAGE.read_text(encoding="utf-8").count("```python") == 2


@pytest.mark.parametrize("code,printed", EXAMPLES)
def test_examples_print_what_the_page_says(code, printed, capsys):
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed
