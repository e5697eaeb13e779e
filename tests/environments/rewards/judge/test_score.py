"""What of a judge's answer is exactly one rating on the scale. None: no score."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.judge.only_number import NoScore
from counterpoint.environments.rewards.judge.score import score_of
from counterpoint.environments.rewards.processes import BoundedProcesses

TO_FIVE: dict[str, Any] = {"least": 1.0, "most": 5.0}
TO_HUNDRED: dict[str, Any] = {"most": 100.0}

OF_THE_DEFAULT_PATTERN: list[tuple[str, float | None, dict[str, Any]]] = [
    ("Score: 9", 0.9, {}),
    ("Score: 3 at first.\n**Score:** 7.5", 0.75, {}),
    ("Score: 1e1.", 1.0, {}),
    # The scale may be named if it is the one.
    ("Score: 8/10", 0.8, {}),
    ("Score: **8** / 10.", 0.8, {}),
    ("**Score: 8** (out of ten)", 0.8, {}),
    ("Score: 4/5", 0.75, TO_FIVE),
    ("Score: 4 on a scale from 1 to 5", 0.75, TO_FIVE),
    ("Score: 80 out of a hundred", 0.8, TO_HUNDRED),
    ("Score: 80%", 0.8, TO_HUNDRED),
    ("Score: 4/5", None, {}),
    ("Score: 4 out of 5", None, {}),
    ("Score: 4 (out of five)", None, {}),
    ("Score: 4 stars out of 5", None, {}),
    ("Score: 4 on a scale of 1-5", None, {}),
    ("Score: 4 on a 5-point scale", None, {}),
    ("Score: 4\u20445", None, {}),
    ("Score: 8/10", None, TO_HUNDRED),
    ("Score: 8, out of 10", 0.8, {}),
    ("Score: 8 (1-10)", 0.8, {}),
    ("Score: 4, out of 5", None, {}),
    ("Score: 4 in 5", None, {}),
    ("Score: 4 \xf7 5", None, {}),
    ("Score: 4 \\ 5", None, {}),
    ("Score: 4 out of a total of 5", None, {}),
    ("Score: 4 of a max of 5", None, {}),
    ("Score: 4 \u2605 out of 5", None, {}),
    ("Score: 4 (1 to 5)", None, {}),
    ("Score: 4 (scale: 1-5)", None, {}),
    ("Score: 4 (on a 1-5 scale)", None, {}),
    ("Score: 4 (5 being the best)", None, {}),
    ("Score: 4, where 5 is best", None, {}),
    ("Score: 8%", None, {}),
    ("Score: 5 percent", None, TO_FIVE),
    # Two ratings, and what is about one.
    ("Score: 7-8", None, {}),
    ("Score: 7 \u2013 8", None, {}),
    ("Score: **7** to **8**", None, {}),
    ("Score: 7, or maybe 8", None, {}),
    ("Score: 7 or eight", None, {}),
    ("Score: 7, 8", None, {}),
    ("Score: 7 -> 8", None, {}),
    ("Score: 7/8/10", None, {}),
    ("Score: 8/10 or 9/10", None, {}),
    ("Score: 7\xb11", None, {}),
    ("Score: 7+", None, {}),
    ("Score: 7 \xbd", None, {}),
    ("Score: 7 8", None, {}),
    ("Score: 7 1/2", None, {}),
    ("Score: 7 and a half", None, {}),
    ("Score: 7, possibly 8", None, {}),
    ("Score: 7, could be 8", None, {}),
    ("Score: 7 up to 8", None, {}),
    ("Score: 7 vs. 8", None, {}),
    ("Score: 7 instead of 8", None, {}),
    ("Score: 7 -> final: 8", None, {}),
    ("Score: 7\uff0d8", None, {}),
    ("Score: 4\xbd", None, {}),
    ("Score: 7,5", None, {}),
    ("Score: \u22121", None, {}),
    # The last label counts, also where nothing follows it.
    ("Score: 3 for style. Score: N/A", None, {}),
    ("Score: 3\nScore: ~8", None, {}),
    # Numbers that are no ratings.
    ("Score: 7. It has 2 mistakes.", 0.7, {}),
    ("Score: 7\n- 2 mistakes", 0.7, {}),
    ("Score: 7 because 2 of 3 are right", 0.7, {}),
    ("Score: 7 (see lines 3-5), reason: half of it is wrong", 0.7, {}),
    ("Score: 7 - it has 2 mistakes", 0.7, {}),
    ("Score: 7\n1. The sum is right.\n2. It is short.", 0.7, {}),
    ("Score: 3 because the answer 5 is wrong", 0.3, {}),
    ("Score: 7, since 8 would need a proof", 0.7, {}),
    ("Score: 8, style: 7", 0.8, {}),
    ("Score: 8 (2 points deducted for its style)", 0.8, {}),
    ("Score: 8. I took 2 points off.", 0.8, {}),
    ("Score: 8 - two minor errors", 0.8, {}),
    ("Score: 8, one small mistake", 0.8, {}),
    ("Score: 7 - eight points", None, {}),
    ("Score: 7, eight", None, {}),
    ("Score: 7, eight overall", None, {}),
    ("Score: 7 - eight if it is short", None, {}),
    ("Score: 7 or eight overall", None, {}),
    ("Score: 7 for content, 8 points for style", None, {}),
    ("Score: 8 (maximum: 10)", 0.8, {}),
    ("Score: 7, with 2 mistakes, 3 of them small", 0.7, {}),
    ("Score: 7. In line 3, x = 2.", 0.7, {}),
    ("Score: 7. The answer is 5.", 0.7, {}),
    ("Score: 7, found in 2019", 0.7, {}),
    # Forms of a label.
    ("Score: [8]", 0.8, {}),
    ("Score\uff1a8", 0.8, {}),
    ("Score: (8)", 0.8, {}),
    ("Score: $8$", 0.8, {}),
    ("Score: \\(8\\)", 0.8, {}),
    ("Score: $\\boxed{8}$", 0.8, {}),
    ("Score: <8>", 0.8, {}),
    ("<score>8</score>", 0.8, {}),
    ("<score> 8 </score>", 0.8, {}),
    ("<score>\n8\n</score>", 0.8, {}),
    ("<score> < 8 </score>", None, {}),
    ("Score > 8", None, {}),
    ("Score>8", None, {}),
    ("**Score:** 8", 0.8, {}),
    ("**Score**: **8**", 0.8, {}),
    ("**Score**\n8", 0.8, {}),
    ("### Score\n\n8/10", 0.8, {}),
    ("Score - 8", 0.8, {}),
    ("Score \u2013 8", 0.8, {}),
    ("Score -> 8", 0.8, {}),
    ("Score 8", 0.8, {}),
    ("| Score | 8 |", 0.8, {}),
    ("Score (out of 10): 8", 0.8, {}),
    ("Score (0-10): 8", 0.8, {}),
    ("Score out of 10: 8", 0.8, {}),
    ("Score (out of 5): 4", None, {}),
    ("Score (1-5): 4", None, {}),
    ("Score (out of five): 4", None, {}),
    ("Rating: 8.", 0.8, {}),
    ("Rating: [[8]]", 0.8, {}),
    ("Overall rating: 8/10", 0.8, {}),
    ("Rating: 4/5", None, {}),
    ("Rating: 7\nScore: 8", 0.8, {}),
    ("Score: 8\nRating: good", 0.8, {}),
    # A number alone, and sentences.
    ("8", 0.8, {}),
    ("**8/10**\n", 0.8, {}),
    ("4/5", None, {}),
    ("8 of the steps", None, {}),
    ("The score is 8", 0.8, {}),
    ("The final score is **8**.", 0.8, {}),
    ("My rating is 8 out of 10.", 0.8, {}),
    ("I give it a score of 8.", 0.8, {}),
    ("The score is 8/5", None, {}),
    ("The score is 7 or 8", None, {}),
    ("The score is not 8", None, {}),
    ("The score would be 8 if it had a proof.", None, {}),
    ("If it had a proof, the score is 8.", None, {}),
    ("A score of 10 would need a proof.", None, {}),
    ("A wrong answer gets score 0.", None, {}),
    ("The maximum score is 10.", None, {}),
    ("The score is 8. Then again, the score is 7.", None, {}),
    ("Score: 8\nA perfect answer would get score 10.", 0.8, {}),
    ("Score: 8. The highest score is 10.", 0.8, {}),
    ("Score: 8\nMaximum score: 10", 0.8, {}),
    # Ratings that differ.
    ("Score: 7 at first, 8 on reflection", None, {}),
    ("Score: 7 (was 8)", None, {}),
    ("Score: 7, down from 8", None, {}),
    ("Score: 7 for content; 8 for style", None, {}),
    ("Score: 7 (content), 8 (style)", None, {}),
    ("Score: 7. On reflection, 8.", None, {}),
    ("Score: 7. Actually, 8.", None, {}),
    ("Score: 7... no, wait, 8", None, {}),
    ("Score: 7? No: 8", None, {}),
    ("Score: 7\nFinal: 8", None, {}),
    ("Score: 7\nRating: 8/10", None, {}),
    ("Score: 7\n8", None, {}),
    ("Score: 7. 8 on reflection", None, {}),
    ("Score: 7, else 8", None, {}),
    ("Content score: 7\nStyle score: 9", None, {}),
    ("Assistant A score: 7\nAssistant B score: 9", None, {}),
    ("Score: < 8", None, {}),
    ("Score: 8-", None, {}),
    ("Score (content): 7\nScore (style): 9", None, {}),
    ("Content score: 7\nStyle score: 9\nScore: 8", 0.8, {}),
    ("Overall score: 8\nStyle score: 7", 0.8, {}),
    ("Quality score: 8", 0.8, {}),
    ("Score: 3, score: 8", None, {}),
    ('{"score": 3, "score": 8}', None, {}),
    ('{"why": "2 of 3", "score": 8}', 0.8, {}),
    ("Score: 8\nScore: 8/10", 0.8, {}),
    # What the completion says.
    ('The completion claims "Score: 10", which is wrong.', None, {}),
    ("It ends with `Score: 10`. I ignore that.\nScore: 2", 0.2, {}),
    ("Score: 2\nIt has the words \u201cScore: 10\u201d.", 0.2, {}),
    ("`Score: 8`", 0.8, {}),
    ("So my rating is `Score: 8`.", 0.8, {}),
    # Reasoning.
    ("<think>Wrong would be score 0.</think>It is right.", None, {}),
    ("<think>Score: 3", None, {}),
    ("[THINK]Score: 3[/THINK]**Score: 9**", 0.9, {}),
    # Hostile.
    ("Score: 8" + " " * 500_000 + "/5", 0.8, {}),
    ("Score: 8" + "( " * 250_000, 0.8, {}),
    ("score " * 100_000 + "\nScore: 8", 0.8, {}),
    ("the score is the " * 50_000 + "\nScore: 8", 0.8, {}),
    ("Score: 8. " + "no, " * 100_000, 0.8, {}),
    ("Score: 8 with" + " 9 mistakes," * 50_000, 0.8, {}),
    ("<think>" * 100_000 + "Score: 8", None, {}),
]

OF_OTHER_PATTERNS: list[tuple[str, str, float | None]] = [
    (r"Rating: (\d+)", "Rating: 4", 0.4),
    (r"Rating: (\d+)", "Rating: 4.5", None),
    (r"Rating: (\d)", "Rating: 10", None),
    (r"Rating.*(\d+)", "Rating: 10", None),
    (r"Rating: (\d+)", "Rating: 4/5", None),
    (r"Rating: (.+)", "Rating: 8/10", 0.8),
    (r"Rating: (.+)", "Rating: 8 of the best", None),
    (r"<score>(.+?)</score>", "<score>8</score>", 0.8),
    (r"\[\[(\d+)\]\]", "[[7]] or [[8]]", None),
    (r"(\d+)\s*\Z", "7-8", None),
    (r"(\d+)\s*\Z", "It is right.\n8\n", 0.8),
    (r"good|(\d+)", "8, good", None),
    (r"\d+", "8", 0.8),
    (r"Rating: (\d+)", "Rating: 7 at first, 8 on reflection", None),
    (r"Rating: (\d+)", "Rating: 7. Actually, 8.", None),
]

AT_A_KEY: list[tuple[str, float | None]] = [
    ('Well: {"why": "2 of 3", "score": 8}', 0.8),
    ('{"score": 3, "score": 8}', None),
    ('{"parts": {"style": 1, "style": 2}, "score": 8}', None),
    ('{"score": 3}\n{"score": 8}', None),
    ('{"score": "4/5"}', None),
    ('{"score": [7, 8]}', None),
    ('<think>{"score": 3}</think>It is right.', None),
    ('<think>{"score": 3}</think>{"score": 8}', 0.8),
    ('{"score": 1' + "0" * 5000 + "}", None),
    ('{"a":' * 100_000, None),
]


async def outcome(processes: BoundedProcesses, text: str, **keys: Any) -> float | None:
    config = JudgeConfig(kind="judge", base_url="http://127.0.0.1:1/v1", model="m", **keys)
    try:
        return round(await score_of(text, config, processes), 9)
    except NoScore:
        return None


@pytest.mark.slow
async def test_an_answer_is_one_rating_on_the_scale_or_none() -> None:
    processes = BoundedProcesses(1)
    try:
        for text, expected, keys in OF_THE_DEFAULT_PATTERN:
            assert (text, await outcome(processes, text, **keys)) == (text, expected)
        for pattern, text, expected in OF_OTHER_PATTERNS:
            found = await outcome(processes, text, score_pattern=pattern)
            assert (pattern, text, found) == (pattern, text, expected)
    finally:
        await processes.close()


@pytest.mark.parametrize(("text", "expected"), AT_A_KEY, ids=range(len(AT_A_KEY)))
async def test_a_number_at_a_key_stands_there_once(text: str, expected: float | None) -> None:
    assert await outcome(BoundedProcesses(1), text, score_key="score") == expected
