"""The balance study at small size: quantile balancing settles in steps where the sign update has hardly moved."""

import json

from triscale.studies import expert_balance


def test_small_run(tmp_path):
    result = expert_balance.run(tmp_path, experts=32, top_k=4, tokens=4096, quantile_steps=4, sign_steps=4)
    exact, histogram, sign = result["rules"].values()
    assert exact["fresh"][0] == histogram["fresh"][0] == sign["fresh"][0] > 2
    assert exact["fresh"][-1] < 1.3 and histogram["fresh"][-1] < 1.3 and sign["fresh"][-1] > 2
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["experts"] == 32
    assert (tmp_path / "max-load.svg").exists()
