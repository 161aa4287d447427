import pytest

from triscale.config import ConfigError
from triscale.data.needle import make_needle_examples
from triscale.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        ["The passcode of the amber falcon is 48213.\n" * 50, "height weight of the 12345\n" * 50], 400
    )


@pytest.mark.parametrize("length", [100, 257, 1000])
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_examples_hold_what_they_say(tokenizer, length, depth):
    examples = make_needle_examples(tokenizer, length, depth, 6, seed=3)
    for example in examples:
        assert len(example.tokens) == length == example.answer_stop
        assert example.tokens[0] == tokenizer.bos
        answer = list(example.tokens[example.answer_start : example.answer_stop])
        assert tokenizer.decode(answer) == f" {example.answer}"
        text = tokenizer.decode(example.prompt)
        question = text[text.rindex("# The passcode") :]
        needle = tokenizer.decode(example.tokens[example.needle_start :])
        assert needle.startswith(f"{question} {example.answer}.\n")
        assert text.count(example.answer) == 1 and text.endswith(question)
        # the needle spells the answer with the very tokens that must be produced
        prompt = example.prompt
        assert any(list(prompt[i : i + len(answer)]) == answer for i in range(len(prompt)))
    room = [example.needle_start - 1 for example in examples]
    if depth == 0.0:
        assert room == [0] * 6
    elif depth == 1.0:
        assert all(start > length // 2 for start in room if length > 200)
    assert len({example.answer for example in examples}) > 1


def test_deterministic_and_seeded(tokenizer):
    assert make_needle_examples(tokenizer, 200, 0.5, 3, 1) == make_needle_examples(tokenizer, 200, 0.5, 3, 1)
    assert make_needle_examples(tokenizer, 200, 0.5, 3, 1) != make_needle_examples(tokenizer, 200, 0.5, 3, 2)
    # more examples go on behind the first ones
    assert make_needle_examples(tokenizer, 200, 0.5, 5, 1)[:3] == make_needle_examples(tokenizer, 200, 0.5, 3, 1)


def test_own_filler_is_used_and_repeated(tokenizer):
    filler = tokenizer.encode("zebra quagga ")
    example = make_needle_examples(tokenizer, 300, 0.5, 1, 0, filler)[0]
    assert len(example.tokens) == 300 and tokenizer.decode(example.prompt).count("quagga") > 5


def test_too_short_and_senseless_settings_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"too few.*needs") as error:
        make_needle_examples(tokenizer, 10, 0.5, 1, 0)
    needed = int(str(error.value).rsplit(" ", 1)[1])
    assert len(make_needle_examples(tokenizer, needed, 0.5, 1, 0)[0].tokens) == needed
    with pytest.raises(ConfigError, match="depth"):
        make_needle_examples(tokenizer, 100, 1.5, 1, 0)
    with pytest.raises(ConfigError, match="filler"):
        make_needle_examples(tokenizer, 100, 0.5, 1, 0, filler=[])
