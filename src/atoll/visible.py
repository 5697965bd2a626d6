"""Text from other machines and processes, fit to be shown on a terminal."""

import unicodedata


def visible(text: str) -> str:
    r"""Writes control characters as escapes, such as \x1b, so that no terminal obeys them.

    So it writes characters that nobody sees or that turn the order of others round. Ends of lines and tabs stay.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    harmless = character in "\n\t\u200c\u200d" or unicodedata.category(character) in ("Zs", "Cn", "Co")
    if harmless or character.isprintable():
        return character
    return character.encode("unicode-escape").decode("ascii")
