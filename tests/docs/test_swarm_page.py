"""The page on swarms is executed: its commands run, its program's own assertion holds."""

from pathlib import Path

from test_pages import ROOT, run_page


def test_swarm_page(tmp_path):
    assert run_page(ROOT / "docs" / "swarm-running.md", tmp_path, Path()) >= 7
    assert (tmp_path / "runs" / "wide" / "report" / "report.html").exists()
