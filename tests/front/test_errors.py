"""What the sentences of errors are made of."""

from cgshim._errors import listing


def test_words_as_a_sentence_lists_them():
    assert [listing(list(words)) for words in ("", "x", "xy", "xyz")] == [
        "",
        "x",
        "x and y",
        "x, y and z",
    ]
