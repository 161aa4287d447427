"""The gated delta rule (Kimi Delta Attention, Gated DeltaNet, delta rule): definition, fast paths and dispatch."""
