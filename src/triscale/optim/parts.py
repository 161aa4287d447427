"""The optimizers a run can name; each ``Config`` has ``build(model) -> torch.optim.Optimizer``."""

from triscale.config import Parts

OPTIMIZERS = Parts(
    "optimizer",
    {
        "adamw": "triscale.optim.adamw:AdamW",
        "muonclip": "triscale.optim.muon_clip:MuonClip",
    },
)
