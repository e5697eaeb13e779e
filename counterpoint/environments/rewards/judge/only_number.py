"""Reads the number at a place of a judge's answer, if it is a whole one, of the scale, and the only rating there."""

from __future__ import annotations

import re
from reprlib import repr as short_repr

from counterpoint.environments.reward import number_in
from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.judge.rating import NUMBER, FoundRating
from counterpoint.transport.printable import printable

_BEYOND = 80
"""Characters beside a number in which another one may belong to it."""

_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_GAP = r"(?:[^\S\n]|[*_`\"'$()\[\]{}\\])*"
_NUMBER = rf"(?:[0-9][0-9.,]*|(?:a\s+)?hundred\b|(?:{'|'.join(_WORDS)})\b)"
_TO = r"(?:[-\u2010-\u2015~]|to\b)"
_OUT_OF = re.compile(
    rf"(?:{_GAP}(?:points?|pts\.?|stars?|marks?|[\u2605\u2b50]+))?{_GAP},?{_GAP}"
    rf"(?:(?:[/\\\u00f7\u2044\u2215\uff0f]|(?:out\s+)?of\b|outta\b|over\b|from\b|in\b)\s*(?:a\s+|the\s+)?"
    rf"(?:possible\s+|(?:max(?:imum)?|total)\s+(?:of\s+)?)?"
    rf"|(?:on|in)\s+(?:a|the)\s+scale\s+(?:of|from)?\s*(?:{_NUMBER}{_GAP}{_TO}{_GAP})?|on\s+an?\s+(?={_NUMBER}-point)"
    rf"|\(\s*(?:max(?:imum)?)\W{{1,3}}|(?:(?:on\s+an?|range|scale|of|from)\W{{0,3}})*{_NUMBER}{_GAP}{_TO}(?=\s*{_NUMBER}(?:\s*[)\]]|\s+scale))"
    rf"|(?:(?:with|where)\s+)?(?={_NUMBER}\s+(?:is|being)\b)){_GAP}({_NUMBER})",
    re.IGNORECASE,
)
"""What names the scale of the number before it, as in `8/10`, `8 out of 10`."""
_LINKS = (
    r"(?:(?:up\s+)?to|or|and|maybe|perhaps|possibly|probably|not|but|rather|than|instead|of|through|vs|versus|"
    r"(?:could|might)\s+be)\b\.?"
)
_ANOTHER = (
    rf"(?:[-\u2010-\u2015~/:,;&|\u30fb\uff0d]|\.\.+|\u2026|\xb1|\+/?-|\\pm|{_LINKS})(?:{_GAP}{_LINKS})*{_GAP}"
    r"[-+~<>\u2248]?"
)
_AFTER = (
    "on|at|after|for|if|in|when|overall|now|instead|would|but|and|or|with|given|upon|later|though|is|was|then|by|finally|initially|"
    "originally|before|otherwise|out|actually|stars?|marks?"
)
"""Words that may follow a rating. Another says what the number counts."""
_COUNT = (
    rf"{_GAP}[-\u2013\u2014,;]{_GAP}(?:{'|'.join(_WORDS)})\s+(?!(?:{_AFTER}|points?|of|to|maybe|perhaps|rather)\b)[a-z]"
)
"""A number in words of something else, as in `8, two small mistakes`."""
_NEXT = re.compile(
    rf"(?!{_COUNT}){_GAP}{_ANOTHER}{_NUMBER}|[^\S\n]+[0-9\xbc-\xbe\u2150-\u215e]|{_GAP}(?:[-=]>|[\u2190-\u21ff]|(?:and\s+)?(?:a\s+|one\s+)?half\b)|[-+](?!\w)|-ish\b",
    re.IGNORECASE,
)
_LAST = re.compile(rf"[0-9][0-9.,]*(?:{_GAP}{_ANOTHER})?\Z|(?:[.~\u2248]|(?<![\w=-])[<>])[^\S\n]*\Z", re.IGNORECASE)
"""Another number that belongs to the one behind, as in `7-8`, or its own beginning."""
_PERCENT = re.compile(rf"{_GAP}(?:%|percent\b)", re.IGNORECASE)
_WHOLE = re.compile(NUMBER)

