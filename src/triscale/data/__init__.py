"""Text in, rows of tokens out: ``corpora`` -> ``tokenizer`` -> ``prepare`` -> ``loader``, and ``heldout`` rows.

Nothing is imported here: take what you need from the module that owns it, so that a tokenizer alone stays cheap.
"""
