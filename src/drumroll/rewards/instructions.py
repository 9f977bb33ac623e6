"""`instructions`: are the constraints of an instruction-following prompt kept? Ids and arguments as in IFEval (2311.07911).

Each constraint is one function of the text and its arguments. They run in the pool, because a text of a million brackets
takes some of them long. A keyword is a literal here, never a pattern.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drumroll.errors import MissingExtra, did_you_mean
from drumroll.rewards import REWARDS, Processes
from drumroll.rewards.extraction import after_thinking
from drumroll.rewards.sentences import capital_words, count_sentences
from drumroll.rewards.structured import load_json

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}
SECONDS = 20.0
"""CPU time; constraints that need more fail the sample."""
RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCES = ("```json", "```Json", "```JSON", "```")


@REWARDS.register("instructions")
async def instructions(
    completion: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any]],
    processes: Processes,
    fraction: bool = False,
) -> float:
    """1 when every constraint is kept; with `fraction`, the share that is."""
    arguments = {"text": after_thinking(completion), "ids": list(instruction_id_list), "kwargs": [dict(k) for k in kwargs]}
    kept = await processes.run("drumroll.rewards.instructions:check", arguments, SECONDS, cpu=True)
    return sum(kept) / len(kept) if fraction else float(all(kept))


def check(text: str, ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which constraints a text keeps; an empty one keeps none. Arguments that are None were not given."""
    if unknown := set(ids) - set(CHECKS):
        raise ValueError(f"there is no instruction '{min(unknown)}'.{did_you_mean(min(unknown), CHECKS)}")
    given = [{name: value for name, value in one.items() if value is not None} for one in kwargs]
    return [bool(text.strip()) and CHECKS[i](text, **arguments) for i, arguments in zip(ids, given, strict=True)]


def constraint(name: str) -> Callable[[Check], Check]:
    """Decorator that files a constraint under its id."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def meets(count: int, relation: str, limit: int) -> bool:
    """`at least` or `less than` the limit."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"a relation is 'at least' or 'less than', not '{relation}'")
    return count >= limit if relation == "at least" else count < limit


def language_of(text: str) -> str | None:
    """The code of a text's language, always the same for the same text; None if it has no letters."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError:
        raise MissingExtra("checking a text's language", "instructions") from None
    DetectorFactory.seed = 0
    try:
        return str(detect(text))
    except LangDetectException:
        return None


# --- keywords ---


@constraint("keywords:existence")
def keywords_exist(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, also within words."""
    return all(_occurrences(keyword, text) for keyword in keywords)


@constraint("keywords:frequency")
def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """A keyword occurs so often."""
    return meets(_occurrences(keyword.strip(), text), relation, frequency)


@constraint("keywords:forbidden_words")
def no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs as a word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


@constraint("keywords:letter_frequency")
def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """A letter occurs so often, in either case."""
    return meets(text.lower().count(letter.lower()), let_relation, let_frequency)


def _occurrences(keyword: str, text: str) -> int:
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


# --- language ---


@constraint("language:response_language")
def in_language(text: str, language: str) -> bool:
    """The text is in the language of this code; one without letters is in any."""
    return language_of(text) in (language, None)


# --- length ---


@constraint("length_constraints:number_sentences")
def number_of_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """So many sentences."""
    return meets(count_sentences(text), relation, num_sentences)


@constraint("length_constraints:number_words")
def number_of_words(text: str, num_words: int, relation: str) -> bool:
    """So many words; the marks of Hindi, Thai or Arabic belong to their word, which `re` does not know."""
    joined = "".join("m" if unicodedata.category(letter).startswith("M") else letter for letter in text)
    return meets(sum(1 for _ in re.finditer(r"\w+", joined)), relation, num_words)


@constraint("length_constraints:number_paragraphs")
def number_of_paragraphs(text: str, num_paragraphs: int) -> bool:
    """So many paragraphs, divided by ***; an empty one may only be the first or the last."""
    first, *between = [bool(part.strip()) for part in text.split("***")]
    last = between.pop() if between else False
    return all(between) and first + len(between) + last == num_paragraphs


@constraint("length_constraints:nth_paragraph_first_word")
def paragraph_starts_with(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs, divided by two line breaks, of which the n-th starts with a word."""
    paragraphs = text.split("\n\n")
    count = sum(1 for paragraph in paragraphs if paragraph.strip())
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


# --- content ---


@constraint("detectable_content:number_placeholders")
def number_of_placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many placeholders [in square brackets]."""
    return sum(1 for _ in re.finditer(r"\[.*?\]", text)) >= num_placeholders


@constraint("detectable_content:postscript")
def has_postscript(text: str, postscript_marker: str) -> bool:
    """The text has a postscript with this marker."""
    spelled = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(postscript_marker.strip())
    return re.search(spelled or re.escape(postscript_marker.strip().lower()), text.lower()) is not None


# --- format ---


@constraint("detectable_format:number_bullet_lists")
def number_of_bullets(text: str, num_bullets: int) -> bool:
    """Exactly so many lines that start with * or -."""
    return len(re.findall(r"^\s*\*[^*]", text, re.MULTILINE)) + len(re.findall(r"^\s*-", text, re.MULTILINE)) == num_bullets


@constraint("detectable_format:constrained_response")
def is_constrained(text: str) -> bool:
    """One of the three allowed answers is given."""
    return any(response in text for response in RESPONSES)


@constraint("detectable_format:number_highlighted_sections")
def number_of_highlights(text: str, num_highlights: int) -> bool:
    """At least so many *highlighted* or **highlighted** pieces of a line."""
    single = [piece for piece in re.findall(r"\*([^\n*]*)\*", text) if piece.strip()]
    double = [piece for piece in re.findall(r"\*\*([^\n*]*)\*\*", text) if piece.strip()]
    return len(single) + len(double) >= num_highlights


@constraint("detectable_format:multiple_sections")
def number_of_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections that start with the word and a number."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


@constraint("detectable_format:json_format")
def is_json(text: str) -> bool:
    """All of the text is JSON, alone or in one fenced block."""
    text = text.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        load_json(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@constraint("detectable_format:title")
def has_title(text: str) -> bool:
    """There is a title <<in double angles>>."""
    return re.search(r"<<[^\n]*[^<>\s][^\n]*>>", text) is not None


# --- combination, start and end ---


@constraint("combination:two_responses")
def two_responses(text: str) -> bool:
    """Two different answers, divided by ******."""
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


@constraint("combination:repeat_prompt")
def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The text starts with the prompt."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@constraint("startend:end_checker")
def ends_with(text: str, end_phrase: str) -> bool:
    """The text ends with a phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@constraint("startend:quotation")
def is_quoted(text: str) -> bool:
    """All of the text is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


# --- case and punctuation ---


@constraint("change_case:english_capital")
def in_capitals(text: str) -> bool:
    """English, in capital letters only."""
    return text.isupper() and language_of(text) in ("en", None)


@constraint("change_case:english_lowercase")
def in_lower_case(text: str) -> bool:
    """English, in lower-case letters only."""
    return text.islower() and language_of(text) in ("en", None)


@constraint("change_case:capital_word_frequency")
def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """So many words in capital letters only."""
    return meets(capital_words(text), capital_relation, capital_frequency)


@constraint("punctuation:no_comma")
def has_no_comma(text: str) -> bool:
    """There is no comma."""
    return "," not in text