_ENDS = re.compile(r"[.!?](?=\s|\Z)|\n|\b(?:because|since|due\s+to|reasons?)\b", re.IGNORECASE)
"""What ends the part of an answer in which another number may be another rating."""
_TAIL = 400
_CORRECTS = (
    r"no|wait|hmm|actually|rather|maybe|instead|correction|corrected|revised|updated?|on\s+(?:second\s+thoughts?|reflection)|"
    r"in\s+the\s+end|final(?:ly)?|overall|total|verdict|grade|rating|mark|score|make\s+(?:it|that)|it\s+is|is|should\s+be|or|but|an?|to"
)
_LATER = re.compile(
    rf"(?:\A|(?<=[.!?])\s|\n)[^\w\n]{{0,8}}(?:\b(?:{_CORRECTS})\b[^\w\n.!?]{{0,6}}){{0,5}}(?P<number>[0-9][\w.,]*)",
    re.IGNORECASE,
)
"""A number that begins a later sentence, maybe behind words that correct the one before."""
_AGAIN = re.compile(r"(?<![A-Za-z0-9.,/#\u00a7-])(?P<number>[0-9][0-9.,]*)(?:\s?[-\u2013]\s?[0-9]+)?", re.IGNORECASE)
_NAMED = re.compile(
    r"(?:\b(?:lines?|steps?|parts?|points?|items?|questions?|examples?|sections?|paragraphs?|criteri(?:on|a)|rules?|equations?|eqs?\.|"
    r"pages?|figures?|tables?|cases?|answers?|numbers?|n(?:o|r)\.|versions?|has|have|had|contains?|with|only|all|the|these|x\s*=|=)\s*"
    r"|\b(?!score|rating|grade|mark|final|overall|total|revised|verdict|actually|rather|now|then)[a-z]{3,}[*_]*\s*[:=][\s*_]*)\Z",
    re.IGNORECASE,
)
"""What makes the number behind it one of something else."""
_ALONE = re.compile(
    rf"\s*(?:\Z|_|[^\w\s.]|\.(?:\s|\Z)|\.\.|(?:{_AFTER}|points?(?!\s+(?:deducted|lost|off|subtracted|taken)))\b)",
    re.IGNORECASE,
)
"""What may follow a rating."""


class NoScore(ValueError):
    """An answer without a valid score; the message is for a person."""


def number_at(text: str, place: FoundRating, config: JudgeConfig) -> float:
    """Returns the number at a place of the text. Raises `NoScore`."""
    found = text[place.start : place.end]
    start = place.start + len(found) - len(found.lstrip())
    whole = _WHOLE.match(text, start)
    number = None if whole is None else number_in(whole[0].rstrip(".,_"))
    if whole is None or number is None:
        raise NoScore(f"there is {short_repr(found)}, which is no number, where the score should be")
    after = start + len(whole[0].rstrip(".,_"))
    scale = _OUT_OF.match(text, after, after + _BEYOND)
    behind = after if scale is None else scale.end(1)
    said = text[max(place.since, start - _BEYOND) : start].rpartition("\n")[2]
    if (
        (scale is not None and _size(scale[1]) != config.most)
        or not _is_of_scale(place.scale, config)
        or (_PERCENT.match(text, after, after + _BEYOND) and (config.least, config.most) != (0, 100))
        or _NEXT.match(text, behind, after + _BEYOND)
        or _LAST.search(re.sub(r"[<>]\Z", "", said) if text[after : after + 1] in ("<", ">") else said)
        or place.end < after
        or _is_another_in(text[behind : behind + _TAIL], number, config)
    ):
        line = text[start : start + _BEYOND].partition("\n")[0]
        raise NoScore(
            f"there is {printable(said[-20:] + line)!r} where the score should be; expected one number from {config.least:g} to "
            f"{config.most:g}, alone or out of {config.most:g}"
        )
    if text[behind : place.end].strip(" \t\n*_`\"'.,"):
        raise NoScore(f"there is {short_repr(found)}, which is no number, where the score should be")
    return number


def _is_of_scale(said: str, config: JudgeConfig) -> bool:
    """Whether what a label says in parentheses, as `(0-10)`, names no other scale."""
    sizes = [_size(each) for each in re.findall(_NUMBER, said, re.IGNORECASE)]
    return not sizes or max(filter(None, sizes), default=0.0) == config.most


def _is_another_in(tail: str, number: float, config: JudgeConfig) -> bool:
    """Whether another rating follows: in the same sentence, or where a later one begins, and not a number of something."""
    ends = _ENDS.search(tail)
    end = len(tail) if ends is None else ends.start()
    for each in (*_AGAIN.finditer(tail, 0, end), *_LATER.finditer(tail, end)):
        digits = each["number"].rstrip(".,_")
        value = number_in(digits)
        if value is None or value == number or not config.least <= value <= config.most:
            continue
        start, behind = each.start("number"), each.start("number") + len(digits)
        scale = _OUT_OF.match(tail, behind)
        is_share = scale is not None and _size(scale[1]) != config.most
        is_item = tail[:start].rstrip(" *_").endswith("\n") and re.match(r"[.)]\s+\S", tail[behind:])
        is_named = each.re is _AGAIN and _NAMED.search(tail[max(0, start - 24) : start])
        if not (is_share or is_item or is_named) and (scale or _ALONE.match(tail, behind)):
            return True
    return False


def _size(number: str) -> float | None:
    name = number.lower()
    return (
        100.0 if name.endswith("hundred") else float(_WORDS[name]) if name in _WORDS else number_in(name.rstrip(".,"))
    )
