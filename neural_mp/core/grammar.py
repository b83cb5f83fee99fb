"""Nouns in messages: with the number or the article that they take."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 evaluation`, `2 evaluations`.

    Args:
        count: how many there are.
        noun: for one.
        plural: for any other number; the noun with an s by default.
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """A noun with `a` or `an`, by how its first letter is spoken: `an array`, `a tuple`."""
    word = noun.strip("'\"`")
    silent = word[:4].lower() in ("hour", "hone")
    like_you = word[:3].lower() in ("uni", "uin", "use", "uti", "one")
    # Names in capitals are spelled: an RMSE, an MSE, an F1, a URL, a BERT.
    spelled = len(word) > 1 and word[:2] == word[:2].upper() and word[0] in "FHLMNRSX"
    spelled = spelled or word[:2] == "nd"  # an ndarray: n-dimensional
    vowel = word[:1].lower() in tuple("aeiou")
    return f"{'an' if silent or spelled or (vowel and not like_you) else 'a'} {noun}"
